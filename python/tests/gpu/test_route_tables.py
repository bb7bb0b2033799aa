"""Tables of the routing kernel against stable sorts, bit for bit, for 1, 2, 4 and 8 ranks that share one GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import mega_moe
from mega_moe._backends.fused.memory import Shape

from ._forward_ranks import pool_of
from ._virtual import VirtualRanks, assert_tables, random_ids
from ._waits import synchronising_is_an_error

CHUNKS = ("one chunk", "both pools", "many chunks")
KINDS = ("random", "one expert", "one rank", "empty", "masked", "duplicates")


class Case(NamedTuple):
    """Tokens of each rank (repeated to the number of ranks), top-k, experts."""

    tokens: tuple[int, ...]
    top_k: int
    experts: int


CASES = {
    "tiny": Case((1, 0, 3), 1, 8),
    "small": Case((130, 257, 0, 64), 3, 40),
    "odd k": Case((777, 1024), 7, 128),
    "k16": Case((300, 16, 1500), 16, 384),
    "k8": Case((2048,), 8, 128),
    "uneven": Case((4096, 0, 1, 3000), 8, 256),
    "k6": Case((1000, 2000), 6, 160),
}


def of_ranks(case: Case, num_ranks: int) -> list[int]:
    return [case.tokens[rank % len(case.tokens)] for rank in range(num_ranks)]


def shape_of(case: Case, num_ranks: int, **changes: object) -> Shape:
    return Shape(max(*case.tokens, 1), case.top_k, case.experts, 128, num_ranks, canaries=True, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_a_stable_sort(cuda_device: torch.device, name: str, num_ranks: int) -> None:
    case = CASES[name]
    tokens = of_ranks(case, num_ranks)
    plain = shape_of(case, num_ranks)
    for pool in dict.fromkeys(pool_of(chunks, plain) for chunks in CHUNKS):
        ranks = VirtualRanks(cuda_device, shape_of(case, num_ranks, pool_rows=pool))
        for seed, kind in enumerate(KINDS):
            ids = random_ids(kind, tokens, case.top_k, case.experts, cuda_device, seed)
            dtype = torch.bfloat16 if seed % 2 else torch.float32
            weights = [torch.randn(own.shape, device=cuda_device).to(dtype) for own in ids]
            results = ranks.launch(ids, weights)
            assert_tables(ranks, ids, results, weights)
        ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("tokens", "experts"), [(16384, 128), (32768, 384)])
def test_large_tables(cuda_device: torch.device, num_ranks: int, tokens: int, experts: int) -> None:
    counts = [tokens if rank != 1 else tokens // 3 for rank in range(num_ranks)]
    shape = Shape(tokens, 8, experts, 128, num_ranks, canaries=True)
    balanced = 4096 * 8 * 2 + 127 * shape.num_local_experts
    for pool in (0, (balanced + 127) // 128 * 128):
        ranks = VirtualRanks(cuda_device, Shape(tokens, 8, experts, 128, num_ranks, pool, canaries=True))
        for seed, kind in enumerate(("random", "one expert", "duplicates")):
            ids = random_ids(kind, counts, 8, experts, cuda_device, seed)
            results = ranks.launch(ids)
            assert_tables(ranks, ids, results, on="cpu" if num_ranks == 1 else cuda_device)
        ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tables_do_not_depend_on_the_number_of_sms(cuda_device: torch.device, num_ranks: int) -> None:
    ids = random_ids("random", [3000] * num_ranks, 8, 64, cuda_device)
    for num_sms in (1, 2, 7, 33 if num_ranks > 1 else 132):
        ranks = VirtualRanks(cuda_device, Shape(3000, 8, 64, 128, num_ranks, canaries=True), num_sms=num_sms)
        assert_tables(ranks, ids, ranks.launch(ids))
        ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_thousand_launches(cuda_device: torch.device, num_ranks: int) -> None:
    """T and routing change with every launch and nothing waits in between: all counts are right, and some tables."""
    most, top_k, experts = 1500, 4, 64
    ranks = VirtualRanks(cuda_device, Shape(most, top_k, experts, 128, num_ranks, canaries=True))
    pool = [random_ids(kind, [most] * num_ranks, top_k, experts, cuda_device, 7) for kind in KINDS]
    sizes = torch.randint(0, most + 1, (1000, num_ranks), generator=torch.Generator().manual_seed(3)).tolist()
    results = []
    torch.cuda.synchronize()
    for step, row in enumerate(sizes):
        ids = [own[: row[rank]] for rank, own in enumerate(pool[step % len(pool)])]
        launched = []
        for rank in range(num_ranks):
            with torch.cuda.stream(ranks.streams[rank]):
                launched.append(ranks.kernels[rank].route(ids[rank], None))
        results.append((ids, launched))
        if step % 97 == 0:
            torch.cuda.synchronize()
            assert_tables(ranks, ids, launched)
    torch.cuda.synchronize()
    for step, (ids, launched) in enumerate(results):
        everyone = torch.cat([own.reshape(-1).long() for own in ids])
        want = torch.bincount(everyone + 1, minlength=experts + 1)[1:].view(num_ranks, -1)
        for rank, routing in enumerate(launched):
            assert torch.equal(routing.tokens_per_expert.long(), want[rank]), (step, rank)
            assert routing.tokens_per_rank.tolist() == sizes[step]
    ranks.check()


def test_public_call(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same values as on a CPU, no wait for the device, memory as nbytes says, canaries kept in the debug form."""
    monkeypatch.setenv("MEGA_MOE_DEBUG", "0")
    sizes = dict(num_experts=32, max_tokens_per_rank=900, top_k=6, hidden=256, intermediate=128)
    with (
        mega_moe.MoEBuffer(**sizes, device="cpu", backend="reference") as plain,
        mega_moe.MoEBuffer(**sizes, device=cuda_device, backend="grouped") as buffer,
    ):
        assert (buffer.router, buffer.router_reason) == ("kernel", None)
        (ids,) = random_ids("masked", [900], 6, 32, cuda_device)
        weights = torch.rand(900, 6, device=cuda_device)
        mega_moe.route(ids, buffer=buffer)
        with synchronising_is_an_error():
            got = [mega_moe.route(ids, buffer=buffer), mega_moe.route(ids, weights, buffer=buffer)]
        want = mega_moe.route(ids.cpu(), buffer=plain)
        for routing in got:
            for name, a, b in zip(routing._fields, routing, want, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a.cpu(), b), name
        buffer.check()
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    with mega_moe.MoEBuffer(**sizes, device=cuda_device, backend="grouped") as buffer:
        mega_moe.route(ids, buffer=buffer)


def test_launches_of_two_streams_are_chained(cuda_device: torch.device) -> None:
    """One buffer, two streams, no event between them: the library orders the launches, in the order of the host."""
    ranks = VirtualRanks(cuda_device, Shape(4096, 8, 128, 128, 1, canaries=True))
    router = ranks.kernels[0]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pool = [random_ids(kind, [4096], 8, 128, cuda_device)[0] for kind in ("random", "one rank")]
    torch.cuda.synchronize()
    results = []
    for step in range(50):
        with torch.cuda.stream(streams[step % 2]):
            if step % 7 == 0:
                torch.cuda._sleep(200_000)
            results.append(router.route(pool[step % 2], None))
    torch.cuda.synchronize()
    for step, routing in enumerate(results):
        want = torch.bincount(pool[step % 2].reshape(-1).long(), minlength=128)
        assert torch.equal(routing.tokens_per_expert.long(), want), step
    assert_tables(ranks, [pool[1]], [results[-1]])


def test_an_occupied_sm_only_delays(cuda_device: torch.device) -> None:
    ranks = VirtualRanks(cuda_device, Shape(4096, 8, 128, 128, 1, canaries=True))
    ids = random_ids("random", [4096], 8, 128, cuda_device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    with torch.cuda.stream(ranks.streams[0]):
        routing = ranks.kernels[0].route(ids[0], None)
    torch.cuda.synchronize()
    assert_tables(ranks, ids, [routing])


@pytest.mark.parametrize("num_sms", [64, 78, 132, 200])
def test_more_sms_than_there_are_is_refused(cuda_device: torch.device, num_sms: int) -> None:
    have = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    ranks = VirtualRanks(cuda_device, Shape(256, 2, 8, 128, 1), num_sms=num_sms)
    ids = random_ids("random", [256], 2, 8, cuda_device)
    if num_sms > have:
        with pytest.raises(RuntimeError, match=f"num_sms is {num_sms}, must be at most the device's {have}"):
            ranks.launch(ids)
    else:
        assert_tables(ranks, ids, ranks.launch(ids))
