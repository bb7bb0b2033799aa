"""What the tracing kernel records: the table of event kinds, and the events of one device read from its ranks' arrays.

Everything that reads, sums up or checks a trace goes by the table; a new kind is a new row of it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROLES = ("load", "math 0", "math 1", "pull", "push")
"""Names of a CTA's lanes, by the second index of the trace."""

WORDS = 3
"""int64 words of a row: code, start and end in ns of %globaltimer."""


class State(enum.Enum):
    """What a role does during an event."""

    WAIT = "waiting"
    COPY = "copying"
    GEMM = "GEMM"
    EPILOGUE = "epilogue"
    SETUP = "routing"


TILE, ENTRY = "tile", "entry"
"""What the index of a code is: row and column block of a tile, or an entry of a list of tokens."""


@dataclass(frozen=True)
class Kind:
    """One row of the table. ``part`` is the piece of work, shared by its waits, loads, GEMMs and epilogue."""

    number: int
    label: str  # as the timeline names it
    part: str
    state: State
    index: str | None = None
    after: int = 0
    """The kind that must have ended before, for all tiles of some rows.

    In the forward this is a constraint on GEMMs, whose wait is an event of its own. The backward's GEMM events begin
    with that wait, so there it constrains the loads that begin when the inputs are there.
    """
    rows: str = "block"
    """Which rows `after` means: the same block, both blocks of a tile, or all of the expert in the chunk."""


_TABLE = (
    Kind(1, "wait for gate/up inputs", "gate/up", State.WAIT, TILE),
    Kind(2, "wait for down inputs", "down", State.WAIT, TILE),
    Kind(3, "load gate/up", "gate/up", State.COPY, TILE),
    Kind(4, "load down", "down", State.COPY, TILE),
    Kind(5, "wait for tile", "tile", State.WAIT, TILE),
    Kind(6, "gate/up", "gate/up", State.GEMM, TILE),
    Kind(7, "down", "down", State.GEMM, TILE, after=8),
    Kind(8, "epilogue gate/up", "gate/up", State.EPILOGUE, TILE),
    Kind(9, "epilogue down", "down", State.EPILOGUE, TILE),
    Kind(10, "wait to pull", "pull", State.WAIT, ENTRY),
    Kind(11, "pull", "pull", State.COPY, ENTRY),
    Kind(12, "wait to push", "push", State.WAIT, ENTRY),
    Kind(13, "push", "push", State.COPY, ENTRY),
    Kind(14, "wait for owner sum", "owner sum", State.WAIT, ENTRY),
    Kind(15, "owner sum", "owner sum", State.COPY, ENTRY),
    Kind(16, "routing", "routing", State.SETUP),
    Kind(17, "first rows", "first rows", State.SETUP),
    Kind(18, "wait for dz inputs", "dz", State.WAIT, TILE),
    Kind(19, "wait for dx inputs", "dx", State.WAIT, TILE),
    Kind(20, "wait for wgrad inputs", "wgrad", State.WAIT, TILE),
    Kind(21, "load dz", "dz", State.COPY, TILE),
    Kind(22, "load dx", "dx", State.COPY, TILE, after=27, rows="tile"),
    Kind(23, "load wgrad", "wgrad", State.COPY, TILE, after=27, rows="expert"),
    Kind(24, "dz", "dz", State.GEMM, TILE),
    Kind(25, "dx", "dx", State.GEMM, TILE),
    Kind(26, "wgrad", "wgrad", State.GEMM, TILE),
    Kind(27, "epilogue dz", "dz", State.EPILOGUE, TILE),
    Kind(28, "epilogue dx", "dx", State.EPILOGUE, TILE),
    Kind(29, "epilogue wgrad", "wgrad", State.EPILOGUE, TILE),
)
KINDS = {kind.number: kind for kind in _TABLE}

TRAFFIC = ("pull", "push", "owner sum")
"""Parts that move rows between ranks."""

_KIND, _CHUNK, _EXPERT, _INDEX = (0, 8), (8, 16), (24, 16), (40, 24)  # shift and bits in a code
_BLOCK_BITS, _COLUMN_BITS = 16, 8  # of the index of a tile


def code(kind: int, chunk: int = 0, expert: int = 0, index: int = 0) -> int:
    """The first word of a row as int64, whose sign bit belongs to the index."""
    word = kind | chunk << _CHUNK[0] | expert << _EXPERT[0] | index << _INDEX[0]
    return word - (1 << 64) if word >> 63 else word


def tile(row_block: int, column: int) -> int:
    """The index of a tile."""
    return row_block | column << _BLOCK_BITS


def row_block(index: int) -> int:
    """The row block of a tile's index."""
    return index & ((1 << _BLOCK_BITS) - 1)


def event_name(kind: Kind, expert: int, index: int) -> str:
    """As the timeline names an event, such as ``gate/up e12 m3 n5`` or ``pull entry 345``."""
    if kind.index is None:
        return kind.label
    if kind.index == ENTRY:
        return f"{kind.label} entry {index}"
    column = index >> _BLOCK_BITS & ((1 << _COLUMN_BITS) - 1)
    return f"{kind.label} e{expert} m{row_block(index)} n{column}"


@dataclass(frozen=True)
class Trace:
    """Columns of N events, int64, ordered by start. Times are in ns from the first event of all."""

    cta: Tensor  # position in ``ctas``
    role: Tensor
    kind: Tensor
    chunk: Tensor
    expert: Tensor
    index: Tensor
    start: Tensor
    end: Tensor
    ctas: tuple[tuple[int, int], ...]
    """(rank, CTA) of every CTA that recorded anything; the others were not launched."""
    num_ranks: int
    full_lanes: tuple[tuple[int, int, int], ...]
    """(rank, CTA, role) of lanes without a free row: what came after was dropped."""
    malformed: int
    """Rows of an unknown kind or with an end before the start; they are no events."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def span(self) -> int:
        """ns from the first start to the last end."""
        return int(self.end.max()) if len(self) else 0

    def where(self, kinds: Sequence[Kind], role: int | None = None) -> Tensor:
        """Mask of the events of some kinds, of one role or of all."""
        wanted = torch.tensor([kind.number for kind in kinds], dtype=torch.int64)
        mask = torch.isin(self.kind, wanted)
        return mask if role is None else mask & (self.role == role)


def kinds_in(state: State, part: str | None = None) -> list[Kind]:
    """Rows of the table in a state, of one part or of all."""
    return [kind for kind in KINDS.values() if kind.state is state and part in (None, kind.part)]


def read(arrays: Sequence[Tensor]) -> Trace:
    """Events of the ranks on one device, from one int64 ``[ctas, roles, events, 3]`` per rank, in any order of rows.

    Raises ValueError for an array of another dtype or shape.
    """
    columns: list[Tensor] = []
    ctas: list[tuple[int, int]] = []
    full: list[tuple[int, int, int]] = []
    for rank, given in enumerate(arrays):
        if given.dtype != torch.int64 or given.dim() != 4 or given.shape[1::2] != (len(ROLES), WORDS):
            wanted = f"torch.int64 [ctas, {len(ROLES)}, events, {WORDS}]"
            raise ValueError(f"trace: got {given.dtype} {list(given.shape)}, wanted {wanted}")
        rows = given.cpu()
        used = rows[..., 0] != 0
        launched = used.flatten(1).any(1)
        # Number of each launched CTA among all of the device.
        number = len(ctas) + launched.cumsum(0) - 1
        ctas += [(rank, cta) for cta in launched.nonzero().flatten().tolist()]
        full += [(rank, cta, role) for cta, role in used.all(2).nonzero().tolist() if rows.shape[2]]
        cta, role, _ = used.nonzero().unbind(1)
        columns.append(torch.cat((torch.stack((number[cta], role), 1), rows[used]), 1))
    table = torch.cat(columns) if columns else torch.empty(0, 2 + WORDS, dtype=torch.int64)
    cta, role, codes, start, end = table.unbind(1)
    kind = _bits(codes, _KIND)
    valid = torch.isin(kind, torch.tensor(list(KINDS))) & (end >= start)
    order = torch.argsort(start[valid], stable=True)
    first = int(start[valid].min()) if len(order) else 0

    def column(values: Tensor) -> Tensor:
        return values[valid][order]

    return Trace(
        cta=column(cta),
        role=column(role),
        kind=column(kind),
        chunk=column(_bits(codes, _CHUNK)),
        expert=column(_bits(codes, _EXPERT)),
        index=column(_bits(codes, _INDEX)),
        start=column(start) - first,
        end=column(end) - first,
        ctas=tuple(ctas),
        num_ranks=len(arrays),
        full_lanes=tuple(full),
        malformed=int((~valid).sum()),
    )


def _bits(words: Tensor, field: tuple[int, int]) -> Tensor:
    # The shift carries the sign along; the mask takes it off again.
    return words >> field[0] & ((1 << field[1]) - 1)
