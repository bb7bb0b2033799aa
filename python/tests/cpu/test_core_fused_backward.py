"""The fused backend with a backward kernel, which a fake stands in for: launches, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._backends.fused import faults
from mega_moe.testing import Problem, random_problem

from ._fake_kernels import FakeKernels, fake_both
from ._layer import assert_close, exact, make_buffer, results

_ = fake_both  # a fixture

TOLERANCE = 6e-3


@pytest.fixture
def problem() -> Problem:
    return random_problem(60, 256, 128, 8, 3, masked=0.1)


@pytest.fixture
def buffer(fake_both: FakeKernels, problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "fused") as made:
        yield made


def ops(fake: FakeKernels) -> list[str]:
    return [launch.op for launch in fake.launches]


def test_both_directions_are_one_launch_each(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    before = fake_both.synchronized
    assert_close(results(problem, buffer), exact(problem), TOLERANCE)
    assert ops(fake_both) == ["forward", "backward"]
    assert all(launch.in_order for launch in fake_both.launches)
    assert [launch.clamp for launch in fake_both.launches] == [None, None]
    assert fake_both.synchronized == before  # neither waits for the device
    assert buffer.reason == "fused"
    results(problem, buffer, 0.5)
    assert fake_both.launches[-1].clamp == 0.5


def test_a_backward_is_captured(problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels) -> None:
    fake_both.capturing = True
    leaves = problem.requires_grad()
    mega_moe.moe(*leaves.inputs, buffer=buffer).backward(leaves.dy)
    assert ops(fake_both) == ["forward", "backward"]


@pytest.mark.parametrize("which", range(4))
def test_only_what_is_needed_is_asked(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels, which: int
) -> None:
    x, ids, weights, *experts = (value.clone() for value in problem.inputs)
    tensors = (x, weights, *experts)
    tensors[which].requires_grad_()
    y = mega_moe.moe(x, ids, weights, *experts, buffer=buffer)
    y.backward(problem.dy)
    assert fake_both.needs == [tuple(i == which for i in range(4))]
    assert [t.grad is not None for t in tensors] == [i == which for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_by_the_kernel(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels, dtype: torch.dtype
) -> None:
    into = (torch.ones_like(problem.w_gate_up, dtype=dtype), torch.ones_like(problem.w_down, dtype=dtype))
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into)
    y.backward(leaves.dy)
    assert ops(fake_both) == ["forward", "backward into"]
    want = exact(problem)
    for got, gradient in zip(into, (want.dw_gate_up, want.dw_down)):
        error = (got.double() - 1 - gradient).norm() / gradient.norm()
        assert error < (TOLERANCE if dtype == torch.float32 else 2e-2)


def test_buffers_that_the_kernel_cannot_add_to(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    into = (
        torch.zeros_like(problem.w_gate_up, dtype=torch.float32),
        torch.zeros_like(problem.w_down, dtype=torch.bfloat16),
    )
    leaves = problem.requires_grad()
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    assert ops(fake_both) == ["forward", "backward"]
    want = exact(problem)
    assert float((into[1].double() - want.dw_down).norm() / want.dw_down.norm()) < TOLERANCE


def test_gradients_have_the_dtype_of_the_weights(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    x, ids, weights, *experts = problem.inputs
    narrow = weights.bfloat16().requires_grad_()
    mega_moe.moe(x, ids, narrow, *experts, buffer=buffer).backward(problem.dy)
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16


def test_a_bad_id_is_raised_by_the_backward_that_was_launched_all_the_same(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    fake_both.report(faults.BAD_ID, index=4, seen=8, wanted=8)
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    with pytest.raises(ValueError, match=r"topk_idx\[1, 1\]: got expert 8"):
        y.backward(leaves.dy)
    # The other ranks were waiting for it.
    assert ops(fake_both) == ["forward", "backward"]
