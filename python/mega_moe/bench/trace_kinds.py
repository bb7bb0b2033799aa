"""What the tracing kernel records: the one table of event kinds, and the code that a row carries.

A new kernel's kinds are new rows of the table; everything that reads, sums up, draws or checks a trace goes by it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ROLES = ("load", "math 0", "math 1", "pull", "push")
"""Names of a CTA's lanes, by the second index of the trace."""

WORDS = 3
"""int64 words of a row: code, start and end in ns of %globaltimer."""


class State(enum.Enum):
    """What a role does during an event."""

    WAIT = "waiting"
    COPY = "copying"
    PRODUCTS = "products"
    EPILOGUE = "epilogue"
    SETUP = "routing"


class Index(enum.Enum):
    """What the index of a code tells."""

    NONE = "nothing"
    TILE = "row block of the rank's slots, and column block of the product"
    ENTRY = "entry of a list of tokens"


class Rows(enum.Enum):
    """Whose earlier work an event waits for."""

    BLOCK = "of the same block of rows"
    TILE = "of the two blocks of the same tile"
    EXPERT = "of the expert in the chunk"


@dataclass(frozen=True)
class Kind:
    """One row of the table. ``part`` is the piece of work, the same for its waits, loads, products and epilogue."""

    number: int
    label: str  # as the timeline names it
    part: str
    state: State
    index: Index = Index.NONE
    after: int = 0
    """Of a tile: the kind that must have ended before, for all tiles of some rows.

    The forward tells it of products, whose wait is an event of its own. The backward's products begin with that wait,
    so there it is the loads that begin when the inputs are there.
    """
    rows: Rows = Rows.BLOCK


_TABLE = (
    Kind(1, "wait for gate/up inputs", "gate/up", State.WAIT, Index.TILE),
    Kind(2, "wait for down inputs", "down", State.WAIT, Index.TILE),
    Kind(3, "load gate/up", "gate/up", State.COPY, Index.TILE),
    Kind(4, "load down", "down", State.COPY, Index.TILE),
    Kind(5, "wait for tile", "tile", State.WAIT, Index.TILE),
    Kind(6, "gate/up", "gate/up", State.PRODUCTS, Index.TILE),
    Kind(7, "down", "down", State.PRODUCTS, Index.TILE, after=8),
    Kind(8, "epilogue gate/up", "gate/up", State.EPILOGUE, Index.TILE),
    Kind(9, "epilogue down", "down", State.EPILOGUE, Index.TILE),
    Kind(10, "wait to pull", "pull", State.WAIT, Index.ENTRY),
    Kind(11, "pull", "pull", State.COPY, Index.ENTRY),
    Kind(12, "wait to push", "push", State.WAIT, Index.ENTRY),
    Kind(13, "push", "push", State.COPY, Index.ENTRY),
    Kind(14, "wait for owner sum", "owner sum", State.WAIT, Index.ENTRY),
    Kind(15, "owner sum", "owner sum", State.COPY, Index.ENTRY),
    Kind(16, "routing", "routing", State.SETUP),
    Kind(17, "first rows", "first rows", State.SETUP),
    Kind(18, "wait for dz inputs", "dz", State.WAIT, Index.TILE),
    Kind(19, "wait for dx inputs", "dx", State.WAIT, Index.TILE),
    Kind(20, "wait for gradient inputs", "gradient", State.WAIT, Index.TILE),
    Kind(21, "load dz", "dz", State.COPY, Index.TILE),
    Kind(22, "load dx", "dx", State.COPY, Index.TILE, after=27, rows=Rows.TILE),
    Kind(23, "load gradient", "gradient", State.COPY, Index.TILE, after=27, rows=Rows.EXPERT),
    Kind(24, "dz", "dz", State.PRODUCTS, Index.TILE),
    Kind(25, "dx", "dx", State.PRODUCTS, Index.TILE),
    Kind(26, "gradient", "gradient", State.PRODUCTS, Index.TILE),
    Kind(27, "epilogue dz", "dz", State.EPILOGUE, Index.TILE),
    Kind(28, "epilogue dx", "dx", State.EPILOGUE, Index.TILE),
    Kind(29, "epilogue gradient", "gradient", State.EPILOGUE, Index.TILE),
)
KINDS = {kind.number: kind for kind in _TABLE}

TRAFFIC = ("pull", "push", "owner sum")
"""Parts that move rows between ranks; what of them products hide is the overlap."""


@dataclass(frozen=True)
class Field:
    """Bits of a code."""

    shift: int
    bits: int

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1


KIND, CHUNK, EXPERT, INDEX = Field(0, 8), Field(8, 16), Field(24, 16), Field(40, 24)
ROW_BLOCK, COLUMN = Field(0, 16), Field(16, 8)
"""Of the index of a tile."""


def code(kind: int, chunk: int = 0, expert: int = 0, index: int = 0) -> int:
    """The word of a row as int64, whose sign the upper half of all indices reaches."""
    word = kind | chunk << CHUNK.shift | expert << EXPERT.shift | index << INDEX.shift
    return word - (1 << 64) if word >> 63 else word


def tile(row_block: int, column: int) -> int:
    """The index of a tile."""
    return row_block | column << COLUMN.shift


def event_name(kind: Kind, expert: int, index: int) -> str:
    """As the timeline names an event, such as ``gate/up e12 m3 n5`` or ``pull entry 345``."""
    if kind.index is Index.NONE:
        return kind.label
    if kind.index is Index.ENTRY:
        return f"{kind.label} entry {index}"
    return f"{kind.label} e{expert} m{index & ROW_BLOCK.mask} n{index >> COLUMN.shift & COLUMN.mask}"
