"""One result as docs/benchmarks.md shows it: every row, and why what is missing is missing."""

from __future__ import annotations

from typing import Any

import staleness
from cells import heading, layer_name, line, number, place, short, way_name


def section(result: Any, kernels: Any, which: str = "") -> str:
    """Where and with what, its table, what was refused. ``which``: said behind the place."""
    where = result.environment
    head = (
        f"{where.date[:10]}, torch {where.torch}, driver {where.driver or 'unknown'}, "
        f"kernels {short(where.kernels_sha256)}, wheel {short(where.wheel_sha256)}; "
        f"windows a figure: {windows(result)}."
    )
    rows, changed = table(result, kernels)
    lines = [f"### Every row: {place(where)}{which}", "", head, "", *rows]
    lines += staleness.footnote(changed, where, kernels)
    missing = absent(result)
    if missing:
        # An empty line ends the table, which would swallow the list as further rows.
        lines += ["", *missing]
    return "\n".join(lines)


def table(result: Any, kernels: Any) -> tuple[list[str], list[str]]:
    """One line per thing measured, its protocols side by side, and what has changed since for the stale ones."""
    groups: dict[tuple[str, ...], list] = {}
    for row in result.rows:
        if row.outcome.status == "measured":
            groups.setdefault(subject(row), []).append(row)
    lines = heading(
        "what", "backend", "direction", "ms", "rate", "of ceiling", "MHz", "dW", "reserved SMs", "peak GiB"
    )
    changed: list[str] = []
    for (what, backend, direction, unit, dw, reserved), rows in groups.items():
        rows.sort(key=lambda row: row.outcome.timing.protocol)
        columns = [
            " / ".join(number(row.outcome.timing.seconds * 1e3) for row in rows) + alone(rows),
            " / ".join(number(rate(row)) for row in rows) + f" {unit}",
            " / ".join(percent(row) for row in rows),
            " / ".join(mhz(row) for row in rows),
        ]
        old = staleness.changed(rows[0], result.environment, kernels)
        changed += old
        name = f"{what} (stale)" if old else what
        lines.append(line(name, backend, direction, *columns, dw, reserved, peak(rows)))
    return lines, changed


def subject(row: Any) -> tuple[str, ...]:
    """What the protocols of one line have in common: what, backend, direction, unit, dW, reserved SMs."""
    if row.kind == "ceiling":
        return (f"{row.name}: {row.what}", "-", "-", row.unit, "-", "-")
    what, direction = layer_name(row), way_name(row.direction)
    if row.kind == "peer":
        return (what, row.peer, direction, "TF/s", "-", "-")
    reserved = "n/a" if row.reserved_sms is None else str(row.reserved_sms)
    return (what, row.backend, direction, "TF/s", row.dw_dtype or "-", reserved)


def windows(result: Any) -> str:
    """How many windows the medians are of; a peer's own are not known."""
    timings = [row.outcome.timing for row in result.rows if row.kind != "peer"]
    counts = {(one.protocol, len(one.windows_s)) for one in timings if one is not None}
    return ", ".join(f"{count} {protocol}" for protocol, count in sorted(counts)) or "none"


def alone(rows: list) -> str:
    """Names the protocol where a line has one only."""
    return "" if len(rows) > 1 else f" ({rows[0].outcome.timing.protocol})"


def rate(row: Any) -> float:
    return row.rate if row.kind == "ceiling" else row.tflops


def percent(row: Any) -> str:
    value = None if row.kind in {"ceiling", "peer"} else row.percent_of_ceiling
    return "-" if value is None else f"{value:.0f} %"


def mhz(row: Any) -> str:
    return "-" if row.outcome.timing.mhz is None else f"{row.outcome.timing.mhz:.0f}"


def peak(rows: list) -> str:
    """Most device memory that a call of the layer held beyond inputs and weights, its results and buffer included."""
    found = [row.peak_bytes for row in rows if row.kind == "layer" and row.peak_bytes is not None]
    return f"{max(found) / 2**30:.2f}" if found else "-"


def absent(result: Any) -> list[str]:
    """What has no figure, as list items: the rows of one backend with the same reasons share one."""
    groups: dict[tuple, list[str]] = {}
    for row in result.rows:
        if row.outcome.status == "measured":
            continue
        backend, what = "", subject(row)[0]
        if row.kind == "layer":
            backend = f"{row.backend}: "
            what += "" if row.direction == "all" else f", {way_name(row.direction)}"
        elif row.kind == "peer":
            backend = f"{row.peer}: "
        groups.setdefault((row.outcome.status, backend, row.outcome.reasons), []).append(what)
    return [
        f"- {status}: {backend}{'; '.join(dict.fromkeys(rows))}: {'; '.join(reasons)}"
        for (status, backend, reasons), rows in groups.items()
    ]
