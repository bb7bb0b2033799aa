"""Whether a trace is that of a right schedule: every tile once, and none before what it reads was stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from mega_moe.bench.trace_events import Trace, kinds_in
from mega_moe.bench.trace_kinds import KINDS, ROW_BLOCK, State, event_name, tile

BLOCK_ROWS = 64  # rows of an expert that one tile multiplies

Tile = tuple[int, int, int, int, int]
"""rank, kind, chunk, expert, index"""


def tiles_of(rows: Sequence[Tensor], slots: Sequence[Tensor], columns: Mapping[str, int]) -> set[Tile]:
    """All tiles of a call, from each rank's ``expert_rows`` and ``expert_slots`` and the column blocks of each part."""
    kinds = [kind for kind in kinds_in(State.PRODUCTS) if kind.part in columns]
    return {
        (rank, kind.number, chunk, expert, tile(block, column))
        for rank, tables in enumerate(zip(rows, slots, strict=True))
        for chunk, units in enumerate(zip(*(table.tolist() for table in tables)))
        for expert, (count, slot) in enumerate(zip(*units))
        for block in range(slot // BLOCK_ROWS, -(-(slot + count) // BLOCK_ROWS))
        for kind in kinds
        for column in range(columns[kind.part])
    }


def tile_faults(trace: Trace, wanted: set[Tile]) -> list[str]:
    """A line for every tile without products, with products more than once, and for products of no tile."""
    got = Counter(_tiles(trace, trace.where(kinds_in(State.PRODUCTS))))
    lines = [f"{_name(missing)}: no products" for missing in sorted(wanted - got.keys())]
    lines += [f"{_name(strange)}: products of no tile" for strange in sorted(got.keys() - wanted)]
    return lines + [f"{_name(twice)}: {count} products" for twice, count in sorted(got.items()) if count > 1]


def order_faults(trace: Trace) -> list[str]:
    """A line for every event that began before those that its kind comes ``after`` had ended.

    Those are the events of all column blocks of the same rows.
    """
    lines = []
    for kind in KINDS.values():
        if not kind.after:
            continue
        before = trace.where([KINDS[kind.after]])
        ended: dict[Tile, int] = {}
        for done, end in zip(_tiles(trace, before), trace.end[before].tolist()):
            ended[_rows(done)] = max(end, ended.get(_rows(done), end))
        mine = trace.where([kind])
        for begun, start in zip(_tiles(trace, mine), trace.start[mine].tolist()):
            needs = _rows((begun[0], kind.after, *begun[2:]))
            if needs not in ended:
                lines.append(f"{_name(begun)}: no {KINDS[kind.after].label} of its rows")
            elif start < ended[needs]:
                lines.append(
                    f"{_name(begun)}: began at {start} ns, the last {KINDS[kind.after].label} of its rows "
                    f"ended at {ended[needs]} ns"
                )
    return lines


def _tiles(trace: Trace, mask: Tensor) -> list[Tile]:
    columns = (trace.cta, trace.kind, trace.chunk, trace.expert, trace.index)
    return [
        (trace.ctas[cta][0], kind, chunk, expert, index)
        for cta, kind, chunk, expert, index in zip(*(column[mask].tolist() for column in columns))
    ]


def _rows(one: Tile) -> Tile:
    """The same for all tiles of the same rows."""
    return (*one[:4], one[4] & ROW_BLOCK.mask)


def _name(one: Tile) -> str:
    rank, number, chunk, expert, index = one
    return f"rank {rank} chunk {chunk} {event_name(KINDS[number], expert, index)}"
