"""`mega_moe.route` over processes: every rank gets the statistics of its experts, and refusals reach all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mega_moe
from mega_moe import PeerError
from mega_moe.testing.tables import plain_tables

from ._ranks import shared_world

TWO = shared_world(2)
EXPERTS, TOP_K, MOST = 12, 3, 50


def ids_of(rank: int, tokens: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=made)


def buffer() -> mega_moe.MoEBuffer:
    return mega_moe.MoEBuffer(
        dist.group.WORLD,
        num_experts=EXPERTS,
        max_tokens_per_rank=MOST,
        top_k=TOP_K,
        hidden=64,
        intermediate=32,
        device="cpu",
        backend="reference",
        arrival_timeout=30.0,
    )


def statistics(rank: int, tokens: tuple[int, int]) -> list[list[int]]:
    with buffer() as made:
        assert made.router == "torch"
        got = mega_moe.route(ids_of(rank, tokens[rank]), buffer=made)
    return [part.reshape(-1).tolist() for part in got]


def refused(rank: int, guilty: int, kind: str) -> Any:
    """The error of a call that rank ``guilty`` makes with bad ids or too many tokens, and the rows of the next call."""
    with buffer() as made:
        ids = ids_of(rank, 10)
        if rank == guilty:
            ids = (
                ids_of(rank, MOST + 1) if kind == "tokens" else ids.index_fill(0, torch.tensor([4]), EXPERTS)
            )
        try:
            mega_moe.route(ids, buffer=made)
        except (ValueError, PeerError) as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = "nothing"
        return told, int(mega_moe.route(ids_of(rank, 10), buffer=made).num_rows)


@pytest.mark.parametrize("tokens", [(50, 17), (0, 33), (0, 0)])
def test_statistics_of_two_ranks(tokens: tuple[int, int]) -> None:
    ids = [ids_of(rank, count) for rank, count in enumerate(tokens)]
    for rank, outcome in enumerate(TWO.values(statistics, tokens)):
        want = plain_tables(ids, rank, EXPERTS, 2 * MOST * TOP_K)
        local = EXPERTS // 2
        rows, first, last, totals = want.counts.split([local, local, local, 2])
        assert outcome == [
            rows.tolist(),
            list(tokens),
            first.tolist(),
            last.tolist(),
            [int(totals[0])],
            [int(totals[1])],
            [1],
            [0],
        ]


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(("kind", "reason"), [("tokens", "got 51 tokens"), ("ids", "got expert 12")])
def test_a_refusal_reaches_the_other_rank(guilty: int, kind: str, reason: str) -> None:
    outcomes = TWO.values(refused, guilty, kind)
    assert outcomes[guilty][0].startswith("ValueError")
    assert outcomes[1 - guilty][0].startswith("PeerError")
    for told, rows in outcomes:
        assert reason in told
        assert rows > 0
