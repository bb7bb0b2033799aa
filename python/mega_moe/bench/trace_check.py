"""Whether a trace is that of a right schedule: every product once, and none before what it reads was stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import Tensor

from mega_moe.bench.trace_events import Trace, kinds_in
from mega_moe.bench.trace_kinds import KINDS, ROW_BLOCK, Kind, Rows, State, event_name
from mega_moe.bench.trace_tiles import Tile, Unit


def tile_faults(trace: Trace, wanted: Counter[Tile]) -> list[str]:
    """A line for every tile without products, with too many or too few, and for products of no tile."""
    got = Counter(_tiles(trace, trace.where(kinds_in(State.PRODUCTS))))
    lines = [f"{_name(missing)}: no products" for missing in sorted(wanted.keys() - got.keys())]
    lines += [f"{_name(strange)}: products of no tile" for strange in sorted(got.keys() - wanted.keys())]
    for one in sorted(got.keys() & wanted.keys()):
        if got[one] != wanted[one]:
            lines.append(f"{_name(one)}: {got[one]} products, wanted {wanted[one]}")
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
            if kind.rows is Rows.EXPERT and (begun[0], *begun[2:4]) not in whole:
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
    if kind.rows is Rows.EXPERT:
        return rank, chunk, expert
    block = index & ROW_BLOCK.mask
    return rank, chunk, expert, block // 2 if kind.rows is Rows.TILE else block


def _name(one: Tile) -> str:
    rank, number, chunk, expert, index = one
    return f"rank {rank} chunk {chunk} {event_name(KINDS[number], expert, index)}"
