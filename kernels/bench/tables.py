"""Prints the figures of a result file of the micro-benchmarks as tables.

python kernels/bench/tables.py microbench.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def grid(title: str, heads: Iterable[str], rows: Iterable[list[str]]) -> str:
    """Columns as wide as their longest entry, the first to the left, the others to the right."""
    lines = [list(heads), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [title]
    for line in lines:
        first, *others = (entry.ljust(width) for entry, width in zip(line[:1], widths))
        others = [entry.rjust(width) for entry, width in zip(line[1:], widths[1:])]
        text.append("  ".join([first, *others]).rstrip())
    return "\n".join(text)


def pivot(title: str, rows: list[Json], down: str, across: str, cell: Callable[[Json], str]) -> str:
    """One line per value of `down`, one column per value of `across`, both in the order in which they occur."""
    heads = list(dict.fromkeys(row[across] for row in rows))
    cells: dict[Any, dict[Any, str]] = {}
    for row in rows:
        cells.setdefault(row[down], {})[row[across]] = cell(row)
    body = [[str(name), *(line.get(head, "-") for head in heads)] for name, line in cells.items()]
    return grid(title, [down, *map(str, heads)], body)


def both(row: Json, figure: str, digits: int = 0) -> str:
    """Burst and sustained figure with the clock of each."""
    parts = (
        f"{row[f'{kind}_{figure}']:.{digits}f}@{row[f'{kind}_mhz']:.0f}" for kind in ("burst", "sustained")
    )
    return " / ".join(parts)


def tiles_table(rows: list[Json]) -> list[str]:
    return [
        pivot(
            "Products: TFLOP/s @ MHz, burst / sustained",
            rows,
            "variant",
            "shape",
            lambda row: both(row, "tflops"),
        ),
        pivot(
            "Products: share of the tensor cores at that clock, burst / sustained",
            rows,
            "variant",
            "shape",
            lambda row: f"{row['burst_share']:.2f} / {row['sustained_share']:.2f}",
        ),
    ]


def sms_table(rows: list[Json]) -> list[str]:
    title = f"Products on fewer SMs ({rows[0]['variant']}): TFLOP/s @ MHz, burst / sustained"
    return [pivot(title, rows, "blocks", "shape", lambda row: both(row, "tflops"))]


def l2_table(rows: list[Json]) -> list[str]:
    heads = [
        "TMA out of L2",
        "read TB/s burst",
        "sustained",
        "fill TB/s burst",
        "KB/clk",
        "fill B/clk/SM",
        "MHz",
    ]
    keys = (
        ("burst_read_tb_s", 2),
        ("sustained_read_tb_s", 2),
        ("burst_fill_tb_s", 2),
        ("read_kb_per_clock", 2),
        ("fill_bytes_per_clock_per_sm", 1),
        ("burst_mhz", 0),
    )
    return [
        grid("", heads, ([row["variant"], *(f"{row[key]:.{n}f}" for key, n in keys)] for row in rows)).strip()
    ]


def peer_table(rows: list[Json]) -> list[str]:
    tables = []
    for name, device in dict.fromkeys((row["variant"], row["device"]) for row in rows):
        own = [row for row in rows if (row["variant"], row["device"]) == (name, device)]
        for row in own:
            row["SMs"] = row["blocks"]
            row["shape"] = f"{row['warps']}x{row['buffers']}x{row['row_bytes']}"
        kinds = [kind for kind in ("pull", "push") if any(row[f"sustained_{kind}_gb_s"] for row in own)]

        def cell(row: Json, kinds: list[str] = kinds) -> str:
            return "+".join(f"{row[f'sustained_{kind}_gb_s']:.0f}" for kind in kinds)

        title = f"Copies, {name}, device {device}: sustained GB/s of {'+'.join(kinds)}, by warps x buffers x bytes"
        tables.append(pivot(title, own, "SMs", "shape", cell))
    return tables


def launch_table(rows: list[Json]) -> list[str]:
    return [pivot("Barrier over a grid: us, burst / sustained", rows, "blocks", "cluster", times)]


def times(row: Json) -> str:
    return f"{row['burst_us']:.2f} / {row['sustained_us']:.2f}"


def flags_table(rows: list[Json]) -> list[str]:
    body = ([row["variant"], times(row), f"{row['sustained_mhz']:.0f}"] for row in rows)
    return [grid("", ["Flag round trip", "us, burst / sustained", "MHz"], body).strip()]


TABLES: dict[str, Callable[[list[Json]], list[str]]] = {
    "peer": peer_table,
    "l2": l2_table,
    "tiles": tiles_table,
    "sms": sms_table,
    "launch": launch_table,
    "flags": flags_table,
}


def checked(group: Json) -> str:
    """How many checks passed, and how far off the worst GEMM was."""
    checks = group["checks"]
    text = f"{sum(line['ok'] is True for line in checks)} of {len(checks)} checks passed"
    errors = [line["relative_error"] for line in checks if line.get("relative_error") is not None]
    return f"{text}, relative error {min(errors):.2e} to {max(errors):.2e}" if errors else text


def format_tables(result: Json) -> str:
    """All tables of a result, each group with its status, checks and what it skipped."""
    parts = []
    for name, group in result["groups"].items():
        reason = f": {group['reason']}" if "reason" in group else ""
        parts.append(f"== {name}: {group['status']}{reason} ({checked(group)}, {group['seconds']} s)")
        parts += [f"skipped: {line['measure']}: {line['reason']}" for line in group["skipped"]]
        if group["rows"]:
            parts += TABLES[name](group["rows"])
    return "\n".join(parts)


if __name__ == "__main__":
    print(format_tables(json.loads(Path(sys.argv[1]).read_text())))
