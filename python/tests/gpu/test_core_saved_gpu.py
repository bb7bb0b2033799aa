"""``MoEBuffer(save_gate_up=)`` through the public API: bits, memory, no wait, graphs, checkpoints, offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.testing import Problem, random_problem

from ._waits import synchronising_is_an_error

TOKENS = 3000
MIB = 1 << 20


@pytest.fixture
def problem(cuda_device: torch.device) -> Problem:
    return random_problem(TOKENS, 512, 256, 16, 4, masked=0.1, device=cuda_device)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[MoEBuffer]:
    with MoEBuffer(**problem.sizes, backend="fused", save_gate_up=1) as made:
        yield made


@pytest.fixture
def plain(problem: Problem) -> Iterator[MoEBuffer]:
    with MoEBuffer(**problem.sizes, backend="fused") as made:
        yield made


def train(problem: Problem, buffer: MoEBuffer) -> list[Tensor]:
    """y and the gradients."""
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    y.backward(leaves.dy)
    return [y.detach(), *(grad for grad in leaves.grads() if grad is not None)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) == 5
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_same_bits_for_more_memory(problem: Problem, buffer: MoEBuffer, plain: MoEBuffer) -> None:
    assert buffer.save_gate_up == 1
    assert plain.save_gate_up == 0
    want = train(problem, plain)
    assert_same(train(problem, buffer), want)
    kept = []
    for made in (plain, buffer):
        leaves = problem.requires_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = mega_moe.moe(*leaves.inputs, buffer=made)
        kept.append(torch.cuda.memory_allocated() - before)
        y.backward(leaves.dy)
        del y, leaves  # and the gradients, which would be freed while the next is measured
    assert buffer.saved_nbytes(TOKENS) >= TOKENS * 4 * 2 * 256 * 2
    assert abs(kept[1] - kept[0] - buffer.saved_nbytes(TOKENS)) < 2 * MIB


@pytest.mark.parametrize("share", [0.3, 5.0])
def test_other_shares(problem: Problem, plain: MoEBuffer, share: float) -> None:
    with MoEBuffer(**problem.sizes, backend="fused", save_gate_up=share) as made:
        assert_same(train(problem, made), train(problem, plain))


def test_neither_direction_waits(
    problem: Problem, buffer: MoEBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "0")
    want = train(problem, buffer)  # loads the kernels
    with synchronising_is_an_error():
        got = train(problem, buffer)
    assert_same(got, want)


def test_micro_batches_that_are_under_way_together(
    problem: Problem, buffer: MoEBuffer, plain: MoEBuffer
) -> None:
    parts = [problem.tokens(slice(0, 1000)), problem.tokens(slice(1000, 1700)), problem]
    want = [train(part, plain) for part in parts]
    leaves = [part.requires_grad() for part in parts]
    outputs = [mega_moe.moe(*part.inputs, buffer=buffer) for part in leaves]
    for at in (1, 2, 0):
        outputs[at].backward(leaves[at].dy)
        grads = [grad for grad in leaves[at].grads() if grad is not None]
        assert_same([outputs[at].detach(), *grads], want[at])


def test_a_graph_of_both_directions(problem: Problem, buffer: MoEBuffer, plain: MoEBuffer) -> None:
    static = problem.requires_grad()
    wanted = [static.x, static.topk_weights, static.w_gate_up, static.w_down]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(mega_moe.moe(*static.inputs, buffer=buffer), wanted, static.dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe.moe(*static.inputs, buffer=buffer)
        grads = torch.autograd.grad(y, wanted, static.dy)
    for seed in range(5):
        fresh = random_problem(TOKENS, 512, 256, 16, 4, masked=0.1 * seed, seed=seed, device=problem.x.device)
        with torch.no_grad():
            for into, part in zip((*static.inputs, static.dy), (*fresh.inputs, fresh.dy)):
                into.copy_(part)
        graph.replay()
        assert_same([y.detach(), *grads], train(fresh, plain))
    buffer.check()


@pytest.mark.parametrize("how", ["checkpoint", "reentrant checkpoint", "offloading", "buffers"])
def test_what_a_trainer_puts_around_it(
    problem: Problem, buffer: MoEBuffer, plain: MoEBuffer, how: str
) -> None:
    def step(made: MoEBuffer, wrapped: bool) -> list[Tensor]:
        leaves = problem.requires_grad()
        into = None
        if how == "buffers":
            into = (
                torch.ones_like(leaves.w_gate_up, dtype=torch.float32),
                torch.ones_like(leaves.w_down, dtype=torch.float32),
            )

        def block(x: Tensor, *rest: Tensor) -> Tensor:
            return x + mega_moe.moe(2 * x, *rest, buffer=made, grad_buffers=into)

        offloads = wrapped and how == "offloading"
        context = torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else contextlib.nullcontext()
        with context:
            if wrapped and "checkpoint" in how:
                y = checkpoint(block, *leaves.inputs, use_reentrant="reentrant" in how)
            else:
                y = block(*leaves.inputs)
        y.backward(leaves.dy)
        grads = [grad for grad in leaves.grads() if grad is not None]
        return [y.detach(), *grads[:2], *(into or grads[2:])]

    assert_same(step(buffer, True), step(plain, False))
