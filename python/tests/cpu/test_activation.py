"""`mega_moe.Activation`: what it refuses, and that every door of the package takes it alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mega_moe
from mega_moe import Activation
from mega_moe.testing import fp64_moe, random_problem

SIZES: dict[str, Any] = dict(
    num_experts=4, max_tokens_per_rank=16, top_k=2, hidden=16, intermediate=8, backend="grouped"
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(kind="gpt_oss"),
            ValueError,
            "kind 'gpt_oss', which this version does not serve yet, want one of swiglu",
        ),
        (dict(kind="relu"), ValueError, "kind 'relu', want one of swiglu"),
        (dict(clamp=0), ValueError, "clamp 0, want None or a number > 0"),
        (dict(clamp=float("nan")), ValueError, "clamp nan, want None or a number > 0"),
        (dict(clamp="7"), TypeError, r"clamp '7' \(str\)"),
        (dict(clamp=True), TypeError, r"clamp True \(bool\)"),
        (dict(alpha=1.7), ValueError, "alpha 1.7 with kind 'swiglu', which has none"),
    ],
)
def test_bad_ones_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"activation: got {message}"):
        Activation(**arguments)


def test_every_door_takes_it() -> None:
    problem = random_problem(16, 16, 8, 4, 2, dtype=torch.float32)
    want = fp64_moe(*problem.inputs, activation=Activation(clamp=0.3))
    plain = fp64_moe(*problem.inputs)
    assert not torch.allclose(want, plain, rtol=1e-3)

    def close(y: torch.Tensor) -> bool:
        return torch.allclose(y.double(), want, rtol=1e-4, atol=1e-4)

    with mega_moe.MoEBuffer(**SIZES, dtype=torch.float32, activation=Activation(clamp=0.3)) as buffer:
        assert close(mega_moe.moe(*problem.inputs, buffer=buffer))  # the buffer's
        wide = mega_moe.moe(*problem.inputs, buffer=buffer, activation=Activation())
        assert torch.allclose(wide.double(), plain, rtol=1e-4, atol=1e-4)  # the call's own
    with mega_moe.MoEBuffer(**SIZES, dtype=torch.float32) as buffer:
        assert close(mega_moe.moe(*problem.inputs, buffer=buffer, activation=Activation(clamp=0.3)))
        assert close(mega_moe.moe(*problem.inputs, buffer=buffer, activation_clamp=0.3))
        for options in (dict(activation=Activation(clamp=0.3)), dict(activation_clamp=0.3)):
            layer = mega_moe.nn.MegaMoE(16, 8, 4, buffer=buffer, **options)  # type: ignore[arg-type]
            with torch.no_grad():
                layer.gate_up_proj.copy_(problem.w_gate_up)
                layer.down_proj.copy_(problem.w_down)
            assert close(layer(*problem.inputs[:3]))
    assert mega_moe.explain(**SIZES, activation=Activation(clamp=1.0)).request.activation == "swiglu"


def test_both_forms_together_are_refused() -> None:
    problem = random_problem(16, 16, 8, 4, 2, dtype=torch.float32)
    with mega_moe.MoEBuffer(**SIZES, dtype=torch.float32) as buffer:
        with pytest.raises(ValueError, match=r"activation_clamp: got 1\.0 alongside activation"):
            mega_moe.moe(*problem.inputs, buffer=buffer, activation=Activation(), activation_clamp=1.0)
        with pytest.raises(ValueError, match=r"activation_clamp: got 1\.0 alongside activation"):
            mega_moe.nn.MegaMoE(16, 8, 4, activation=Activation(), activation_clamp=1.0)
        with pytest.raises(TypeError, match=r"activation: got str, want a mega_moe\.Activation"):
            mega_moe.moe(*problem.inputs, buffer=buffer, activation="swiglu")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="activation_clamp: got -1, want None or a number > 0"):
            mega_moe.moe(*problem.inputs, buffer=buffer, activation_clamp=-1)
    with pytest.raises(TypeError, match=r"activation: got float, want a mega_moe\.Activation"):
        mega_moe.MoEBuffer(**SIZES, activation=1.0)  # type: ignore[arg-type]
