"""A missing rank, a late one, too many tokens, a bad id: each ends as decided, in bounded time."""

from __future__ import annotations

import time

import pytest
import torch

import mega_moe
from mega_moe import MegaMoEError, PeerError, RankTimeoutError
from mega_moe._backends.fused.memory import Shape, symmetric_layout
from mega_moe._backends.routing import Routing

from ._virtual import VirtualRanks, assert_tables, random_ids

SHAPE = dict(max_tokens=400, top_k=4, num_experts=16, hidden=128)


def ranks_of(
    device: torch.device, num_ranks: int, arrival: float = 20.0, progress: float = 20.0
) -> VirtualRanks:
    return VirtualRanks(
        device, Shape(**SHAPE, num_ranks=num_ranks, canaries=True), arrival=arrival, progress=progress
    )


def route(ranks: VirtualRanks, rank: int, ids: torch.Tensor) -> Routing:
    with torch.cuda.stream(ranks.streams[rank]):
        return ranks.kernels[rank].route(ids, None)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_missing_rank(cuda_device: torch.device, num_ranks: int) -> None:
    """The others raise after the arrival limit and name it; so does the late one, and the buffer is lost."""
    ranks = ranks_of(cuda_device, num_ranks, arrival=0.5)
    ids = random_ids("random", [300] * num_ranks, 4, 16, cuda_device)
    assert_tables(ranks, ids, ranks.launch(ids))
    missing = num_ranks - 1
    start = time.monotonic()
    results = [route(ranks, rank, ids[rank]) for rank in range(missing)]
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - start < 10
    for rank, routing in enumerate(results):
        assert set(routing.tokens_per_expert.tolist()) == {-1}
        with pytest.raises((RankTimeoutError, PeerError), match=rf"rank {missing} to launch") as caught:
            ranks.kernels[rank].check()
        if isinstance(caught.value, RankTimeoutError):
            for part in (f"rank {rank} of {num_ranks}", "call 2", "0.5 s (arrival", "seen 1", "wanted 2"):
                assert part in str(caught.value), part
        with pytest.raises(MegaMoEError, match="lost one another"):
            ranks.kernels[rank].route(ids[rank], None)
    start = time.monotonic()
    route(ranks, missing, ids[missing])
    with pytest.raises(PeerError, match=rf"gave up waiting \(arrival limit\) for rank {missing} to launch"):
        ranks.kernels[missing].check()
    assert time.monotonic() - start < 10


def test_late_rank_is_waited_for(cuda_device: torch.device) -> None:
    """Later than the progress limit, earlier than the arrival limit: the result is right."""
    ranks = ranks_of(cuda_device, 2, arrival=30.0, progress=0.2)
    ids = random_ids("random", [300, 200], 4, 16, cuda_device)
    results = [route(ranks, 0, ids[0])]
    time.sleep(1.0)
    results.append(route(ranks, 1, ids[1]))
    torch.cuda.synchronize()
    assert_tables(ranks, ids, results)
    ranks.check()


def test_rank_that_stops_after_its_launch(cuda_device: torch.device) -> None:
    """It said that it came, and then sent no ids: the progress limit ends the wait."""
    ranks = ranks_of(cuda_device, 2, arrival=20.0, progress=0.5)
    ids = random_ids("random", [300, 300], 4, 16, cuda_device)
    layout = symmetric_layout(ranks.shape)
    headers = layout.view(ranks.kernels[0].memory[0], "headers", torch.int64)
    headers[1 * 2 + 1] = 1 << 24 | 300  # launch 1 is in bank 1; from rank 1
    torch.cuda.synchronize()
    start = time.monotonic()
    route(ranks, 0, ids[0])
    with pytest.raises(
        RankTimeoutError, match=r"0.5 s \(progress limit\) for the expert ids of rank 1, block [012]"
    ):
        ranks.kernels[0].check()
    assert 0.4 < time.monotonic() - start < 10


def test_too_many_tokens(cuda_device: torch.device) -> None:
    """The rank raises by itself; the others learn the reason, and the next call works on all."""
    ranks = ranks_of(cuda_device, 4)
    ids = random_ids("random", [300] * 4, 4, 16, cuda_device)
    torch.cuda.synchronize()
    results = {rank: route(ranks, rank, ids[rank]) for rank in (0, 1, 3)}
    with torch.cuda.stream(ranks.streams[2]):
        ranks.kernels[2].refuse(401)
    torch.cuda.synchronize()
    for rank, routing in results.items():
        assert set(routing.tokens_per_expert.tolist()) == {-1}
        assert int(routing.status) != 0
        message = (
            r"call 1 of this buffer was refused by rank 2: it had 401 tokens, the buffer was built for 400"
        )
        with pytest.raises(PeerError, match=message):
            ranks.kernels[rank].check()
    ranks.kernels[2].check()
    assert_tables(ranks, ids, ranks.launch(ids))
    ranks.check()


def test_capacity_of_the_public_call(cuda_device: torch.device) -> None:
    sizes = dict(num_experts=16, max_tokens_per_rank=400, top_k=4, hidden=128, intermediate=128)
    with mega_moe.MoEBuffer(**sizes, device=cuda_device, backend="grouped") as buffer:
        with pytest.raises(ValueError, match="got 401 tokens, the buffer was built for 400"):
            mega_moe.route(torch.zeros(401, 4, dtype=torch.int64, device=cuda_device), buffer=buffer)
        full = mega_moe.route(torch.zeros(400, 4, dtype=torch.int64, device=cuda_device), buffer=buffer)
        assert int(full.num_rows) == 1600


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("bad", [16, -2, 2**31 - 1])
def test_bad_id(cuda_device: torch.device, num_ranks: int, bad: int) -> None:
    """Masked, reported by the rank's next call or its check, and nobody is out of step afterwards."""
    ranks = ranks_of(cuda_device, num_ranks)
    ids = random_ids("random", [300] * num_ranks, 4, 16, cuda_device)
    wrong = [own.clone() for own in ids]
    wrong[-1][7, 2] = bad
    results = ranks.launch(wrong)
    torch.cuda.synchronize()
    assert [int(routing.status) for routing in results] == [0] * (num_ranks - 1) + [1]
    assert sum(int(routing.num_rows) for routing in results) == 300 * 4 * num_ranks - 1
    message = rf"topk_idx\[7, 2\]: got expert {bad}, want -1 or 0 to 15"
    for rank in range(num_ranks - 1):
        route(ranks, rank, ids[rank])
    with pytest.raises(ValueError, match=message):
        route(ranks, num_ranks - 1, ids[-1])
    ranks.check()
    assert_tables(ranks, ids, ranks.launch(ids))
    wrong[-1][299, 3] = -7
    ranks.launch(wrong)
    with pytest.raises(ValueError, match="topk_idx"):
        ranks.kernels[-1].check()


def test_bad_id_at_once_when_debugging(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    sizes = dict(num_experts=16, max_tokens_per_rank=400, top_k=4, hidden=128, intermediate=128)
    with mega_moe.MoEBuffer(**sizes, device=cuda_device, backend="grouped") as buffer:
        ids = torch.zeros(300, 4, dtype=torch.int32, device=cuda_device)
        ids[5, 1] = 99
        with pytest.raises(ValueError, match=r"topk_idx\[5, 1\]: got expert 99, want -1 or 0 to 15"):
            mega_moe.route(ids, buffer=buffer)
        ids[5, 1] = 3
        assert int(mega_moe.route(ids, buffer=buffer).num_rows) == 1200


def test_canaries_find_a_planted_write(cuda_device: torch.device) -> None:
    ranks = ranks_of(cuda_device, 1)
    start, size = symmetric_layout(ranks.shape).parts["published_ids"]
    ranks.kernels[0].memory[0][start + size] = 0
    with pytest.raises(MegaMoEError, match="wrote between the parts"):
        ranks.check()
