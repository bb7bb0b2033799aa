"""From the fault record that a kernel writes into pinned memory to the exception that a caller gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mega_moe._base.errors import MegaMoEError, PeerError, RankTimeoutError

RECORD_WORDS = 8
BAD_ID, REFUSED, ARRIVAL, PROGRESS, ABORTED, MISMATCH = 1, 2, 3, 4, 5, 6
PUBLISH, HEADER, BLOCK_FLAG, GRID_BARRIER = 1, 2, 3, 4
PULL_SOURCE, TILE_INPUT, PUSH_INPUT, OWNER_SUM, CHUNK_FREE, LAST_SUMS = 5, 6, 7, 8, 9, 10
_BACKWARD = 4  # and what is asked of it
_U64 = (1 << 64) - 1
# Waits for a launch as a whole: all its CTAs must be on SMs at once.
_SMS_HELD = (
    "; where other kernels hold the SMs, such as NCCL's on another stream, num_reserved_sms leaves them some"
)


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
    head = f"rank {record.rank} of {limits.num_ranks}: {_phase(record.role)} in call {record.epoch} of this buffer"
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
            f"seen {record.seen}, wanted {record.wanted}{_SMS_HELD if record.role in (HEADER, GRID_BARRIER) else ''}"
        )
    if record.kind == MISMATCH:
        return PeerError(
            f"{head}: rank {record.item} called {_call(record.seen)}, this one {_call(record.wanted)}"
        )
    if record.kind == ABORTED:
        word = record.seen & _U64
        other, kind, role, index = (word & 0xFF) - 1, word >> 8 & 0xFF, word >> 16 & 0xFF, word >> 32
        if kind == MISMATCH:
            return PeerError(f"{head} ended since rank {other} found that rank {index} called something else")
        name = "arrival" if kind == ARRIVAL else "progress"
        return PeerError(
            f"{head} ended since rank {other} gave up waiting ({name} limit) for {_awaited(role, index, limits)}"
        )
    return MegaMoEError(f"{head}: record {tuple(record)} is of an unknown kind")


def _call(call: int) -> str:
    """What a rank says that a launch is."""
    if call < _BACKWARD:
        return {0: "route", 1: "the forward"}.get(call, f"call {call}")
    wanted = [name for bit, name in ((2, "x"), (1, "topk_weights")) if call & bit]
    return f"the backward with gradients of {' and '.join(wanted) or 'the weights alone'}"


def _phase(role: int) -> str:
    """The part of a launch in which ``role`` waits."""
    if role in (PULL_SOURCE, CHUNK_FREE):
        return "dispatch"
    if role == TILE_INPUT:
        return "the GEMMs"
    return "combine" if role in (PUSH_INPUT, OWNER_SUM, LAST_SUMS) else "routing"


def _awaited(role: int, index: int, limits: Limits) -> str:
    rank, block = divmod(index, limits.max_blocks)
    awaited = {
        HEADER: f"rank {index} to launch",
        BLOCK_FLAG: f"the expert ids of rank {rank}, block {block}",
        GRID_BARRIER: f"its own other CTAs at the grid barrier (as CTA {index})",
        PULL_SOURCE: f"the tokens of rank {rank}, block {block}",
        TILE_INPUT: f"the input of the tiles of its own row block {index}",
        PUSH_INPUT: f"its own expert outputs for entry {index} of the list of sums to send",
        OWNER_SUM: f"the sums of the other ranks for its own token {index}",
        CHUNK_FREE: f"its own chunk {index} to leave the pools",
        LAST_SUMS: f"the last sums of rank {rank}, block {block}",
    }
    return awaited.get(role, f"role {role}, index {index}")
