"""The schedule that a trace must show, and whether it does: every tile once, none before its inputs were stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mega_moe.bench.kernel_ranks import KernelRanks, Options
from mega_moe.bench.trace_events import KINDS, Kind, State, Trace, event_name, kinds_in, row_block, tile
from mega_moe.testing.tables import plain_tables

BLOCK_ROWS = 64  # rows of an expert that one event of a math warpgroup is about
PART_ROWS = 16384  # rows of an expert that a gradient's tile sums at once
_WARPGROUPS = 2  # both record the same index for their halves of a gradient's tile

Tile = tuple[int, int, int, int, int]
"""rank, kind, chunk, expert, index"""

Unit = tuple[int, int, int]
"""rank, chunk, expert"""


@dataclass(frozen=True)
class Wanted:
    """How often each tile is computed, and the experts whose wgrad in a chunk waits for all of its rows."""

    tiles: Counter[Tile]
    whole: frozenset[Unit] = frozenset()

    def total(self) -> int:
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
    (kind,) = kinds_in(State.GEMM, "wgrad")
    for (rank, chunk, expert), parts in wgrad_parts(rows):
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


def wanted_of(options: Options, ranks: KernelRanks) -> Wanted:
    shape = options.shape
    ids = [inputs.layer.topk_idx for inputs in ranks.inputs]
    tables = [
        plain_tables(ids, rank, shape.num_experts, *kernels.shape.chunk_limits())
        for rank, kernels in enumerate(ranks.kernels)
    ]
    rows, slots = [t.expert_rows for t in tables], [t.expert_slots for t in tables]
    of_direction = of_forward if options.direction == "forward" else of_backward
    return of_direction(rows, slots, shape.hidden, shape.intermediate)


def row_tiles(rows: Sequence[Tensor], slots: Sequence[Tensor], columns: Mapping[str, range]) -> Counter[Tile]:
    """Each block of rows once for each of the ``columns`` of the parts, by which an index names them."""
    return Counter(
        (rank, kind.number, chunk, expert, tile(block, column))
        for rank, tables in enumerate(zip(rows, slots, strict=True))
        for chunk, units in enumerate(zip(*(table.tolist() for table in tables)))
        for expert, (count, slot) in enumerate(zip(*units))
        for block in range(slot // BLOCK_ROWS, -(-(slot + count) // BLOCK_ROWS))
        for kind in kinds_in(State.GEMM)
        if kind.part in columns
        for column in columns[kind.part]
    )


def wgrad_parts(rows: Sequence[Tensor]) -> Iterator[tuple[Unit, int]]:
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


def tile_faults(trace: Trace, wanted: Counter[Tile]) -> list[str]:
    """A line for every tile that was not computed, or not as often as wanted, and for those that do not exist."""
    got = Counter(_tiles(trace, trace.where(kinds_in(State.GEMM))))
    lines = [f"{_name(missing)}: not computed" for missing in sorted(wanted.keys() - got.keys())]
    lines += [f"{_name(strange)}: no such tile" for strange in sorted(got.keys() - wanted.keys())]
    for one in sorted(got.keys() & wanted.keys()):
        if got[one] != wanted[one]:
            lines.append(f"{_name(one)}: computed {got[one]} times, wanted {wanted[one]}")
    return lines


def order_faults(trace: Trace, whole: Collection[Unit] = ()) -> list[str]:
    """A line for every event that began before those that its kind comes ``after`` had ended.

    Those are the events of all column blocks of some rows. ``whole``: where events that wait for an expert wait for all
    of its rows; elsewhere they wait for a part that the trace does not name.
    """
    lines = []
    for kind in KINDS.values():
        if not kind.after:
            continue
        before = trace.where([KINDS[kind.after]])
        ended: dict[tuple[int, ...], int] = {}
        for done, end in zip(_tiles(trace, before), trace.end[before].tolist()):
            key = _rows(kind, done)
            ended[key] = max(end, ended.get(key, end))
        mine = trace.where([kind])
        for begun, start in zip(_tiles(trace, mine), trace.start[mine].tolist()):
            if kind.rows == "expert" and (begun[0], *begun[2:4]) not in whole:
                continue
            needs = ended.get(_rows(kind, begun))
            if needs is None:
                lines.append(f"{_name(begun)}: no {KINDS[kind.after].label} of its rows")
            elif start < needs:
                lines.append(
                    f"{_name(begun)}: began at {start} ns, the last {KINDS[kind.after].label} of its rows "
                    f"ended at {needs} ns"
                )
    return lines


def _tiles(trace: Trace, mask: Tensor) -> list[Tile]:
    columns = (trace.cta, trace.kind, trace.chunk, trace.expert, trace.index)
    return [
        (trace.ctas[cta][0], kind, chunk, expert, index)
        for cta, kind, chunk, expert, index in zip(*(column[mask].tolist() for column in columns))
    ]


def _rows(kind: Kind, one: Tile) -> tuple[int, ...]:
    """The same for all tiles whose rows an event of this kind waits for together."""
    rank, _, chunk, expert, index = one
    if kind.rows == "expert":
        return rank, chunk, expert
    block = row_block(index)
    return rank, chunk, expert, block // 2 if kind.rows == "tile" else block


def _name(one: Tile) -> str:
    rank, number, chunk, expert, index = one
    return f"rank {rank} chunk {chunk} {event_name(KINDS[number], expert, index)}"
