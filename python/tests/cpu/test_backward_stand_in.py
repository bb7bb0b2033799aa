"""The tests of the fused backward on a stand-in without a GPU: they pass, and each finds the faults that it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mega_moe.testing.tables import plain_tables

# What is tested here lies alongside the GPU tests that use it.
from ..gpu import (  # noqa: TID252
    memcheck_backward,
    memcheck_forward,
    test_backward_offsets,
    test_backward_soak,
    test_backward_uneven,
)
from ..gpu._backward_fp8 import chunk_of_rows  # noqa: TID252
from ..gpu._forward import random_experts, random_layer  # noqa: TID252
from ..gpu._forward_ranks import pool_of, shape_of  # noqa: TID252
from ..gpu._stand_in_backward import BackwardStandIn  # noqa: TID252
from ..gpu._virtual import random_ids  # noqa: TID252

CPU = torch.device("cpu")


def uneven(load: str) -> Callable[[], None]:
    return lambda: test_backward_uneven.test_uneven_loads(CPU, load, "one chunk", 2)


def soak() -> None:
    """Some of its calls, among them delayed ones, masked ones and such without a token."""
    experts = random_experts(CPU, 16, 512, 384)
    largest = random_layer(random_ids("random", [400, 400], 4, 16, CPU), experts)
    ranks: Any = test_backward_soak.new_backward_ranks(CPU, largest)
    for number in range(12):
        test_backward_soak.check(ranks, test_backward_soak.draw(number, 2, CPU, experts), f"call {number}")


def offsets() -> None:
    layer = random_layer(random_ids("random", [300, 70], 2, 8, CPU), random_experts(CPU, 8, 256, 128))
    test_backward_offsets.run(layer, pool_rows=1024)


CHECKS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "uneven": (
        uneven("falling as 1/n"),
        (
            "a part of the rows lost",
            "gradients of experts swapped",
            "rounded before the sum",
            "ulp with few SMs",
        ),
    ),
    "empty experts": (uneven("half of them empty"), ("no zeros for an empty expert",)),
    "soak": (
        soak,
        (
            "dx of a token lost",
            "masked slot has a gradient",
            "no zeros for an empty expert",
            "ulp when delayed",
            "ulp with few SMs",
            "a part of the rows lost",
        ),
    ),
    "offsets": (offsets, ("dx of a token lost", "a part of the rows lost", "gradients of experts swapped")),
    "memory checker": (
        lambda: memcheck_backward.main(1, CPU),
        ("dx of a token lost", "masked slot has a gradient", "a part of the rows lost"),
    ),
}


def run(name: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*arguments: Any, **options: Any) -> BackwardStandIn:
        ranks = BackwardStandIn(*arguments, **options)
        ranks.fault = fault
        return ranks

    for module in (memcheck_backward, test_backward_offsets, test_backward_soak, test_backward_uneven):
        monkeypatch.setattr(module, "new_backward_ranks", made)
    # Extents at which a check takes about a second here.
    monkeypatch.setattr(test_backward_uneven, "MOST", 500)
    monkeypatch.setattr(test_backward_offsets, "TOKENS_AT_ONCE", 128)
    monkeypatch.setattr(memcheck_backward, "CASES", memcheck_forward.CASES[1:])
    CHECKS[name][0]()


@pytest.mark.parametrize("name", CHECKS)
def test_stand_in_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, None, monkeypatch)


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, (_, faults) in CHECKS.items() for fault in faults]
)
def test_planted_fault_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        run(name, fault, monkeypatch)


@pytest.mark.parametrize(("told", "seconds"), [(None, 60), ("12", 12), ("1000", 240)])
def test_the_soak_is_bounded(told: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGA_MOE_SOAK_S", raising=False)
    if told is not None:
        monkeypatch.setenv("MEGA_MOE_SOAK_S", told)
    assert test_backward_soak.seconds() * len(test_backward_soak.CASES) == pytest.approx(seconds)


@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_rows_that_share_scales_lie_in_one_chunk(chunks: str) -> None:
    """As the tables list them."""
    layer = random_layer(random_ids("random", [500, 300], 3, 8, CPU), random_experts(CPU, 8, 256, 128))
    shape = shape_of(layer, pool_rows=pool_of(chunks, shape_of(layer)))
    token, source = (
        torch.cat(own)
        for own in zip(
            *(
                (torch.arange(len(ids)).repeat_interleave(3), torch.full((3 * len(ids),), rank))
                for rank, ids in enumerate(layer.ids)
            )
        )
    )
    expert = torch.cat([ids.reshape(-1).long() for ids in layer.ids])
    got = chunk_of_rows(layer, shape, token, expert)
    for rank in (0, 1):
        tables = plain_tables(layer.ids, rank, 8, *shape.chunk_limits())
        assert (len(tables.chunks) > 1) == (chunks == "many chunks")
        here = expert // 4 == rank
        mine = (token | source << 20)[here]
        for chunk, rows in enumerate(tables.source.split(tables.chunks[:, 4].tolist())):
            listed = torch.sort(rows & ((1 << 25) - 1)).values
            assert torch.equal(torch.sort(mine[got[here] == chunk]).values, listed)
