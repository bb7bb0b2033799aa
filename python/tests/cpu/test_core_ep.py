"""Experts spread over ranks give what one rank with all experts gives, whatever each rank holds and needs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mega_moe
from mega_moe._backends.plain.executor import PlainExecutor
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, random_problem, relative_l2

from ._ep import Case, Gap, gap, of_rank, part, single, spread_buffer
from ._layer import assert_same_bits, bits, make_buffer, results
from ._ranks import shared_world

TWO, FOUR = shared_world(2), shared_world(4)

# Against one rank, then against fp64.
TOLERANCES = {"float64": (1e-13, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (6e-3, 6e-3)}


def equal_to_one_rank(rank: int, case: Case) -> tuple[Gap, Gap]:
    """Gaps of this rank to one rank and to fp64."""
    case = Case(*case)
    whole, size = case.problem(), len(case.tokens)
    ranks = list(range(size))
    group = dist.new_group(ranks) if size < dist.get_world_size() else dist.group.WORLD
    if rank >= size:
        return Gap(True, {}, 0, (1, 1)), Gap(True, {}, 0, (1, 1))
    rows = case.rows(rank)
    with spread_buffer(whole, group, backend=case.backend, precision=case.precision) as buffer:
        assert (buffer.rank, buffer.num_ranks) == (rank, size)
        assert buffer.num_local_experts == case.experts // size
        got = results(part(whole, rank, size, rows), buffer, case.clamp)
    exact = fp64_moe_grads(whole.dy, *whole.inputs, case.clamp)
    return gap(got, of_rank(single(whole, case), rank, size, rows)), gap(
        got, of_rank(exact, rank, size, rows)
    )


EQUAL = {
    "ep2-reference-fp64": Case((40, 24), dtype="float64"),
    "ep2-reference-fp32": Case((40, 24)),
    "ep2-reference-bf16": Case((40, 24), dtype="bfloat16"),
    "ep2-grouped-fp32": Case((40, 24), "grouped"),
    "ep2-grouped-bf16": Case((40, 24), "grouped", "bfloat16"),
    "ep2-fp8": Case((40, 24), precision="fp8", dtype="bfloat16"),
    "ep2-fp8_bwd": Case((40, 24), precision="fp8_bwd", dtype="bfloat16"),
    "ep2-fp8-fp32": Case((9, 24), precision="fp8"),
    "ep2-masked": Case((40, 24), masked=0.5, dtype="bfloat16"),
    "ep2-grouped-masked-clamp": Case((40, 24), "grouped", masked=0.5, clamp=0.5),
    "ep2-one-empty": Case((0, 64), dtype="bfloat16"),
    "ep2-other-empty": Case((64, 0), "grouped"),
    "ep2-fp8-empty": Case((64, 0), precision="fp8", dtype="bfloat16"),
    "ep2-both-empty": Case((0, 0), "grouped", "bfloat16"),
    "ep2-one-token": Case((1, 0), top_k=1),
    "ep2-every-expert": Case((3, 5), experts=8, top_k=8, dtype="bfloat16"),
    "ep3": Case((10, 0, 30), dtype="bfloat16"),
    "ep3-grouped": Case((10, 5, 30), "grouped"),
    "ep4-reference-fp32": Case((20, 0, 30, 14)),
    "ep4-reference-bf16": Case((20, 9, 30, 14), dtype="bfloat16", masked=0.2),
    "ep4-grouped-fp32": Case((20, 0, 30, 14), "grouped"),
    "ep4-grouped-bf16": Case((20, 7, 30, 14), "grouped", "bfloat16", clamp=1.0),
    "ep4-fp8": Case((20, 7, 0, 14), precision="fp8", dtype="bfloat16"),
    "ep2-dispatched-fp32": Case((40, 24), "dispatched"),
    "ep2-dispatched-bf16": Case((40, 24), "dispatched", "bfloat16", masked=0.3),
    "ep2-dispatched-one-empty": Case((0, 64), "dispatched", "bfloat16"),
    "ep2-dispatched-both-empty": Case((0, 0), "dispatched"),
    "ep3-dispatched": Case((10, 0, 30), "dispatched", clamp=0.5),
    "ep4-dispatched-fp32": Case((20, 0, 30, 14), "dispatched"),
    "ep4-dispatched-bf16": Case((20, 7, 30, 14), "dispatched", "bfloat16"),
    "ep4-dispatched-one-expert-each": Case((16, 16, 0, 16), "dispatched", experts=4, top_k=4),
    "ep4-one-expert-each": Case((16, 16, 16, 16), experts=4, top_k=2),
}


@pytest.mark.parametrize("name", EQUAL)
def test_spread_experts_equal_one_rank(name: str) -> None:
    case = EQUAL[name]
    world = TWO if len(case.tokens) == 2 else FOUR
    to_one, to_exact = TOLERANCES[case.dtype]
    for one, exact in world.values(equal_to_one_rank, tuple(case)):
        # The reference's rows do not depend on the rank that computes them, and slots are summed where they are used.
        # In fp64 products are not rounded, so the order of a longer or shorter product shows.
        assert one.same_bits or case.backend != "reference" or case.dtype == "float64"
        assert all(error <= to_one for error in one.errors.values()), one
        assert one.slots <= to_one
        assert one.ratios == pytest.approx((1, 1), abs=min(to_one, 1e-3))
        # A gate rounded to the other side of the clamp has another gradient: no bound on bf16 against fp64.
        if case.precision == "bf16" and not (case.clamp and case.dtype == "bfloat16"):
            assert all(error <= to_exact for error in exact.errors.values()), exact
            assert exact.ratios == pytest.approx((1, 1), abs=min(to_exact, 1e-3))


# The same comparison with faults of the kind that it is there for.


def faulty(rank: int, fault: str) -> float:
    """Worst error of this rank when the package has ``fault``."""
    whole = random_problem(64, 128, 128, 8, 2, dtype=torch.float32)
    rows = slice(32 * rank, 32 * rank + 32)
    want = of_rank(single(whole, Case((32, 32))), rank, 2, rows)
    with spread_buffer(whole) as buffer, pytest.MonkeyPatch.context() as patch:
        plain, backward = PlainExecutor._return, PlainExecutor.backward

        def lose_a_row(self: Any, sent: Tensor, tables: Any) -> Tensor:
            back = plain(self, sent, tables)
            back[-1] = 0
            return back

        def scale(self: Any, *args: Any, **options: Any) -> Any:
            got = backward(self, *args, **options)
            return got._replace(dw_gate_up=2 * got.dw_gate_up)  # type: ignore[operator]

        def only_local(self: Any, dy: Tensor, inputs: Any, *args: Any, **options: Any) -> Any:
            got = backward(self, dy, inputs, *args, **options)
            return got._replace(dtopk=torch.where(inputs.topk_idx // 4 == rank, got.dtopk, 0))

        name, patched = {
            "lost row": ("_return", lose_a_row),
            "dW times R": ("backward", scale),
            "dtopk of local experts": ("backward", only_local),
        }[fault]
        patch.setattr(PlainExecutor, name, patched)
        return max(gap(results(part(whole, rank, 2, rows), buffer), want).errors.values())


@pytest.mark.parametrize("fault", ["lost row", "dW times R", "dtopk of local experts"])
def test_the_comparison_sees_a_fault(fault: str) -> None:
    assert all(error > 0.05 for error in TWO.values(faulty, fault))


# Ranks without work


def rounds(rank: int, backend: str) -> None:
    """Twenty steps, in each another share of tokens, one rank often without any."""
    shares = [(0, 128), (128, 0), (0, 0), (1, 127), (0, 1)] * 4
    whole = random_problem(128, 128, 128, 8, 2, dtype=torch.float32)
    with spread_buffer(whole, backend=backend) as buffer, make_buffer(whole, backend) as alone:
        for left, right in shares:
            used = whole.tokens(slice(0, left + right))
            rows = slice(0, left) if rank == 0 else slice(left, left + right)
            got = results(part(used, rank, 2, rows), buffer)
            assert got.y.shape == (rows.stop - rows.start, 128)
            want = of_rank(results(used, alone), rank, 2, rows)
            found = gap(got, want)
            assert all(error <= 1e-5 for error in found.errors.values()), (left, right, found)


@pytest.mark.parametrize("backend", ["reference", "grouped", "dispatched"])
def test_a_rank_without_tokens_takes_part_in_every_round(backend: str) -> None:
    TWO.values(rounds, backend, limit=30)


def all_to_rank_0(rank: int, backend: str) -> None:
    """Every slot of every token names an expert of rank 0, with as many tokens as the buffer holds."""
    made = random_problem(48, 128, 128, 4, 4, dtype=torch.bfloat16)
    whole = random_problem(48, 128, 128, 8, 2, dtype=torch.bfloat16)
    whole = Problem(made.x, made.topk_idx, made.topk_weights, whole.w_gate_up, whole.w_down, made.dy)
    rows = slice(24 * rank, 24 * rank + 24)
    sizes = {"max_tokens_per_rank": 24, "backend": backend}
    fired: list[str] = []
    with spread_buffer(whole, **sizes) as buffer:
        leaves = part(whole, rank, 2, rows).requires_grad()
        for name in ("w_gate_up", "w_down"):
            weight = getattr(leaves, name)
            weight.register_hook(lambda _, name=name: fired.append(name))
            weight.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(f"{name} kept"))
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        y.backward(leaves.dy)
    assert sorted(fired) == ["w_down", "w_down kept", "w_gate_up", "w_gate_up kept"]
    got = Gradients(y.detach(), *(g for g in leaves.grads() if g is not None))
    want = of_rank(single(whole, Case((48,), backend)), rank, 2, rows)
    assert all(error <= 6e-3 for error in gap(got, want).errors.values())
    if rank == 1:
        assert not got.dw_gate_up.any()
        assert not got.dw_down.any()


@pytest.mark.parametrize("backend", ["reference", "grouped", "dispatched"])
def test_a_rank_that_receives_nothing_has_zero_gradients_and_its_hooks_fire(backend: str) -> None:
    TWO.values(all_to_rank_0, backend)


def masked(rank: int) -> None:
    """NaN in the weights of masked slots changes nothing; a token without a slot is exactly zero."""
    case = Case((30, 34), masked=0.6, dtype="bfloat16")
    whole = case.problem()
    whole.topk_idx[::5] = -1
    assert (whole.topk_idx < 0).all(1).sum() > 5
    mine = part(whole, rank, 2, case.rows(rank))
    poisoned = mine.topk_weights.masked_fill(mine.topk_idx < 0, float("nan"))
    with spread_buffer(whole) as buffer:
        clean = results(mine, buffer)
        dirty = results(Problem(mine.x, mine.topk_idx, poisoned, *mine.inputs[3:], mine.dy), buffer)
    assert_same_bits(dirty, clean)
    empty = (mine.topk_idx < 0).all(1)
    assert not clean.y[empty].any()
    assert not clean.dx[empty].any()
    assert not clean.dtopk[mine.topk_idx < 0].any()
    assert_same_bits(
        Gradients(*clean[:3], *clean[:2]),
        Gradients(*(of_rank(single(whole, case), rank, 2, case.rows(rank))[:3]), *clean[:2]),
    )


def test_masked_slots_stay_out_of_every_rank() -> None:
    TWO.values(masked)


# Ranks that need different gradients


def needs_differ(rank: int, backend: str) -> None:
    """All pairs of needs: this rank needs one set, the other its complement or everything."""
    case = Case((20, 12), backend)
    whole = case.problem()
    mine = part(whole, rank, 2, case.rows(rank))
    with spread_buffer(whole, backend=backend) as buffer:
        full = results(mine, buffer)
        for number in range(1, 15):
            for others in (15 - number, 15):
                wanted = number if rank == 0 else others
                need = tuple(bool(wanted >> bit & 1) for bit in range(4))
                leaves = mine.requires_grad(need)  # type: ignore[arg-type]
                mega_moe.moe(*leaves.inputs, buffer=buffer).backward(leaves.dy)
                for asked, got, want in zip(need, leaves.grads(), full[1:]):
                    assert (got is not None) == asked, need
                    assert got is None or torch.equal(got, want), need


@pytest.mark.parametrize("backend", ["reference", "grouped", "dispatched"])
def test_each_rank_gets_the_gradients_that_it_needs(backend: str) -> None:
    TWO.values(needs_differ, backend)


# Groups and buffers


def groups(rank: int) -> None:
    """{0, 1} and {2, 3}, then all four, then {0, 1} alone: calls on all of them interleaved."""
    whole = random_problem(48, 128, 128, 8, 2, dtype=torch.float32)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with make_buffer(whole) as alone:
        want = results(whole, alone)
    small = spread_buffer(whole, pairs[rank // 2], backend="reference")
    large = spread_buffer(whole, backend="reference")
    rows_small, rows_large = slice(24 * (rank % 2), 24 * (rank % 2) + 24), slice(12 * rank, 12 * rank + 12)
    for _ in range(3):
        in_pair = results(part(whole, rank % 2, 2, rows_small), small)
        in_four = results(part(whole, rank, 4, rows_large), large)
        found = (
            gap(in_pair, of_rank(want, rank % 2, 2, rows_small)),
            gap(in_four, of_rank(want, rank, 4, rows_large)),
        )
        assert all(g.same_bits for g in found)
        assert all(error <= 1e-5 for g in found for error in g.errors.values())
    large.destroy()
    if rank < 2:
        again = spread_buffer(whole, pairs[0], backend="grouped")
        results(part(whole, rank, 2, rows_small), again)
        again.destroy()
    results(part(whole, rank % 2, 2, rows_small), small)
    small.destroy()


def test_groups_inside_and_beside_one_another() -> None:
    FOUR.values(groups)


def two_buffers(rank: int) -> None:
    """Forward A, forward B, backward B, backward A, on buffers of different sizes; then the first once more."""
    cases = (Case((10, 20), seed=1), Case((7, 0), "grouped", experts=4, top_k=1, seed=2))
    wholes = [case.problem() for case in cases]
    wants = [of_rank(single(w, c), rank, 2, c.rows(rank)) for w, c in zip(wholes, cases)]
    buffers = [spread_buffer(w, backend=c.backend) for w, c in zip(wholes, cases)]
    for _ in range(2):
        leaves = [part(w, rank, 2, c.rows(rank)).requires_grad() for w, c in zip(wholes, cases)]
        ys = [mega_moe.moe(*part.inputs, buffer=b) for part, b in zip(leaves, buffers)]
        for mine, y in reversed(list(zip(leaves, ys))):
            y.backward(mine.dy)
        for mine, y, want in zip(leaves, ys, wants):
            got = Gradients(y.detach(), *(g for g in mine.grads() if g is not None))
            assert all(error <= 1e-5 for error in gap(got, want).errors.values())
    for buffer in buffers:
        buffer.destroy()


def test_two_buffers_of_one_group() -> None:
    TWO.values(two_buffers)


def batches(rank: int, equal: bool) -> None:
    """Each rank's y is that of its own batch; dW is the sum over both, also when both are the same batch."""
    sizes = (32, 128, 128, 8, 2)
    own = [random_problem(*sizes, dtype=torch.float32, seed=0 if equal else s) for s in (0, 1)]
    weights = (own[0].w_gate_up, own[0].w_down)
    own = [Problem(*p.inputs[:3], *weights, p.dy) for p in own]
    with make_buffer(own[0]) as alone:
        each = [results(p, alone) for p in own]
    with spread_buffer(own[0], backend="reference") as buffer:
        got = results(part(own[rank], rank, 2, slice(0, 32)), buffer)
    for a, b in zip(got[:3], each[rank][:3]):
        assert torch.equal(a, b)
    mine = slice(4 * rank, 4 * rank + 4)
    for a, both in zip(got[3:], zip(*(e[3:] for e in each))):
        assert relative_l2(a, (both[0] + both[1])[mine]) <= 1e-6


@pytest.mark.parametrize("equal", [True, False])
def test_each_rank_feeds_its_own_batch(equal: bool) -> None:
    TWO.values(batches, equal)


def invariance(rank: int) -> None:
    """A token's y alone, among 63 others, in another order and on the other rank: the same bits."""
    whole = random_problem(64, 128, 128, 8, 4, dtype=torch.bfloat16)
    nobody, one, everybody = slice(0, 0), slice(5, 6), slice(0, 64)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    with spread_buffer(whole, backend="reference") as buffer:
        seen = []
        for rows in (
            (everybody, nobody),
            (nobody, everybody),
            (one, one),
            (one, everybody),
            (shuffled, everybody),
        ):
            mine = part(whole, rank, 2, rows[rank])  # type: ignore[arg-type]
            y = mega_moe.moe(*mine.inputs, buffer=buffer)
            where = (torch.arange(64)[rows[rank]] == 5).nonzero()
            seen += [y[i] for i in where.flatten().tolist()]
    assert len(seen) == 4
    for y in seen:
        assert torch.equal(bits(y), bits(seen[0]))


def test_a_token_does_not_depend_on_its_company_or_rank() -> None:
    TWO.values(invariance)


# What a user's program is: the buffer in a global, the end of the file behind destroy_process_group.
AT_EXIT = """
import atexit
atexit.register(lambda: print("at exit", len(buffer._control._group)))  # before all others, so that it runs after them
import torch, torch.distributed as dist
import mega_moe
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
buffer = mega_moe.MoEBuffer(dist.group.WORLD, num_experts=4, max_tokens_per_rank=8, top_k=2, hidden=64, intermediate=32,
                            dtype=torch.float32, backend="grouped", device="cpu")
dist.destroy_process_group()
print("alive", len(buffer._control._group))
"""


def test_a_buffer_that_is_alive_at_exit_closes_its_group_in_time() -> None:
    """Gloo's threads outlived the interpreter otherwise, and C++ aborted 3 of 85 runs of two ranks."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alive 1\nat exit 0\n"
