"""A result as one table of text, for a person at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mega_moe.bench.schema import CeilingRow, HostRow, LayerRow, Outcome, PeerRow, Result, Row

_HEADER = (
    "what",
    "backend",
    "direction",
    "protocol",
    "ms",
    "rate",
    "of ceiling",
    "MHz",
    "dW",
    "reserved SMs",
    "peak",
)


def render(result: Result) -> str:
    """Environment, table of the measured rows, then what was refused or failed and why."""
    environment = result.environment
    versions = (
        f"torch {environment.torch}, CUDA {environment.cuda or '-'}, driver {environment.driver or '-'}, "
        f"mega-moe {environment.mega_moe}"
    )
    lines = [
        f"{environment.device}, {_ranks(environment.num_ranks)}, {versions}, {environment.date}",
        f"wheel   {environment.wheel_sha256 or f'unknown: {environment.wheel_reason}'}",
        f"kernels {environment.kernels_sha256 or f'unknown: {environment.kernels_reason}'}",
        "",
    ]
    measured = [row for row in result.rows if row.outcome.status == "measured"]
    lines += columns([_HEADER, *(_cells(row) for row in measured)], left=4)
    lines += _notes(result)
    for row in result.rows:
        if row.outcome.status != "measured":
            lines.append(f"{row.outcome.status}: {_subject(row)}")
            for reason in row.outcome.reasons:
                lines += textwrap.wrap(reason, 106, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """One row as one line, for the progress of a run."""
    if row.outcome.status != "measured":
        return f"{row.outcome.status}: {_subject(row)}: {'; '.join(row.outcome.reasons)}"
    return "  ".join(cell for cell in _cells(row) if cell != "-")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows as aligned lines, the first underlined: `left` columns to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _cells(row: Row) -> tuple[str, ...]:
    timing = row.outcome.timing
    assert timing is not None
    time = (timing.protocol, f"{timing.seconds * 1e3:.3f}")
    mhz = "-" if timing.mhz is None else f"{timing.mhz:.0f}"
    if isinstance(row, CeilingRow):
        return (row.name, "-", "-", *time, _rate(row.rate, row.unit), "-", mhz, "-", "-", "-")
    if isinstance(row, HostRow):
        times = f"{row.ratio:.2f} x line"
        direction = row.direction.replace("_", "+")
        return (f"host {row.shape}", row.backend, direction, *time, times, "-", mhz, "-", "-", "-")
    rate = _rate(row.tflops, "TF/s")
    if isinstance(row, PeerRow):
        named = f"{row.shape} T={row.tokens} {row.precision}"
        return (named, row.peer, row.direction, *time, rate, "-", mhz, "-", "-", "-")
    return (
        _layer(row),
        row.backend,
        row.direction.replace("_", "+"),
        *time,
        rate,
        "-" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.1f} %",
        mhz,
        row.dw_dtype or "-",
        "n/a" if row.reserved_sms is None else str(row.reserved_sms),
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f} GiB",
    )


def _rate(value: float | None, unit: str) -> str:
    assert value is not None
    # A CPU's GEMMs are thousands of times slower than the unit is made for.
    return f"{value * 1e3:.3g} GF/s" if unit == "TF/s" and value < 1 else f"{value:.4g} {unit}"


def _layer(row: LayerRow) -> str:
    copies = "" if row.weight_copies is None else f", weight copies {row.weight_copies}"
    return f"{row.shape} T={row.tokens} {row.numerics}{copies}"


def _subject(row: Row) -> str:
    if isinstance(row, CeilingRow):
        return row.name
    if isinstance(row, PeerRow):
        return f"{row.shape} T={row.tokens} {row.precision}: {row.peer}"
    if isinstance(row, HostRow):
        return f"host {row.shape}: backend {row.backend}"
    direction = "" if row.direction == "all" else f" {row.direction}"
    reserved = "" if row.reserved_sms is None else f" with {row.reserved_sms} reserved SMs"
    return f"{_layer(row)}: backend {row.backend}{direction}{reserved}"


def _notes(result: Result) -> list[str]:
    """The facts that the columns have no room for, each said once."""
    lines = [""]
    rules = {
        row.direction: row.flop_rule for row in result.rows if isinstance(row, LayerRow) and row.flop_rule
    }
    lines += [f"FLOPs of {direction.replace('_', '+')}: {rule}" for direction, rule in rules.items()]
    if any(isinstance(row, LayerRow) and row.reserved_sms is None for row in result.rows):
        lines.append("reserved SMs n/a: the backend's kernels are sized by torch, none can be reserved")
    lines += sorted({f"MHz -: {reason}" for row in result.rows if (reason := _mhz_reason(row.outcome))})
    return lines


def _mhz_reason(outcome: Outcome) -> str | None:
    return outcome.timing.mhz_reason if outcome.timing else None
