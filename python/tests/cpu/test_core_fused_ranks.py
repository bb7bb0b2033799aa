"""The fused backend on two ranks with a fake kernel: its backward meets the others, and nobody waits in vain."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import mega_moe
from mega_moe import MoEBuffer, PeerError
from mega_moe._backends.fused import faults
from mega_moe.testing import Problem, fp64_moe_grads, random_problem, relative_l2

from ._ep import AT_ONCE, part
from ._fake_kernels import FakeKernels, faked_kernels
from ._ranks import shared_world

TWO = shared_world(2)
EACH = 24


def whole() -> Problem:
    return random_problem(2 * EACH, 256, 128, 8, 2)


def own_part(rank: int) -> Problem:
    return part(whole(), rank, 2, slice(EACH * rank, EACH * rank + EACH))


def buffer() -> MoEBuffer:
    sizes = {**whole().sizes, "max_tokens_per_rank": EACH}
    return MoEBuffer(dist.group.WORLD, **sizes, backend="fused", arrival_timeout=60.0)


def forward(rank: int, made: MoEBuffer, tokens: int = EACH) -> tuple[Problem, torch.Tensor]:
    """Leaves and y of a call with ``tokens`` tokens, a few of them more than once where there are not so many."""
    own = own_part(rank)
    rows = torch.arange(tokens) % EACH
    leaves = Problem(own.x[rows], own.topk_idx[rows], own.topk_weights[rows], *own.inputs[3:], own.dy[rows])
    leaves = leaves.requires_grad()
    return leaves, mega_moe.moe(*leaves.inputs, buffer=made)


def worst(rank: int, leaves: Problem) -> float:
    """Of the gradients' relative L2 errors against fp64."""
    _, dx, dtopk, dw1, dw2 = fp64_moe_grads(whole().dy, *whole().inputs)
    mine, local = slice(EACH * rank, EACH * rank + EACH), slice(4 * rank, 4 * rank + 4)
    want = (dx[mine], dtopk[mine], dw1[local], dw2[local])
    return max(relative_l2(got, exact) for got, exact in zip(leaves.grads(), want, strict=True))  # type: ignore[arg-type]


def good_step(rank: int, made: MoEBuffer) -> float:
    leaves, y = forward(rank, made)
    y.backward(leaves.dy)
    return worst(rank, leaves)


def clean(rank: int) -> tuple[float, list[str]]:
    with faked_kernels() as fake, buffer() as made:
        return good_step(rank, made), [launch.op for launch in fake.launches]


def with_a_fault(rank: int, kind: str) -> dict[str, Any]:
    """What each rank's backward said of a fault of rank 1's forward, how long it took, and the step after it."""
    with faked_kernels() as fake, buffer() as made:
        start = time.monotonic()
        said = _fault(rank, kind, fake, made)
        seconds = time.monotonic() - start
        return {
            "said": said,
            "seconds": seconds,
            "after": good_step(rank, made),
            "launches": [(launch.op, launch.tokens) for launch in fake.launches],
        }


def _fault(rank: int, kind: str, fake: FakeKernels, made: MoEBuffer) -> str:
    try:
        if kind == "refusal" and rank == 0:
            # As the routing kernel of rank 0 would, once rank 1 has refused.
            fake.report(faults.REFUSED, role=faults.HEADER, index=1, seen=EACH + 1, wanted=EACH)
        if kind == "bad id" and rank == 1:
            fake.report(faults.BAD_ID, index=6, seen=8, wanted=8)
        leaves, y = forward(rank, made, EACH + 1 if kind == "refusal" and rank == 1 else EACH)
        y.backward(leaves.dy)
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_both_directions_on_two_ranks() -> None:
    for error, launches in TWO.values(clean):
        assert error <= 6e-3
        assert launches == ["forward"]


def test_a_bad_id_is_told_in_the_backward() -> None:
    outcomes = TWO.values(with_a_fault, "bad id")
    assert outcomes[1]["said"].startswith("ValueError: topk_idx[3, 0]: got expert 8, want -1 or 0 to 7")
    assert outcomes[0]["said"].startswith("PeerError: rank 0: ")
    assert "topk_idx[3, 0]: got expert 8" in outcomes[0]["said"]
    for outcome in outcomes:
        assert outcome["seconds"] < AT_ONCE
        assert outcome["after"] <= 6e-3


def test_nobody_waits_in_the_backward_for_a_rank_that_refused() -> None:
    outcomes = TWO.values(with_a_fault, "refusal")
    assert outcomes[1]["said"].startswith(
        f"ValueError: x: got {EACH + 1} tokens, the buffer was built for {EACH}"
    )
    assert outcomes[1]["launches"] == [("refuse", EACH + 1), ("forward", EACH)]
    assert outcomes[0]["said"].startswith("PeerError: rank 0 of 2: routing in call 1")
    assert f"refused by rank 1: it had {EACH + 1} tokens" in outcomes[0]["said"]
    for outcome in outcomes:
        assert outcome["seconds"] < AT_ONCE
        assert outcome["after"] <= 6e-3
