"""Captured launches: replays with changing routing, one graph per rank as in a trainer with one process per rank."""

from __future__ import annotations

import pytest
import torch

from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.routing import Routing

from ._virtual import VirtualRanks, assert_tables, random_ids

EXPERTS, TOP_K = 64, 4


class Captured:
    """A graph per rank around one launch on ids that lie at a fixed place."""

    def __init__(self, ranks: VirtualRanks, tokens: list[int]) -> None:
        self.ranks = ranks
        self.ids = [torch.full((count, TOP_K), -1, device=ranks.device) for count in tokens]
        self.graphs = [torch.cuda.CUDAGraph() for _ in tokens]
        self.results: list[Routing] = []
        torch.cuda.synchronize()
        for rank, graph in enumerate(self.graphs):
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                self.results.append(ranks.kernels[rank].route(self.ids[rank], None))
        ranks.warm()  # a capture empties the allocator's cache

    def replay(self, rank: int) -> None:
        self.graphs[rank].replay()


def counts(ids: list[torch.Tensor]) -> torch.Tensor:
    """``[R, E_local]``: rows of every expert."""
    everyone = torch.cat([own.reshape(-1).long() for own in ids])
    return torch.bincount(everyone + 1, minlength=EXPERTS + 1)[1:].view(len(ids), -1)


@pytest.mark.parametrize(
    ("num_ranks", "tokens"), [(1, [1024]), (2, [700, 0]), (4, [512, 100, 0, 513]), (8, [300] * 8)]
)
def test_thousand_replays(cuda_device: torch.device, num_ranks: int, tokens: list[int]) -> None:
    ranks = VirtualRanks(cuda_device, Shape(1024, TOP_K, EXPERTS, 128, num_ranks, canaries=True))
    kinds = ("random", "one expert", "masked", "empty", "one rank", "duplicates", "random")
    pool = [
        [own.long() for own in random_ids(kind, tokens, TOP_K, EXPERTS, cuda_device, seed)]
        for seed, kind in enumerate(kinds)
    ]
    want = [counts(ids) for ids in pool]
    captured = Captured(ranks, tokens)
    wrong = [torch.zeros((), dtype=torch.int64, device=cuda_device) for _ in tokens]
    # Every kernel has run once before ranks wait for one another: loading one could wait for them.
    for rank in range(num_ranks):
        with torch.cuda.stream(ranks.streams[rank]):
            captured.ids[rank].copy_(pool[0][rank])
            wrong[rank] += (captured.results[rank].tokens_per_expert != want[0][rank]).sum()
            wrong[rank].zero_()
    torch.cuda.synchronize()
    for step in range(1000):
        for rank in range(num_ranks):
            with torch.cuda.stream(ranks.streams[rank]):
                captured.ids[rank].copy_(pool[step % len(pool)][rank])
                captured.replay(rank)
                differs = captured.results[rank].tokens_per_expert != want[step % len(pool)][rank]
                wrong[rank] += differs.sum()
        if step % 199 == 0:
            torch.cuda.synchronize()
            assert_tables(ranks, pool[step % len(pool)], captured.results)
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * num_ranks
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_replays_between_eager_calls(cuda_device: torch.device, num_ranks: int) -> None:
    tokens = [300 + 10 * rank for rank in range(num_ranks)]
    ranks = VirtualRanks(cuda_device, Shape(1024, TOP_K, EXPERTS, 128, num_ranks, canaries=True))
    captured = Captured(ranks, tokens)
    for step in range(50):
        ids = [own.long() for own in random_ids("random", tokens, TOP_K, EXPERTS, cuda_device, step)]
        for rank in range(num_ranks):
            captured.ids[rank].copy_(ids[rank])
        torch.cuda.synchronize()
        for rank in range(num_ranks):
            with torch.cuda.stream(ranks.streams[rank]):
                captured.replay(rank)
        torch.cuda.synchronize()
        assert_tables(ranks, ids, captured.results)
        other = random_ids("masked", [count // 2 for count in tokens], TOP_K, EXPERTS, cuda_device, step)
        assert_tables(ranks, other, ranks.launch(other))
    ranks.check()
