"""Which products the trace of a call must show, from the routing and the extents of the layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mega_moe.bench.trace_events import kinds_in
from mega_moe.bench.trace_kinds import KINDS, Kind, State, tile

BLOCK_ROWS = 64  # rows of an expert that one event of a math warpgroup is about
PART_ROWS = 16384  # rows of an expert that a gradient's tile sums at once
_WARPGROUPS = 2  # both record the same index for their halves of a gradient's tile

Tile = tuple[int, int, int, int, int]
"""rank, kind, chunk, expert, index"""

Unit = tuple[int, int, int]
"""rank, chunk, expert"""


@dataclass(frozen=True)
class Wanted:
    """How many products of each tile, and the experts whose gradients of a chunk wait for all of its rows."""

    tiles: Counter[Tile]
    whole: frozenset[Unit] = frozenset()

    def products(self) -> int:
        return self.tiles.total()


def of_forward(rows: Sequence[Tensor], slots: Sequence[Tensor], hidden: int, intermediate: int) -> Wanted:
    """From each rank's ``expert_rows`` and ``expert_slots``, int ``[chunks, experts]``."""
    return Wanted(
        row_tiles(rows, slots, {"gate/up": range(intermediate // 128), "down": range(hidden // 256)})
    )


def of_backward(rows: Sequence[Tensor], slots: Sequence[Tensor], hidden: int, intermediate: int) -> Wanted:
    """As `of_forward`, of a backward that is asked for everything and adds to nothing.

    An index names columns of 128; tiles of dx and of gradients are 256 wide.
    """
    tiles = row_tiles(rows, slots, {"dz": range(intermediate // 128), "dx": range(0, hidden // 128, 2)})
    weights = Counter(
        tile(row, column)
        for num_rows, num_columns in ((2 * intermediate, hidden), (hidden, intermediate))
        for row in range(num_rows // 128)
        for column in range(0, num_columns // 128, 2)
    )
    (kind,) = kinds_in(State.PRODUCTS, "gradient")
    for (rank, chunk, expert), parts in gradient_parts(rows):
        for index, count in weights.items():
            tiles[rank, kind.number, chunk, expert, index] += count * parts * _WARPGROUPS
    whole = frozenset(
        (rank, chunk, expert)
        for rank, table in enumerate(rows)
        for chunk, counts in enumerate(table.tolist())
        for expert, count in enumerate(counts)
        if 0 < count <= PART_ROWS
    )
    return Wanted(tiles, whole)


def row_tiles(rows: Sequence[Tensor], slots: Sequence[Tensor], columns: Mapping[str, range]) -> Counter[Tile]:
    """Each block of rows once for each of the ``columns`` of the parts, by which an index names them."""
    return Counter(
        (rank, kind.number, chunk, expert, tile(block, column))
        for rank, tables in enumerate(zip(rows, slots, strict=True))
        for chunk, units in enumerate(zip(*(table.tolist() for table in tables)))
        for expert, (count, slot) in enumerate(zip(*units))
        for block in range(slot // BLOCK_ROWS, -(-(slot + count) // BLOCK_ROWS))
        for kind in _products(columns)
        for column in columns[kind.part]
    )


def gradient_parts(rows: Sequence[Tensor]) -> Iterator[tuple[Unit, int]]:
    """In how many parts the rows of an expert in a chunk are summed; without any row one part of the first chunk writes
    zeros."""
    for rank, table in enumerate(rows):
        for expert, counts in enumerate(table.t().tolist()):
            parts = [-(-count // PART_ROWS) for count in counts]
            if not any(parts):
                parts[0] = 1
            for chunk, number in enumerate(parts):
                if number:
                    yield (rank, chunk, expert), number


def _products(columns: Mapping[str, range]) -> list[Kind]:
    return [kind for kind in KINDS.values() if kind.state is State.PRODUCTS and kind.part in columns]
