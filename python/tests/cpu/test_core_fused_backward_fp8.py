"""The fused backend with a backward kernel in fp8, which a fake stands in for: launches, copies, results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._backends.fused.layer import KernelLayer
from mega_moe._base.layer import LayerInputs
from mega_moe.nn import MegaMoE
from mega_moe.testing import Problem, random_problem, relative_l2

from ._fake_kernels import FakeKernels, fake_both
from ._layer import make_buffer, results

_ = fake_both  # a fixture

EXPERTS, HIDDEN, INNER = 8, 512, 128
GATE_UP, DOWN = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
OF_FORWARD = [(GATE_UP, True, False), (DOWN, True, False)]
OF_BACKWARD = [(GATE_UP, True, True), (DOWN, False, True)]


@pytest.fixture
def problem() -> Problem:
    return random_problem(60, HIDDEN, INNER, EXPERTS, 3, masked=0.1)


def ops(fake: FakeKernels) -> list[str]:
    return [launch.op for launch in fake.launches]


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_fp8_reads_copies_in_both_directions(
    problem: Problem, fake_both: FakeKernels, clamp: float | None
) -> None:
    with make_buffer(problem, "fused", "fp8") as buffer:
        got = results(problem, buffer, clamp)
    assert ops(fake_both) == ["forward fp8", "backward fp8"]
    assert fake_both.quantized == OF_FORWARD + OF_BACKWARD
    assert fake_both.fp8_forwards == [True]
    with make_buffer(problem, "reference", "fp8") as buffer:
        want = results(problem, buffer, clamp)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert torch.equal(a, b), name


def test_fp8_bwd_reads_them_in_the_backward_alone(problem: Problem, fake_both: FakeKernels) -> None:
    with make_buffer(problem, "fused", "fp8_bwd") as buffer:
        assert buffer.reason == "fused"
        got = results(problem, buffer)
    assert ops(fake_both) == ["forward", "backward fp8"]
    assert fake_both.quantized == OF_BACKWARD
    assert fake_both.fp8_forwards == [False]
    with make_buffer(problem, "reference", "fp8_bwd") as buffer:
        want = results(problem, buffer)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_gradients_of_weights_in_fp8(problem: Problem, fake_both: FakeKernels, precision: str) -> None:
    form = {"precision": precision, "dw_precision": "fp8"}
    with make_buffer(problem, "fused", **form) as buffer:
        assert (buffer.reason, buffer.dw_precision) == ("fused", "fp8")
        got = results(problem, buffer)
    assert ops(fake_both)[-1] == "backward fp8 wgrad"
    with make_buffer(problem, "reference", **form) as buffer:
        want = results(problem, buffer)
    with make_buffer(problem, "reference", precision) as buffer:
        other = results(problem, buffer)
    for name, a, b, c in zip(want._fields, got, want, other, strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (not name.startswith("dw_")), name


def test_weights_that_are_not_contiguous_are_read_by_their_copies_alone(
    problem: Problem, fake_both: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_buffer(problem, "fused", "fp8_bwd") as buffer:
        want = results(problem, buffer)
    made: list[tuple[int, ...]] = []
    backward = KernelLayer.backward

    def seen(self: KernelLayer, dy: torch.Tensor, inputs: LayerInputs, *given: Any, **options: Any) -> Any:
        made.extend(value.stride() for value in inputs[3:])
        got = backward(self, dy, inputs, *given, **options)
        assert all(value.is_contiguous() for value in (got[0].dw_gate_up, got[0].dw_down))
        return got

    monkeypatch.setattr(KernelLayer, "backward", seen)
    across = dataclasses.replace(
        problem, w_gate_up=problem.w_gate_up.mT.contiguous().mT, w_down=problem.w_down.mT.contiguous().mT
    )
    with make_buffer(across, "fused", "fp8_bwd") as buffer:
        got = results(across, buffer)
    assert made == [across.w_gate_up.stride(), across.w_down.stride()]
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert torch.equal(a, b), name


def test_copies_that_are_kept_are_made_once_for_both_directions(
    problem: Problem, fake_both: FakeKernels
) -> None:
    with make_buffer(problem, "fused", "fp8") as buffer:
        layer = MegaMoE(HIDDEN, INNER, EXPERTS, buffer=buffer, dtype=torch.bfloat16)
        with buffer.reuse_weight_copies():
            for _ in range(2):
                layer(problem.x, problem.topk_idx, problem.topk_weights).backward(problem.dy)
    assert ops(fake_both) == ["forward fp8", "backward fp8"] * 2
    assert fake_both.quantized == [(GATE_UP, True, True), (DOWN, True, True)]


def test_gradients_are_added_by_the_kernel(problem: Problem, fake_both: FakeKernels) -> None:
    into = tuple(torch.ones_like(w, dtype=torch.float32) for w in (problem.w_gate_up, problem.w_down))
    with make_buffer(problem, "fused", "fp8") as buffer:
        want = results(problem, buffer)
        leaves = problem.requires_grad()
        mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)  # type: ignore[arg-type]
    assert ops(fake_both)[-1] == "backward into fp8"
    for got, gradient in zip(into, (want.dw_gate_up, want.dw_down)):
        assert float((got.double() - 1 - gradient.double()).norm() / gradient.double().norm()) < 6e-3


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_gate_and_up_are_kept_for_a_backward_in_fp8(
    problem: Problem, fake_both: FakeKernels, precision: str
) -> None:
    with make_buffer(problem, "fused", precision, save_gate_up=1.0) as buffer:
        rows = buffer.saved_nbytes(60) // (4 * buffer.intermediate)
        assert rows >= 60 * buffer.top_k
        results(problem, buffer)
    assert [launch.saved_rows for launch in fake_both.launches] == [rows, rows]


def test_a_buffer_without_a_backward_has_no_codes(problem: Problem, fake_both: FakeKernels) -> None:
    with make_buffer(problem, "fused", "fp8") as buffer:
        assert isinstance(buffer, MoEBuffer)
        shape = buffer._live().executor._kernels.shape  # type: ignore[attr-defined]
        assert shape.mode == ("fp8", "fp8", "bf16", "fp32")
    with make_buffer(problem, "fused", "bf16") as buffer:
        shape = buffer._live().executor._kernels.shape  # type: ignore[attr-defined]
        assert shape.mode == ("bf16", "bf16", "bf16", "fp32")


@pytest.mark.parametrize("dw_precision", ["bf16", "fp8"])
@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_every_launch_rounds_scales_as_the_buffer_says(
    problem: Problem, fake_both: FakeKernels, precision: str, dw_precision: str
) -> None:
    """Copies of the weights, both kernels and calls on codes that the caller made."""
    form = {"precision": precision, "dw_precision": dw_precision}
    with make_buffer(problem, "reference", **form, scale_format="power_of_two") as buffer:
        want = results(problem, buffer)
    launches = 2 if precision == "fp8" else 1
    for scale_format in ("fp32", "power_of_two"):
        with make_buffer(problem, "fused", **form, scale_format=scale_format) as buffer:
            got = results(problem, buffer)
            given = buffer._live().prequantized
            if given is not None:
                # One memory, whose mode says how every launch on it rounds.
                assert given._kernels is buffer._live().executor._kernels  # type: ignore[attr-defined]
        assert fake_both.rounded == [scale_format == "power_of_two"] * launches
        fake_both.rounded.clear()
    for name, a, b in zip(want._fields, got, want, strict=True):
        if name != "y" or precision == "fp8":
            assert relative_l2(a, b) < 6e-3, name
