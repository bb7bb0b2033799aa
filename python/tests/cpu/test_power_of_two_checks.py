"""What judges power-of-two scales on a GPU: it takes the emulation, and refuses any operand in the other format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.plain import quantize
from mega_moe._base.layer import Gradients
from mega_moe._base.mode import Mode

# What is tested here lies alongside the GPU tests that use it.
from ..gpu import _backward_fp8, _emulated, _forward, _forward_fp8  # noqa: TID252
from ..gpu._backward import random_dy  # noqa: TID252
from ..gpu._forward_ranks import shape_of  # noqa: TID252
from ..gpu._scales import assert_powers_of_two  # noqa: TID252
from ..gpu._virtual import random_ids  # noqa: TID252

HIDDEN, INNER = 512, 384
# What is quantized, by the length of its rows.
X_OR_DY, H, DZ = HIDDEN, INNER, 2 * INNER


@pytest.fixture(scope="module")
def layer() -> _forward.Layer:
    cpu = torch.device("cpu")
    ids = random_ids("masked", [200, 150], 3, 6, cpu)
    return _forward.random_layer(ids, _forward.random_experts(cpu, 6, HIDDEN, INNER), weights="signed")


def forget(patch: pytest.MonkeyPatch, operand: int | str) -> None:
    """Rows of that length, the weights, or operands of weights' gradients keep fp32 scales."""
    names = ("quantize_rows", "quantize_weight", "wgrad_gemm")
    whole: dict[str, Any] = {name: getattr(quantize, name) for name in names}

    def rows(value: Tensor, power_of_two: bool = False, **how: Any) -> Any:
        return whole["quantize_rows"](value, power_of_two and value.shape[1] != operand, **how)

    def weight(value: Tensor, power_of_two: bool = False, **how: Any) -> Any:
        return whole["quantize_weight"](value, power_of_two and operand != "weights", **how)

    def product(left: Tensor, right: Tensor, power_of_two: bool = False, *how: Any) -> Any:
        return whole["wgrad_gemm"](left, right, power_of_two and operand != "gradients", *how)

    patch.setattr(quantize, "wgrad_gemm", product)
    patch.setattr(quantize, "quantize_rows", rows)
    patch.setattr(_emulated, "quantize_rows", rows)
    patch.setattr(quantize, "quantize_weight", weight)


@pytest.fixture(scope="module")
def forward(layer: _forward.Layer) -> _forward_fp8.Judge:
    return _forward_fp8.Judge(layer, power_of_two=True)


def test_the_forward_is_taken(layer: _forward.Layer, forward: _forward_fp8.Judge) -> None:
    forward.assert_right(_emulated.emulated(layer, "fp8", power_of_two=True))


@pytest.mark.parametrize("operand", [X_OR_DY, H, "weights"])
def test_a_forward_that_forgets_an_operand_is_refused(
    layer: _forward.Layer, forward: _forward_fp8.Judge, operand: int | str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, operand)
        spoiled = _emulated.emulated(layer, "fp8", power_of_two=True)
    with pytest.raises(AssertionError, match="rank"):
        forward.assert_right(spoiled)


def gradients(layer: _forward.Layer, shape: Shape | None = None) -> list[Gradients]:
    made = _backward_fp8.emulated_gradients(layer, random_dy(layer), shape, power_of_two=True)
    dw = zip(made.dw_gate_up.chunk(2), made.dw_down.chunk(2), strict=True)
    return [Gradients(dx, dtopk, *own) for dx, dtopk, own in zip(made.dx, made.dtopk, dw, strict=True)]


@pytest.fixture(scope="module")
def backward(layer: _forward.Layer) -> _backward_fp8.Judge:
    return _backward_fp8.Judge(layer, random_dy(layer), power_of_two=True)


def test_the_backward_is_taken(layer: _forward.Layer, backward: _backward_fp8.Judge) -> None:
    backward.assert_right(gradients(layer))


@pytest.mark.parametrize("operand", [X_OR_DY, DZ, "weights"])
def test_a_backward_that_forgets_an_operand_is_refused(
    layer: _forward.Layer, backward: _backward_fp8.Judge, operand: int | str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, operand)
        spoiled = gradients(layer)
    with pytest.raises(AssertionError, match="rank"):
        backward.assert_right(spoiled)


@pytest.mark.parametrize("operand", [None, "gradients"])
def test_gradients_of_weights_in_the_other_format_are_refused(
    layer: _forward.Layer, operand: str | None
) -> None:
    shape = shape_of(layer, mode=Mode("fp8", "fp8", "fp8", "power_of_two"))
    judge = _backward_fp8.Judge(layer, random_dy(layer), shape, power_of_two=True)
    if operand is None:
        judge.assert_right(gradients(layer, shape))
        return
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, operand)
        spoiled = gradients(layer, shape)
    nothing = Gradients(None, None, None, None)
    for name in ("dw_gate_up", "dw_down"):
        alone = [nothing._replace(**{name: getattr(own, name)}) for own in spoiled]
        with pytest.raises(AssertionError, match=f"{name}: .* from the emulation"):
            judge.assert_right(alone)


def test_scales_that_are_no_powers_are_refused() -> None:
    nothing = torch.full((5,), torch.nan)
    scales = torch.cat((2.0 ** torch.arange(-149, 120).float(), nothing))
    assert_powers_of_two(scales, 269)
    with pytest.raises(AssertionError, match="269 scales are numbers, want 270"):
        assert_powers_of_two(scales, 270)
    for wrong in (3.0, 0.0, 3 * 2.0**-149):
        with pytest.raises(AssertionError, match="1 of 270 scales"):
            assert_powers_of_two(torch.cat((scales, torch.tensor([wrong]))), 269)
