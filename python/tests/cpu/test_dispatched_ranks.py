"""The backend dispatched over gloo ranks: the same bits again, faults of a rank, engines of the caller's own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mega_moe
from mega_moe import DispatchedTokens, MegaMoEError, MoEBuffer, PeerError, RankTimeoutError
from mega_moe._backends import build
from mega_moe._backends.choice import explanation
from mega_moe._backends.choice.decide import Verdict
from mega_moe._backends.dispatched.collectives import CollectiveDispatcher
from mega_moe._backends.fused import faults
from mega_moe._base.activation import SWIGLU
from mega_moe._base.layer import LayerInputs, Needs
from mega_moe.testing import Problem, fp64_moe_grads, random_problem

from ._ep import AT_ONCE, SIZES, Case, gap, of_rank, part, single, small_part, spread_buffer
from ._fake_kernels import faked_kernels
from ._layer import assert_same_bits, results
from ._ranks import shared_world
from .test_core_ep_faults import REFUSED, call_of, expect

TWO, FOUR = shared_world(2), shared_world(4)
CASE = Case((20, 0, 30, 14), "dispatched", "bfloat16", masked=0.2)


def capacity_of(buffer: MoEBuffer) -> int:
    return buffer._live().executor.capacity  # type: ignore[attr-defined,no-any-return]


def set_capacity(buffer: MoEBuffer, tokens: int) -> None:
    buffer._live().executor.capacity = tokens  # type: ignore[attr-defined]


def twice(rank: int) -> None:
    """Two buffers, two calls each, other work in between."""
    whole = CASE.problem()
    mine = part(whole, rank, 4, CASE.rows(rank))
    made = []
    for _ in range(2):
        with spread_buffer(whole, backend="dispatched") as buffer:
            made.append(results(mine, buffer))
            results(part(whole, rank, 4, slice(0, 3 * rank)), buffer)
            made.append(results(mine, buffer))
    for again in made[1:]:
        assert_same_bits(again, made[0])


def test_the_same_bits_from_run_to_run() -> None:
    FOUR.values(twice)


@pytest.mark.parametrize("capacity", [1000, 7])
def test_results_in_given_memory(capacity: int) -> None:
    """As DeepGEMM's calls give it: overwritten, with the bits of new memory, and the rows of each expert added."""
    problem = random_problem(60, 128, 64, 8, 2, masked=0.2)
    inputs = LayerInputs(*problem.inputs)
    with MoEBuffer(**problem.sizes, backend="dispatched") as buffer:
        set_capacity(buffer, capacity)
        executor = buffer._live().executor
        y = executor.forward(inputs, SWIGLU)[0]
        want = executor.backward(problem.dy, inputs, SWIGLU, Needs(), y.dtype)
        given, received = torch.full_like(y, torch.nan), torch.ones(8, dtype=torch.int32)
        assert executor.forward(inputs, SWIGLU, out=given, received=received)[0] is given
        out = tuple(torch.full_like(g, torch.nan) for g in want if g is not None)
        got = executor.backward(problem.dy, inputs, SWIGLU, Needs(), y.dtype, out=out)  # type: ignore[arg-type]
    assert torch.equal(given, y)
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert torch.equal(received, 1 + ids.bincount(minlength=8).to(torch.int32))
    for result, memory, value in zip(got, out, want, strict=True):
        assert result is memory
        assert value is not None
        assert torch.equal(memory, value)


def in_parts(rank: int, capacity: int) -> tuple[int, dict[str, float]]:
    """Experts that take few tokens in a call -> calls of this rank's forward, errors against fp64."""
    whole, rows = CASE.problem(), CASE.rows(rank)
    mine = part(whole, rank, 4, rows)
    want = of_rank(fp64_moe_grads(whole.dy, *whole.inputs, None), rank, 4, rows)
    calls: list[int] = []
    with spread_buffer(whole, backend="dispatched") as buffer, pytest.MonkeyPatch.context() as patch:
        set_capacity(buffer, capacity)
        experts = buffer._live().executor.experts  # type: ignore[attr-defined]
        forward = experts.forward

        def count(inputs: Any, *others: Any, **options: Any) -> Any:
            calls.append(len(inputs.x))
            return forward(inputs, *others, **options)

        with patch.context() as counted:
            counted.setattr(experts, "forward", count)
            got = results(mine, buffer)
        wide = added(mine, buffer, 0, torch.float32)
        for dw, sums, once in zip(got[3:], wide, added(mine, buffer, 1, torch.bfloat16), strict=True):
            # Rounded once, to the weight's dtype or to the buffer's.
            assert torch.equal(sums.bfloat16(), dw)
            assert torch.equal(torch.ones_like(once).add_(sums), once)
    assert max(calls) <= capacity
    return len(calls), gap(got, want).errors


def added(mine: Problem, buffer: MoEBuffer, start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Buffers full of ``start``, with the weights' gradients added."""
    leaves = mine.requires_grad()
    gate_up, down = (torch.full(w.shape, start, dtype=dtype) for w in leaves.inputs[3:])
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=(gate_up, down)).backward(leaves.dy)
    return gate_up, down


@pytest.mark.parametrize("capacity", [7, 64])
def test_more_tokens_than_the_experts_take_are_several_calls(capacity: int) -> None:
    outcomes = FOUR.values(in_parts, capacity)
    assert all((calls > 1) == (capacity == 7) for calls, _ in outcomes)
    for _, errors in outcomes:
        assert all(error <= 6e-3 for error in errors.values()), errors


def fused_experts(patch: pytest.MonkeyPatch, backward: bool) -> None:
    """Within `faked_kernels` the fused executor is chosen for the experts."""
    patch.setattr(build, "why_no_fused_experts", lambda request, facts: [])
    patch.setattr(build, "stand_in", lambda request, facts: None if backward else "something else")
    patch.setattr(explanation, "decide", dispatched_alone)


def by_fused_experts(rank: int, backward: bool) -> None:
    """The fused executor at EP=1, which a fake library serves; in one call and in several, which changes no row."""
    case = Case((40, 24), "dispatched", "bfloat16", experts=8, masked=0.2)
    whole, rows = case.problem(), case.rows(rank)
    mine = part(whole, rank, 2, rows)
    with faked_kernels(backward) as fake, pytest.MonkeyPatch.context() as patch:
        fused_experts(patch, backward)
        with spread_buffer(whole, backend="dispatched") as buffer:
            assert buffer.dtypes == (torch.bfloat16,)
            assert capacity_of(buffer) == 64 * 2
            got = results(mine, buffer)
            wanted = ["forward", "backward"] if backward else ["forward"]
            assert [launch.op for launch in fake.launches] == wanted
            set_capacity(buffer, 9)
            split = results(mine, buffer)
            assert len(fake.launches) > 2 * len(wanted)
            buffer.check()
    want = of_rank(fp64_moe_grads(whole.dy, *whole.inputs, None), rank, 2, rows)
    for found in (got, split):
        assert all(error <= 6e-3 for error in gap(found, want).errors.values())
    assert torch.equal(got.y, split.y)
    if backward:
        assert torch.equal(got.dx, split.dx)
        assert torch.equal(got.dtopk, split.dtopk)


def kernel_that_reports(rank: int) -> tuple[str, str, str]:
    """A launch of rank 1 leaves a record -> what each rank's next call says, the one after it, and `check`."""
    whole = Case((40, 24), "dispatched", "bfloat16", experts=8).problem()
    mine = part(whole, rank, 2, slice(0, 20))
    with faked_kernels(True) as fake, pytest.MonkeyPatch.context() as patch:
        fused_experts(patch, True)
        with spread_buffer(whole, backend="dispatched") as buffer:
            said = []
            if rank == 1:
                fake.report(faults.PROGRESS, faults.TILE_INPUT)
            mega_moe.moe(*mine.inputs, buffer=buffer)
            for _ in range(2):
                with pytest.raises(MegaMoEError) as caught:
                    mega_moe.moe(*mine.inputs, buffer=buffer)
                said.append(f"{caught.type.__name__}: {caught.value}")
            try:
                buffer.check()
            except MegaMoEError as error:
                said.append(str(error))
            else:
                said.append("")
    return said[0], said[1], said[2]


def test_a_fault_of_a_ranks_own_kernel_is_told_to_all_ranks_before_the_next_call() -> None:
    other, own = TWO.values(kernel_that_reports)
    assert own[0].startswith("RankTimeoutError: ")
    assert "lost one another earlier" in own[1]
    assert "lost one another earlier" in own[2]
    assert all(text.startswith("PeerError: ") and "was refused by rank 1: " in text for text in other[:2])
    assert other[2] == ""


def dispatched_alone(request: Any, facts: Any, named: str | None = None) -> tuple[Any, ...]:
    return Verdict("fused", ("two hosts",)), Verdict("dispatched", note="made up")


@pytest.mark.parametrize("backward", [True, False])
def test_the_fused_executor_serves_a_ranks_experts(backward: bool) -> None:
    TWO.values(by_fused_experts, backward)


# Faults of a rank


def refused(rank: int, fault: str, peer: str) -> dict[int, str]:
    """Each rank in turn makes a call with ``fault`` while the other is in ``peer``; a good call after it."""
    caught = {}
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **{**SIZES, "backend": "dispatched"}) as buffer:
        want = results(mine, buffer)
        for wrong in (0, 1):
            leaves = mine.requires_grad()
            y = mega_moe.moe(*leaves.inputs, buffer=buffer)
            try:
                if rank == wrong:
                    args, extra = call_of(mine, fault)
                    mega_moe.moe(*args, buffer=buffer, **extra)
                elif peer == "forward":
                    mega_moe.moe(*mine.inputs, buffer=buffer)
                else:
                    y.backward(leaves.dy)
            except (ValueError, TypeError, PeerError) as error:
                caught[wrong] = f"{type(error).__name__}: {error}"
            assert_same_bits(results(mine, buffer), want)
    return caught


@pytest.mark.parametrize("peer", ["forward", "backward"])
@pytest.mark.parametrize("fault", ["capacity", "id above", "dtype of x", "clamp"])
def test_a_bad_call_of_one_rank_is_its_own_error_and_the_others_peer_error(fault: str, peer: str) -> None:
    error, text = REFUSED[fault]
    outcomes = TWO.values(refused, fault, peer)
    for wrong in (0, 1):
        assert outcomes[wrong][wrong].startswith(f"{error.__name__}: {text}")
        assert f"refused by rank {wrong}: {error.__name__}: {text}" in outcomes[1 - wrong][wrong]
        assert outcomes[1 - wrong][wrong].startswith("PeerError")


def disagree(rank: int, about: str) -> None:
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **{**SIZES, "backend": "dispatched"}) as buffer:
        leaves = mine.requires_grad()
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        if about == "clamp":
            mega_moe.moe(*mine.inputs, buffer=buffer, activation_clamp=(0.1, 7.5)[rank])
        elif rank == 0:
            mega_moe.moe(*mine.inputs, buffer=buffer)
        else:
            y.backward(leaves.dy)


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("clamp", "the clamp of forward call 2: rank 0: 0.1, rank 1: 7.5"),
        ("phase", "call 2: rank 0: forward, rank 1: backward"),
    ],
)
def test_ranks_that_make_different_calls_all_say_so(about: str, text: str) -> None:
    for rank, outcome in enumerate(TWO.run(disagree, about)):
        expect(outcome, PeerError, f"rank {rank}: ranks disagree on ", text)


def missing(rank: int) -> None:
    """Rank 2 of 4 stays away; the others name it, and a new buffer works."""
    mine = small_part(rank, 4)
    sizes = {**SIZES, "backend": "dispatched"}
    buffer = MoEBuffer(dist.group.WORLD, **{**sizes, "arrival_timeout": 3})
    y = mega_moe.moe(*mine.inputs, buffer=buffer)
    if rank != 2:
        start = time.monotonic()
        with pytest.raises(RankTimeoutError, match=r"forward call 2.*ranks \[2\]; arrived: \[0, 1, 3\]"):
            mega_moe.moe(*mine.inputs, buffer=buffer)
        assert 3 <= time.monotonic() - start < 3 + AT_ONCE
    dist.barrier()
    buffer.destroy()
    with MoEBuffer(dist.group.WORLD, **sizes) as fresh:
        assert torch.equal(mega_moe.moe(*mine.inputs, buffer=fresh), y)


def test_a_missing_rank_is_named() -> None:
    FOUR.values(missing)


# Engines of the caller's own


class Padding:
    """Rows of padding, with whatever they hold, before and after what torch's collectives bring."""

    def __init__(self, rank: int, num_local_experts: int) -> None:
        self._engine = CollectiveDispatcher(rank, num_local_experts, dist.group.WORLD)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sizes: Any) -> DispatchedTokens:
        x, ids, weights, route = self._engine.dispatch(x, topk_idx, topk_weights, sizes)
        return DispatchedTokens(
            self._pad(x, 3.0), self._pad(ids, -1), self._pad(weights, float("nan")), route
        )

    def dispatch_again(self, rows: Tensor, route: Any) -> Tensor:
        return self._pad(self._engine.dispatch_again(rows, route), -5.0)

    def combine(
        self, rows: Tensor | None, weights: Tensor | None, route: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        cut = [None if t is None else t[2:-3].contiguous() for t in (rows, weights)]
        return self._engine.combine(*cut, route)

    def _pad(self, rows: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(rows, (0, 0, 2, 3), value=value)


def padded(rank: int) -> tuple[bool, dict[str, float]]:
    case = Case((20, 44), "dispatched", "float32", masked=0.2)
    whole, rows = case.problem(), case.rows(rank)
    with spread_buffer(whole, backend="dispatched", dispatcher=Padding(rank, 6)) as buffer:
        assert "dispatcher Padding, experts by grouped" in buffer.reason
        got = results(part(whole, rank, 2, rows), buffer)
    found = gap(got, of_rank(single(whole, case), rank, 2, rows))
    return found.same_bits, found.errors


def test_rows_of_padding_reach_nothing() -> None:
    for _, errors in TWO.values(padded):
        assert all(error <= 1e-5 for error in errors.values()), errors


class LosesARow(Padding):
    def _pad(self, rows: Tensor, value: float) -> Tensor:
        return super()._pad(rows, value).roll(1, 0)


def faulty(rank: int) -> float:
    case = Case((20, 44), "dispatched", "float32")
    whole, rows = case.problem(), case.rows(rank)
    with spread_buffer(whole, backend="dispatched", dispatcher=LosesARow(rank, 6)) as buffer:
        got = results(part(whole, rank, 2, rows), buffer)
    return max(gap(got, of_rank(single(whole, case), rank, 2, rows)).errors.values())


def test_the_comparison_sees_a_lost_row() -> None:
    assert all(error > 0.05 for error in TWO.values(faulty))


def engines_differ(rank: int) -> None:
    whole = Case((8, 8), "dispatched", "float32").problem()
    spread_buffer(whole, backend="dispatched", dispatcher="nccl" if rank else Padding(rank, 6))


def test_ranks_with_different_engines_are_refused() -> None:
    for outcome in TWO.run(engines_differ):
        expect(outcome, ValueError, "dispatcher: ranks disagree (rank 0: 'Padding', rank 1: 'nccl')")


def test_what_is_no_engine_is_refused_by_name() -> None:
    whole: Problem = Case((8,)).problem()
    sizes = {**whole.sizes, "dtype": torch.float32, "backend": "dispatched"}
    with pytest.raises(ValueError, match=r"dispatcher: got 'ucx', want nccl.* or a mega_moe.Dispatcher"):
        MoEBuffer(**sizes, dispatcher="ucx")
    with pytest.raises(
        TypeError, match=r"dispatcher: got int, want one of nccl.* or an object with dispatch, "
    ):
        MoEBuffer(**sizes, dispatcher=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dispatcher: got type, want"):
        MoEBuffer(**sizes, dispatcher=Padding)  # type: ignore[arg-type]
    told = mega_moe.explain(**sizes, dispatcher=Padding(0, 12))
    assert told.chosen == "dispatched"
    assert "dispatcher Padding, experts by grouped, since no fused experts" in str(told)
