"""What a kernel's record in pinned memory means: the words to the exception that a caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mega_moe._base.errors import MegaMoEError, PeerError, RankTimeoutError

RECORD_WORDS = 8
BAD_ID, REFUSED, ARRIVAL, PROGRESS, ABORTED = 1, 2, 3, 4, 5
PUBLISH, HEADER, BLOCK_FLAG, GRID_BARRIER = 1, 2, 3, 4
_U64 = (1 << 64) - 1


class Record(NamedTuple):
    """One fault, as the kernel wrote it. ``epoch``: number of the launch on this buffer, from 1."""

    state: int
    rank: int
    role: int
    kind: int
    item: int
    seen: int
    wanted: int
    epoch: int


class Limits(NamedTuple):
    """What the messages need to know of the buffer."""

    num_ranks: int
    top_k: int
    max_blocks: int
    arrival: float  # seconds
    progress: float


def is_fatal(record: Record) -> bool:
    """Whether the ranks have lost one another, so that the buffer cannot be used again."""
    return record.kind not in (BAD_ID, REFUSED)


def decode(words: Sequence[int], limits: Limits) -> Exception:
    """The exception for a record whose first word is set."""
    record = Record(*words)
    head = f"rank {record.rank} of {limits.num_ranks}: routing in call {record.epoch} of this buffer"
    if record.kind == BAD_ID:
        token, slot = divmod(record.item, limits.top_k)
        return ValueError(
            f"topk_idx[{token}, {slot}]: got expert {record.seen}, want -1 or 0 to {record.wanted - 1} "
            f"(call {record.epoch} of this buffer; its outputs are not valid)"
        )
    if record.kind == REFUSED:
        reason = (
            f"it had {record.seen} tokens, the buffer was built for {record.wanted}"
            if record.seen > record.wanted
            else "its arguments were refused there"
        )
        return PeerError(f"{head} was refused by rank {record.item}: {reason}")
    if record.kind in (ARRIVAL, PROGRESS):
        limit, name = (limits.arrival, "arrival") if record.kind == ARRIVAL else (limits.progress, "progress")
        return RankTimeoutError(
            f"{head}: waited {limit:g} s ({name} limit) for {_awaited(record.role, record.item, limits)}; "
            f"seen {record.seen}, wanted {record.wanted}"
        )
    if record.kind == ABORTED:
        word = record.seen & _U64
        other, kind, role, index = (word & 0xFF) - 1, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 32
        name = "arrival" if kind == ARRIVAL else "progress"
        return PeerError(
            f"{head} ended since rank {other} gave up waiting ({name} limit) for {_awaited(role, index, limits)}"
        )
    return MegaMoEError(f"{head}: record {tuple(record)} is of an unknown kind")


def _awaited(role: int, index: int, limits: Limits) -> str:
    if role == HEADER:
        return f"rank {index} to launch"
    if role == BLOCK_FLAG:
        rank, block = divmod(index, limits.max_blocks)
        return f"the expert ids of rank {rank}, block {block}"
    if role == GRID_BARRIER:
        return f"its own other CTAs at the grid barrier (as CTA {index})"
    return f"role {role}, index {index}"
