"""Activation checkpointing: how often the layer itself runs, counted in the lowest operator, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.testing import Gradients, Problem, count_op_calls, random_problem

from ._layer import (
    assert_close,
    assert_same_bits,
    both_paths,
    exact,
    make_buffer,
)

_ = both_paths  # a fixture

# torch.compile itself uses a deprecated name of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

Block = Callable[..., Tensor]


@pytest.fixture
def problem() -> Problem:
    return random_problem(48, 64, 32, 4, 2, dtype=torch.float32, masked=0.1)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem) as made:
        yield made


@pytest.fixture
def block(buffer: MoEBuffer) -> Block:
    """The end of a transformer block: what follows the layer needs nothing but its result's gradient."""

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return x + mega_moe.moe(2 * x, *rest, buffer=buffer)

    return run


def eager(block: Block) -> Block:
    return lambda *inputs: checkpoint(block, *inputs, use_reentrant=False)


def compile_of_checkpoint(block: Block) -> Block:
    return torch.compile(eager(block), fullgraph=True)


def checkpoint_of_compile(block: Block) -> Block:
    return eager(torch.compile(block, fullgraph=True))


def reentrant(block: Block) -> Block:
    return lambda *inputs: checkpoint(block, *inputs, use_reentrant=True)


def train(function: Block, problem: Problem) -> tuple[Gradients, dict[str, int]]:
    leaves = problem.requires_grad()
    with count_op_calls() as calls:
        y = function(*leaves.inputs)
        y.backward(leaves.dy)
    return Gradients(y.detach(), *leaves.grads()), dict(calls)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrap", "forwards"),
    [(eager, 1), (compile_of_checkpoint, 1), (checkpoint_of_compile, 2), (reentrant, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_calls_and_values(
    wrap: Callable[[Block], Block], forwards: int, block: Block, problem: Problem
) -> None:
    want, calls = train(block, problem)
    assert calls == {"run": 1, "backward": 1}
    got, calls = train(wrap(block), problem)
    assert calls == {"run": forwards, "backward": 1}
    if "compile" in wrap.__name__:  # the compiler fuses the addition into a multiply-add
        assert_close(got, Gradients(*(part.double() for part in want)), 1e-5)
    else:
        assert_same_bits(got, want)


def test_the_block_after_fp64(buffer: MoEBuffer, problem: Problem) -> None:
    def bare(*inputs: Tensor) -> Tensor:
        return mega_moe.moe(*inputs, buffer=buffer)

    got, calls = train(eager(bare), problem)
    assert calls == {"run": 1, "backward": 1}
    assert_close(got, exact(problem), 1e-5)


def test_a_result_that_is_needed_again_is_computed_again(buffer: MoEBuffer, problem: Problem) -> None:
    def squared(*inputs: Tensor) -> Tensor:
        return mega_moe.moe(*inputs, buffer=buffer).square()

    want, _ = train(squared, problem)
    got, calls = train(eager(squared), problem)
    assert calls == {"run": 2, "backward": 1}
    assert_same_bits(got, want)


def test_two_blocks_in_a_row(block: Block, problem: Problem) -> None:
    def chain(wrapped: Block) -> Block:
        return lambda x, *rest: wrapped(wrapped(x, *rest), *rest)

    want, _ = train(chain(block), problem)
    got, calls = train(chain(eager(block)), problem)
    assert calls == {"run": 2, "backward": 2}
    assert_same_bits(got, want)


@pytest.mark.parametrize("wrap", [eager, reentrant])
def test_gradients_in_buffers_are_added_once(
    wrap: Callable[[Block], Block], buffer: MoEBuffer, problem: Problem
) -> None:
    sums = []
    for wrapped in (False, True):
        into = (torch.zeros_like(problem.w_gate_up), torch.zeros_like(problem.w_down))

        def run(*inputs: Tensor, into: tuple[Tensor, Tensor] = into) -> Tensor:
            return mega_moe.moe(*inputs, buffer=buffer, grad_buffers=into)

        train(wrap(run) if wrapped else run, problem)
        sums.append(into)
    for once, again in zip(*sums):
        assert torch.count_nonzero(once) > 0
        assert torch.equal(once, again)


def test_ids_changed_in_the_recomputation_do_not_mix(buffer: MoEBuffer, problem: Problem) -> None:
    """A router whose near ties flip between the passes: backward is that of the recomputed routing, never a mix."""
    other = random_problem(48, 64, 32, 4, 2, dtype=torch.float32, seed=4)
    routes = iter((problem.topk_idx, other.topk_idx))

    def unsteady(x: Tensor, _: Tensor, *rest: Any) -> Tensor:
        return mega_moe.moe(x, next(routes), *rest, buffer=buffer)

    got, calls = train(eager(unsteady), problem)
    assert calls == {"run": 1, "backward": 1}
    forward, _ = train(lambda *a: mega_moe.moe(*a, buffer=buffer), problem)
    changed, _ = train(lambda x, _, *rest: mega_moe.moe(x, other.topk_idx, *rest, buffer=buffer), problem)
    assert_same_bits(got, changed._replace(y=forward.y))
