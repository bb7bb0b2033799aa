"""Routing tables in plain torch against sorts of Python tuples, which know nothing of keys or cuts in tensors."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mega_moe._backends.fused.memory import Shape
from mega_moe.testing.tables import Tables, plain_tables

KINDS = ("random", "one expert", "one rank", "masked", "duplicates", "all masked")


def make_ids(
    kind: str, tokens: list[int], top_k: int, experts: int, seed: int, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """One ``[T, K]`` tensor per rank."""
    rng = random.Random(seed)
    local = experts // len(tokens)

    def row() -> list[int]:
        if kind == "one expert":
            return [experts - 1] * top_k
        if kind == "one rank":
            return [rng.randrange(local) for _ in range(top_k)]
        if kind == "duplicates":
            return [rng.randrange(min(experts, 3)) for _ in range(top_k)]
        if kind == "all masked":
            return [-1] * top_k
        ids = rng.sample(range(experts), min(top_k, experts)) + [-1] * max(0, top_k - experts)
        return [-1 if kind == "masked" and rng.random() < 0.5 else i for i in ids]

    return [torch.tensor([row() for _ in range(count)], dtype=dtype).view(count, top_k) for count in tokens]


def sorted_tables(ids: list[Tensor], rank: int, experts: int, limit: int) -> dict[str, list[int]]:
    """What the tables must hold, by brute force."""
    local = experts // len(ids)
    triples = sorted(
        (t, r, k, e - rank * local)
        for r, own in enumerate(ids)
        for t, row in enumerate(own.tolist())
        for k, e in enumerate(row)
        if e >= 0 and e // local == rank
    )
    most = max(len(own) for own in ids)
    blocks: list[list[tuple[int, int, int, int]]] = [[] for _ in range((most + 127) // 128)]
    for triple in triples:
        blocks[triple[0] // 128].append(triple)
    chunks: list[list[tuple[int, int, int, int]]] = [[]]
    ends: list[int] = []
    for index, block in enumerate(blocks):
        if len(chunks[-1]) + len(block) > limit:
            chunks.append([])
            ends.append(index * 128)
        chunks[-1].extend(block)
    ends.append(most)
    want: dict[str, list[int]] = {name: [] for name in Tables._fields}
    before = residents_before = 0
    slots: dict[tuple[int, int, int], int] = {}
    residents: list[tuple[int, int]] = []
    for c, chunk in enumerate(chunks):
        first_slot = (before + 127) // 128 * 128 + c * local * 128
        slot = first_slot
        for e in range(local):
            mine = [x for x in chunk if x[3] == e]
            want["expert_rows"].append(len(mine))
            want["expert_slots"].append(slot)
            for i, (t, r, k, _) in enumerate(mine):
                want["source"].append(t | r << 20 | k << 25)
                want["slot"].append(slot + i)
                slots[t, r, k] = slot + i
            slot += (len(mine) + 127) // 128 * 128
        here = sorted({(t, r) for t, r, _, _ in chunk})
        begin = ends[c - 1] if c else 0
        want["chunks"] += [
            begin,
            ends[c],
            first_slot,
            slot - first_slot,
            len(chunk),
            residents_before,
            len(here),
        ]
        before += len(chunk)
        residents_before += len(here)
        residents += here
    want["slot_list"] = [slots[t, r, k] for t, r, k, _ in triples]
    where = {(t, r): [i for i, x in enumerate(triples) if x[:2] == (t, r)] for t, r in residents}
    count = dict.fromkeys(("first", "last"), ())
    for name, start, pick, key in (
        ("pull_list", "pull_starts", min, "first"),
        ("push_list", "push_starts", max, "last"),
    ):
        by_expert = [0] * local
        at = 0
        for chunk in chunks:
            for e in range(local):
                want[start].append(at)
                for t, r in sorted({(t, r) for t, r, _, _ in chunk}):
                    mine = [x[3] for x in chunk if x[:2] == (t, r)]
                    if pick(mine) != e:
                        continue
                    want[name].append(t | r << 20 | (len(mine) - 1) << 25 | where[t, r][0] << 32)
                    by_expert[e] += 1
                    at += 1
        count[key] = tuple(by_expert)
    rows = [sum(1 for x in triples if x[3] == e) for e in range(local)]
    want["counts"] = [*rows, *count["first"], *count["last"], len(triples), len(residents)]
    want["tokens"] = [len(own) for own in ids]
    return want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [([150], 8, 16), ([140, 0], 4, 8), ([129, 37, 300], 3, 6), ([5, 1, 0, 9], 16, 8), ([0, 0], 2, 4)],
)
def test_tables_are_those_of_a_sort(kind: str, tokens: list[int], top_k: int, experts: int) -> None:
    ids = make_ids(kind, tokens, top_k, experts, seed=len(kind))
    block_rows = 128 * len(tokens) * top_k
    for limit in (block_rows, max(tokens) * len(tokens) * top_k + 1):
        for rank in range(len(tokens)):
            got = plain_tables(ids, rank, experts, limit)
            want = sorted_tables(ids, rank, experts, limit)
            for name, tensor in got._asdict().items():
                assert tensor.reshape(-1).tolist() == want[name], (name, rank, limit)


def test_chunks_hold_at_most_the_limit_and_whole_blocks() -> None:
    (ids,) = make_ids("random", [1000], 4, 8, seed=1)
    tables = plain_tables([ids], 0, 8, 1024)
    assert tables.chunks[:, 4].tolist() == [1024, 1024, 1024, 928]
    assert (tables.chunks[:, 0] % 128 == 0).all()


def test_rows_that_both_pools_hold_are_one_chunk() -> None:
    (ids,) = make_ids("random", [1000], 4, 8, seed=1)
    assert plain_tables([ids], 0, 8, 1024, 4000).chunks[:, 4].tolist() == [4000]
    assert plain_tables([ids], 0, 8, 1024, 3999).chunks[:, 4].tolist() == [1024, 1024, 1024, 928]


@pytest.mark.parametrize(
    ("pool", "limits"),
    [
        (0, (8192, 8192)),
        (8192 + 508, (8192, 8192)),  # holds everything: there is one pool
        (1536, (1028, 1028)),  # the smallest
        (1664, (1156, 2820)),
    ],
)
def test_limits_of_chunks(pool: int, limits: tuple[int, int]) -> None:
    assert Shape(1024, 8, 4, 128, 1, pool_rows=pool).chunk_limits() == limits


def test_int32_and_int64_ids_give_the_same_tables() -> None:
    wide = make_ids("masked", [70, 40], 4, 8, seed=2)
    narrow = [own.int() for own in wide]
    for a, b in zip(plain_tables(wide, 1, 8, 10_000), plain_tables(narrow, 1, 8, 10_000), strict=True):
        assert torch.equal(a, b)
