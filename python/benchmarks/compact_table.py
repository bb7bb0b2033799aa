"""One result as README shows it: a line for each layer, with how fast it is alongside what else there is and the limit.

Both protocols stand in every cell, burst / sustained. What is compared comes from one result, so from one run on one
machine. The emulation of `reference` is nothing that anybody trains with, and has no line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import staleness
from cells import heading, layer_name, line, number, place, way_name

PROTOCOLS = ("burst", "sustained")
OURS = ("fused", "deep_gemm", "grouped")
"""A layer's line has the first of these that was measured; the others are what it is compared with."""

WAYS = ("forward", "backward", "forward_backward")
WHOLE = (("forward_backward",), ("forward", "backward"), ("forward",), ("backward",))
"""What stands for a layer in a comparison: the first of these that was measured on all sides."""


@dataclass
class Measured:
    """The figures of one layer by one backend or peer."""

    name: str
    backend: str
    first: Any
    """One of its rows: what they have in common is read from it."""
    reserved: int
    rows: dict[tuple[str, str | None], Any] = field(default_factory=dict)
    """By direction and protocol; a peer has a protocol of its own, which counts for any."""

    @property
    def numerics(self) -> str:
        return self.first.precision if self.first.kind == "peer" else self.first.numerics

    @property
    def problem(self) -> tuple:
        """What two must share to be compared, but for the precision."""
        return self.first.shape, self.first.tokens

    def of(self, ways: Sequence[str], protocol: str) -> list | None:
        """Its rows of these directions; None unless every one was measured."""
        found = [self.rows.get((way, protocol), self.rows.get((way, None))) for way in ways]
        return None if None in found else found


def seconds(rows: list) -> float:
    return sum(row.outcome.timing.seconds for row in rows)


def section(result: Any, kernels: Any) -> str | None:
    """Where it ran, the table of what matters first, the other lines folded away; None where nothing has a line."""
    every = collect(result)
    first, rest = shown(every)
    if not first:
        return None
    where, changed = result.environment, []

    def old(rows: Sequence) -> bool:
        names = [name for row in rows for name in staleness.changed(row, where, kernels)]
        changed.extend(names)
        return bool(names)

    text = [
        f"**{place(where)}**, {where.date[:10]}, torch {where.torch}",
        "",
        *table(first, every, old),
    ]
    if rest:
        summary = f"<details><summary>{place(where)}: {describe(rest)}</summary>"
        text += ["", summary, "", *table(rest, every, old), "", "</details>"]
    return "\n".join([*text, *staleness.footnote(changed, where, kernels)])


def table(lines: list[Measured], every: list[Measured], old: Callable[[Sequence], bool]) -> list[str]:
    """A column for each of the others that one of the lines can be compared with."""
    rivals = [
        name
        for name in rival_names(every)
        if any((other := rival(own, name, every)) and ratio(own, other)[1] for own in lines)
    ]
    columns = [
        "layer",
        *(f"{way_name(way)} ms" for way in WAYS),
        "of ceiling",
        *(f"vs {name}" for name in rivals),
    ]
    body = [cells(own, [rival(own, name, every) for name in rivals], old) for own in lines]
    return [*heading(*columns), *(line(*row) for row in body)]


def describe(rest: list[Measured]) -> str:
    """What the lines that are folded away are about."""
    about = {
        "fewer tokens": any(not own.reserved for own in rest),
        "SMs reserved for other work": any(own.reserved for own in rest),
    }
    return ", ".join(name for name, there in about.items() if there)


def collect(result: Any) -> list[Measured]:
    """All layers and peers that were measured. Raises ValueError for two rows of one name."""
    found: dict[tuple, Measured] = {}
    for row in result.rows:
        if row.kind not in {"layer", "peer"} or row.outcome.status != "measured":
            continue
        peer = row.kind == "peer"
        backend = row.peer if peer else row.backend
        reserved = 0 if peer else row.reserved_sms or 0
        own = found.setdefault(
            (layer_name(row), row.kind, backend, reserved), Measured(layer_name(row), backend, row, reserved)
        )
        key = (row.direction, None if peer else row.outcome.timing.protocol)
        if key in own.rows:
            wanted = "its protocols once each"
            raise ValueError(f"{own.name}, {backend}, {row.direction}: got one twice, wanted {wanted}")
        own.rows[key] = row
    return list(found.values())


def shown(every: list[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The lines: most tokens, and the others. By shape as measured, precision, tokens."""
    ours = [own for own in every if own.first.kind == "layer" and own.backend in OURS]
    best = {
        name: min((own.backend for own in ours if own.name == name), key=OURS.index) for name in names(ours)
    }
    shapes = list(dict.fromkeys(own.first.shape for own in ours))
    most: dict[tuple, int] = {}
    for own in ours:
        kind = (own.first.shape, own.numerics)
        most[kind] = max(most.get(kind, 0), own.first.tokens)

    def order(own: Measured) -> tuple:
        row = own.first
        return shapes.index(row.shape), own.numerics, -row.tokens, own.name, own.reserved

    first, rest = [], []
    for own in sorted((own for own in ours if own.backend == best[own.name]), key=order):
        usual = own.first.tokens == most[own.first.shape, own.numerics]
        if usual and not own.reserved:
            first.append(own)
        elif usual or not own.reserved:  # what reserved SMs cost has one line for each shape and precision
            rest.append(own)
    return first, rest


def names(measured: list[Measured]) -> Iterator[str]:
    return iter(dict.fromkeys(own.name for own in measured))


def rival_names(every: list[Measured]) -> list[str]:
    """Other backends and peers: those of ours in our order, then peers as measured."""
    peers = dict.fromkeys(own.backend for own in every if own.first.kind == "peer")
    return [*reversed(OURS[1:]), *peers]


def rival(own: Measured, name: str, every: list[Measured]) -> Measured | None:
    """What has the same work on the same run by that backend or peer: in the same precision, else bf16, else any."""
    same = [
        other
        for other in every
        if other.backend == name != own.backend and other.problem == own.problem and not other.reserved
    ]
    for numerics in (own.numerics, "bf16"):
        for other in same:
            if other.numerics == numerics:
                return other
    return same[0] if same else None


def cells(own: Measured, rivals: list[Measured | None], old: Callable[[Sequence], bool]) -> list[str]:
    """A line's cells. `old` says whether one of some rows is stale."""
    all_stale = all(old([row]) for row in own.rows.values())

    def marked(text: str, rows: Sequence) -> str:
        stale = bool(rows) and not all_stale and old(rows)
        return f"{text} (stale)" if stale else text

    name = own.name
    name += "" if own.backend == "fused" else f", {own.backend}"
    name += f", {own.reserved} SMs reserved" if own.reserved else ""
    times = [marked(*milliseconds(own, way)) for way in WAYS]
    ratios = ["-" if other is None else marked(*ratio(own, other)) for other in rivals]
    return [f"{name} (stale)" if all_stale else name, *times, marked(*percent(own)), *ratios]


def milliseconds(own: Measured, way: str) -> tuple[str, list]:
    found = {protocol: own.of((way,), protocol) for protocol in PROTOCOLS}
    return both({name: number(seconds(rows) * 1e3) for name, rows in found.items() if rows}), flat(found)


def percent(own: Measured) -> tuple[str, list]:
    """Time at the ceiling over time, of the whole layer where that is known."""
    for ways in WHOLE:
        found = {protocol: own.of(ways, protocol) for protocol in PROTOCOLS}
        # The time at the ceiling is what adds up, not its share.
        values = {
            name: f"{sum(row.percent_of_ceiling * seconds([row]) for row in rows) / seconds(rows):.0f} %"
            for name, rows in found.items()
            if rows and None not in [row.percent_of_ceiling for row in rows]
        }
        if values:
            return both(values) + only(ways), flat(found)
    return "-", []


def ratio(own: Measured, other: Measured) -> tuple[str, list]:
    """How many times as fast as the other, over all that both were measured in."""
    for ways in WHOLE:
        values, rows = {}, []
        for protocol in PROTOCOLS:
            mine, theirs = own.of(ways, protocol), other.of(ways, protocol)
            if mine and theirs:
                values[protocol] = f"{seconds(theirs) / seconds(mine):.2f}x"
                rows += mine + theirs
        if values:
            precision = "" if other.numerics == own.numerics else f" ({other.numerics})"
            return both(values) + only(ways) + precision, rows
    return "-", []


def both(values: dict[str, str]) -> str:
    """The protocols side by side; names the one that is alone."""
    if len(values) == 1:
        ((protocol, value),) = values.items()
        return f"{value} ({protocol})"
    return " / ".join(values.values()) or "-"


def only(ways: Sequence[str]) -> str:
    return f" {ways[0]}" if ways in {("forward",), ("backward",)} else ""


def flat(found: dict[str, list | None]) -> list:
    return [row for rows in found.values() for row in rows or ()]
