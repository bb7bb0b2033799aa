"""Records as a kernel would write them, and the exceptions that they become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mega_moe._backends.fused import faults
from mega_moe._backends.fused.faults import Limits, Record, decode, is_fatal
from mega_moe._base.errors import PeerError, RankTimeoutError

LIMITS = Limits(num_ranks=8, top_k=4, max_blocks=128, arrival=600.0, progress=60.0)


def record(role: int, kind: int, index: int, seen: int, wanted: int) -> Record:
    return Record(1, 3, role, kind, index, seen, wanted, 17)


def abort_word(rank: int, role: int, kind: int, index: int) -> int:
    word = (rank + 1) | kind << 8 | role << 16 | index << 32
    return word - (1 << 64) if word >> 63 else word  # as int64, in which the record is read


@pytest.mark.parametrize(
    ("words", "error", "parts"),
    [
        (
            record(faults.PUBLISH, faults.BAD_ID, 30, -5, 16),
            ValueError,
            ["topk_idx[7, 2]: got expert -5, want -1 or 0 to 15", "call 17"],
        ),
        (
            record(faults.HEADER, faults.REFUSED, 5, 20000, 16384),
            PeerError,
            ["rank 3 of 8", "call 17", "refused by rank 5", "20000 tokens", "16384"],
        ),
        (
            record(faults.HEADER, faults.REFUSED, 5, 1, 16384),
            PeerError,
            ["refused by rank 5", "arguments were refused"],
        ),
        (
            record(faults.HEADER, faults.ARRIVAL, 6, 16, 17),
            RankTimeoutError,
            [
                "rank 3 of 8",
                "600 s",
                "arrival",
                "rank 6 to launch",
                "seen 16",
                "wanted 17",
                "num_reserved_sms leaves them some",
            ],
        ),
        (
            record(faults.BLOCK_FLAG, faults.PROGRESS, 2 * 128 + 9, 16, 17),
            RankTimeoutError,
            ["60 s", "progress", "rank 2, block 9", "seen 16", "wanted 17"],
        ),
        (
            record(faults.GRID_BARRIER, faults.PROGRESS, 4, 100, 132),
            RankTimeoutError,
            [
                "grid barrier",
                "CTA 4",
                "seen 100",
                "wanted 132",
                "where other kernels hold the SMs, such as NCCL's",
            ],
        ),
        (
            record(faults.PULL_SOURCE, faults.PROGRESS, 2 * 128 + 9, 16, 17),
            RankTimeoutError,
            ["dispatch in call 17", "the tokens of rank 2, block 9"],
        ),
        (
            record(faults.CHUNK_FREE, faults.PROGRESS, 3, 0, 5),
            RankTimeoutError,
            ["dispatch in call 17", "own chunk 3 to leave the pools"],
        ),
        (
            record(faults.TILE_INPUT, faults.PROGRESS, 40, 8, 64),
            RankTimeoutError,
            ["the GEMMs in call 17", "row block 40", "seen 8", "wanted 64"],
        ),
        (
            record(faults.PUSH_INPUT, faults.PROGRESS, 77, 0, 16),
            RankTimeoutError,
            ["combine in call 17", "own expert outputs for entry 77"],
        ),
        (
            record(faults.OWNER_SUM, faults.PROGRESS, 1000, 16, 17),
            RankTimeoutError,
            ["combine in call 17", "sums of the other ranks for its own token 1000"],
        ),
        (
            record(faults.LAST_SUMS, faults.PROGRESS, 128 + 1, 16, 17),
            RankTimeoutError,
            ["combine in call 17", "the last sums of rank 1, block 1"],
        ),
        (
            record(faults.HEADER, faults.ABORTED, 0, abort_word(2, faults.HEADER, faults.ARRIVAL, 6), 0),
            PeerError,
            ["rank 3 of 8", "rank 2 gave up", "arrival", "rank 6 to launch"],
        ),
        (
            record(
                faults.BLOCK_FLAG,
                faults.ABORTED,
                0,
                abort_word(2, faults.BLOCK_FLAG, faults.PROGRESS, 0x80000000 + 5),
                0,
            ),
            PeerError,
            ["rank 2 gave up", "progress", "block 5"],
        ),
        (
            record(
                faults.OWNER_SUM, faults.ABORTED, 0, abort_word(2, faults.CHUNK_FREE, faults.PROGRESS, 1), 0
            ),
            PeerError,
            ["combine in call 17", "rank 2 gave up", "own chunk 1"],
        ),
    ],
)
def test_record_becomes_the_error_that_names_everything(
    words: Record, error: type[Exception], parts: list[str]
) -> None:
    got = decode(words, LIMITS)
    assert type(got) is error
    for part in parts:
        assert part in str(got), part


def test_only_lost_ranks_end_a_buffer() -> None:
    fatal = {kind for kind in range(1, 6) if is_fatal(record(faults.HEADER, kind, 0, 0, 0))}
    assert fatal == {faults.ARRIVAL, faults.PROGRESS, faults.ABORTED}


def test_unknown_kind_is_shown() -> None:
    assert "unknown kind" in str(decode(record(9, 99, 1, 2, 3), LIMITS))


def camel(name: str) -> str:
    return "k" + name.title().replace("_", "")


def test_numbers_are_those_of_the_kernels() -> None:
    """Every role and kind of the kernels' header has its number, and its own words, here."""
    header = (Path(__file__).resolve().parents[3] / "kernels" / "layout" / "record.h").read_text()
    known = {camel(name): value for name, value in vars(faults).items() if name.isupper()}
    for enum in ("Role", "Kind"):
        body = header.split(f"enum class {enum}")[1].split("};")[0]
        numbers = {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+),", body)}
        assert numbers
        assert {name: known.get(name) for name in numbers} == numbers, enum
        if enum == "Role":
            waiting = [number for name, number in numbers.items() if name != "kPublish"]
            for role in waiting:
                assert f"role {role}" not in str(decode(record(role, faults.PROGRESS, 1, 2, 3), LIMITS))


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [
        (1, 0, "rank 2 called the forward, this one route"),
        (1, 7, "called the forward, this one the backward with gradients of x and topk_weights"),
        (6, 5, "the backward with gradients of x, this one the backward with gradients of topk_weights"),
        (4, 1, "the backward with gradients of the weights alone, this one the forward"),
    ],
)
def test_ranks_that_call_differently(theirs: int, ours: int, text: str) -> None:
    words = record(faults.HEADER, faults.MISMATCH, 2, theirs, ours)
    got = decode(words, LIMITS)
    assert isinstance(got, PeerError)
    assert text in str(got)
    assert is_fatal(Record(*words))
    told = record(
        faults.HEADER, faults.ABORTED, 2, 1 | faults.MISMATCH << 8 | faults.HEADER << 16 | 2 << 32, 0
    )
    assert "since rank 0 found that rank 2 called something else" in str(decode(told, LIMITS))
