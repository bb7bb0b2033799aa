"""Weight gradients added into buffers of the caller, as trainers with an fp32 `main_grad` want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.testing import Gradients, Problem, random_problem, relative_l2

from ._fake_kernels import fake_kernels
from ._layer import assert_same_bits, bits, exact, make_buffer, results

_ = fake_kernels  # a fixture

COUNTS = ([10, 20, 12, 6], [10, 32, 0, 6], [0, 3, 5, 40])  # rows of each expert in three micro-batches
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["reference", "grouped", "dispatched", "fused"])
def buffer(request: pytest.FixtureRequest) -> Iterator[MoEBuffer]:
    if request.param == "fused":
        request.getfixturevalue("fake_kernels")
    with make_buffer(micro_batch(0), request.param) as made:
        yield made


def micro_batch(index: int) -> Problem:
    """Tokens of their own, the experts of batch 0."""
    first = random_problem(hidden=128, intermediate=64, counts=COUNTS[0])
    if index == 0:
        return first
    other = random_problem(hidden=128, intermediate=64, counts=COUNTS[index], seed=index)
    return replace(other, w_gate_up=first.w_gate_up, w_down=first.w_down)


def buffers_for(problem: Problem, dtype: torch.dtype, value: float = 0) -> tuple[Tensor, Tensor]:
    return tuple(torch.full_like(w, value, dtype=dtype) for w in (problem.w_gate_up, problem.w_down))  # type: ignore[return-value]


def wide_gradients(problem: Problem, buffer: MoEBuffer) -> tuple[Tensor, Tensor]:
    """dW of one micro-batch before its only rounding."""
    into = buffers_for(problem, torch.float32)
    leaves = problem.requires_grad()
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    return into


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_micro_batches_add_up(buffer: MoEBuffer, dtype: torch.dtype) -> None:
    batches = [micro_batch(i) for i in range(3)]
    wide = [wide_gradients(batch, buffer) for batch in batches]
    into = buffers_for(batches[0], dtype)
    shared = batches[0].requires_grad()
    leaves = [replace(b.requires_grad(), w_gate_up=shared.w_gate_up, w_down=shared.w_down) for b in batches]
    outputs: dict[int, Tensor] = {}

    def forward(i: int) -> None:
        outputs[i] = mega_moe.moe(*leaves[i].inputs, buffer=buffer, grad_buffers=into)

    # Pipeline order: forward A, forward B, backward B, backward A, then C.
    forward(0)
    forward(1)
    for i in (1, 0):
        outputs[i].backward(leaves[i].dy)
    forward(2)
    outputs[2].backward(leaves[2].dy)

    for got, a, b, c in zip(into, *wide):
        want = torch.zeros_like(got)
        for part in (b, a, c):
            want = (want.float() + part).to(dtype)  # one rounding per addition
        assert torch.equal(bits(got), bits(want))
    exact_sums = [sum(parts) for parts in zip(*((e.dw_gate_up, e.dw_down) for e in map(exact, batches)))]
    for got, want in zip(into, exact_sums):
        assert relative_l2(got, want) <= 6e-3  # type: ignore[arg-type]
    for weight in (shared.w_gate_up, shared.w_down):
        assert weight.grad is not None
        assert torch.count_nonzero(weight.grad) == 0
    for i, leaf in enumerate(leaves):
        want_rows = results(batches[i], buffer)
        assert torch.equal(bits(leaf.x.grad), bits(want_rows.dx))  # type: ignore[arg-type]
        assert torch.equal(bits(leaf.topk_weights.grad), bits(want_rows.dtopk))  # type: ignore[arg-type]


def test_the_buffers_hold_what_grad_would_round(buffer: MoEBuffer) -> None:
    problem = micro_batch(1)
    plain = results(problem, buffer)
    for got, want in zip(wide_gradients(problem, buffer), (plain.dw_gate_up, plain.dw_down)):
        if buffer.backend == "reference":
            assert torch.equal(bits(got.bfloat16()), bits(want))
            assert torch.count_nonzero(got != want) > got.numel() // 2  # fp32, not a rounded bf16
        else:
            assert relative_l2(got, want) <= 6e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_without_tokens_adds_nothing(buffer: MoEBuffer, dtype: torch.dtype) -> None:
    problem = micro_batch(1)
    into = buffers_for(problem, dtype, value=7.0)
    leaves = problem.requires_grad()
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    for grad in into:
        assert torch.equal(grad[2], torch.full_like(grad[2], 7.0))
        assert not torch.equal(grad[1], torch.full_like(grad[1], 7.0))


def test_no_tokens_add_nothing(buffer: MoEBuffer) -> None:
    problem = micro_batch(0).tokens(slice(0, 0))
    for grad in wide_gradients(problem, buffer):
        assert torch.count_nonzero(grad) == 0


def test_hooks_of_the_weights_fire(buffer: MoEBuffer) -> None:
    problem = micro_batch(0)
    into = buffers_for(problem, torch.float32)
    leaves = problem.requires_grad()
    fired: list[Any] = []
    for weight in (leaves.w_gate_up, leaves.w_down):
        weight.register_hook(lambda grad: fired.append(("hook", torch.count_nonzero(grad).item())))
        weight.register_post_accumulate_grad_hook(lambda p: fired.append(("accumulated", tuple(p.shape))))
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    shapes = [tuple(w.shape) for w in (leaves.w_gate_up, leaves.w_down)]
    assert sorted(fired) == sorted([("hook", 0)] * 2 + [("accumulated", shape) for shape in shapes])


def test_grads_from_elsewhere_stay(buffer: MoEBuffer) -> None:
    problem = micro_batch(0)
    leaves = problem.requires_grad()
    into = buffers_for(problem, torch.float32)
    penalty = 0.5 * (leaves.w_down.float().square().sum())
    y = mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into)
    torch.autograd.backward((y, penalty), (leaves.dy, None))
    assert torch.equal(leaves.w_down.grad, problem.w_down)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_weight_leaves_its_buffer_alone(buffer: MoEBuffer, frozen: int) -> None:
    problem = micro_batch(0)
    wide = wide_gradients(problem, buffer)
    leaves = problem.requires_grad((True, True, frozen != 0, frozen != 1))
    into = buffers_for(problem, torch.float32)
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    assert torch.count_nonzero(into[frozen]) == 0
    assert torch.equal(bits(into[1 - frozen]), bits(wide[1 - frozen]))
    assert (leaves.w_gate_up, leaves.w_down)[frozen].grad is None


def test_buffers_of_any_strides(buffer: MoEBuffer) -> None:
    problem = micro_batch(0)
    wide = wide_gradients(problem, buffer)
    flat = [torch.zeros(w.shape[0], w.shape[2], w.shape[1]) for w in (problem.w_gate_up, problem.w_down)]
    leaves = problem.requires_grad()
    into = (flat[0].transpose(1, 2), flat[1].transpose(1, 2))
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    for got, want in zip(into, wide):
        assert torch.equal(bits(got), bits(want))


def test_saved_tensor_hooks_leave_the_buffers_alone(buffer: MoEBuffer) -> None:
    problem = micro_batch(0)
    wide = wide_gradients(problem, buffer)
    leaves, into = problem.requires_grad(), buffers_for(problem, torch.float32)
    with torch.autograd.graph.save_on_cpu():
        y = mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into)
    y.backward(leaves.dy)
    plain = results(problem, buffer)
    got = Gradients(y, leaves.x.grad, leaves.topk_weights.grad, *plain[3:])  # type: ignore[arg-type]
    assert_same_bits(got, plain)
    for grad, want in zip(into, wide):
        assert torch.equal(bits(grad), bits(want))
