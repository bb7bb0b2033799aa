"""What the tests of spread experts share: problems, a rank's part of them, and how far it is from one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mega_moe import MoEBuffer
from mega_moe.testing import Gradients, Problem, random_problem, relative_l2

from ._layer import bits, make_buffer, results

# An error that needs no waiting for anybody: generous for two loaded cores, far below any time-out in use.
AT_ONCE = 20.0
SIZES: dict[str, Any] = {
    "num_experts": 8,
    "max_tokens_per_rank": 64,
    "top_k": 2,
    "hidden": 128,
    "intermediate": 128,
    "dtype": torch.float32,
    "backend": "reference",
    "arrival_timeout": 30.0,
    "device": "cpu",
}


class Case(NamedTuple):
    """A problem of which rank r holds ``tokens[r]`` tokens; dtype by name, since it travels to the ranks."""

    tokens: tuple[int, ...]
    backend: str = "reference"
    dtype: str = "float32"
    precision: str = "bf16"
    experts: int = 12
    top_k: int = 3
    masked: float = 0.0
    clamp: float | None = None
    seed: int = 0

    def problem(self) -> Problem:
        return random_problem(
            sum(self.tokens),
            128,
            128,
            self.experts,
            self.top_k,
            dtype=getattr(torch, self.dtype),
            masked=self.masked,
            seed=self.seed,
        )

    def rows(self, rank: int) -> slice:
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])


def part(whole: Problem, rank: int, size: int, rows: slice) -> Problem:
    """What rank ``rank`` of ``size`` holds: some of the tokens, its experts."""
    local = whole.w_gate_up.shape[0] // size
    mine = slice(rank * local, (rank + 1) * local)
    made = whole.tokens(rows)
    return Problem(
        made.x, made.topk_idx, made.topk_weights, whole.w_gate_up[mine], whole.w_down[mine], made.dy
    )


def spread_buffer(whole: Problem, group: Any = None, **changes: Any) -> MoEBuffer:
    """A buffer over ``group`` (default: all ranks) that holds all tokens on any rank."""
    wanted = {"group": group or dist.group.WORLD, "arrival_timeout": 30.0, **changes}
    return make_buffer(whole, **wanted)


def single(whole: Problem, case: Case) -> Gradients:
    with make_buffer(whole, case.backend, case.precision) as buffer:
        return results(whole, buffer, case.clamp)


def of_rank(all_of_it: Gradients, rank: int, size: int, rows: slice) -> Gradients:
    local = all_of_it.dw_gate_up.shape[0] // size
    mine = slice(rank * local, (rank + 1) * local)
    y, dx, dtopk, dw1, dw2 = all_of_it
    return Gradients(y[rows], dx[rows], dtopk[rows], dw1[mine], dw2[mine])


class Gap(NamedTuple):
    """How far a rank's results are from those of one rank.

    Equal bits of y, dx and dtopk; relative L2 errors of all, and the worst slot of dtopk; ratio of dW, which a wrong
    scale moves.
    """

    same_bits: bool
    errors: dict[str, float]
    slots: float
    ratios: tuple[float, float]


def gap(got: Gradients, want: Gradients) -> Gap:
    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(got[:3], want[:3]))
    errors = {name: relative_l2(a, b) for name, a, b in zip(want._fields, got, want) if b.numel()}
    slots = max((relative_l2(a, b) for a, b in zip(got.dtopk.T, want.dtopk.T) if b.numel()), default=0.0)
    ratios = (
        float((a.double() * b.double()).sum() / b.double().square().sum()) if b.any() else 1.0
        for a, b in zip(got[3:], want[3:])
    )
    return Gap(same, errors, slots, tuple(ratios))  # type: ignore[arg-type]


def small_problem() -> Problem:
    """What fits into a buffer of SIZES on two or four ranks."""
    return random_problem(48, 128, 128, 8, 2, dtype=torch.float32)


def small_part(rank: int, size: int = 2) -> Problem:
    each = 48 // size
    return part(small_problem(), rank, size, slice(each * rank, each * rank + each))
