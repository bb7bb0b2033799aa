"""Words and figures that the tables of report.py share."""

from __future__ import annotations

from typing import Any


def place(where: Any) -> str:
    """The device, and how many of them."""
    return where.device if where.num_ranks == 1 else f"{where.device} x {where.num_ranks}"


def layer_name(row: Any) -> str:
    """What a layer's or peer's row is about, but for who computes it, which way and on how many SMs."""
    if row.kind == "peer":
        return f"{row.shape}, T {row.tokens}, {row.precision}"
    copies = "" if row.weight_copies is None else f", weight copies {row.weight_copies}"
    return f"{row.shape}, T {row.tokens}, {row.numerics}{copies}"


def way_name(direction: str) -> str:
    return direction.replace("_", "+")


def short(sha256: str | None) -> str:
    return "unknown" if sha256 is None else f"`{sha256[:12]}`"


def number(value: float) -> str:
    """Three digits, never an exponent for a large number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def heading(*cells: str) -> list[str]:
    return [line(*cells), line(*("---" for _ in cells))]
