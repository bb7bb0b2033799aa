"""The figures that README shows: latency of the published shapes by implementation, as a table; plot.py draws them.

Each figure is one of a run's own rows: most tokens, no reserved SMs, sustained load. Another
implementation has the protocol of its own script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import staleness
from cells import heading, line, number, place

SHAPES = ("30B", "235B")
DIRECTIONS = ("forward", "backward")
BASELINE = "torch grouped GEMM + all-to-all"
OURS = {"fused bf16": "bf16", "fused fp8": "fp8"}
CAPTION = (
    "Latency per layer call (ms), `fused`, {tokens} tokens per GPU, sustained load. Speed-up: over torch grouped GEMM "
    "+ all-to-all in bf16, forward and backward together. fp8: weights prequantized, dW in bf16. Method, every row and "
    "training steps: [docs/benchmarks.md](docs/benchmarks.md)."
)

# What each implementation is in a result, the first that was measured counts.
_CHOICES: dict[str, tuple[Callable[[Any], bool], ...]] = {
    BASELINE: (
        lambda row: row.kind == "peer" and row.peer == "torch grouped + all-to-all",
        lambda row: row.kind == "layer" and row.backend == "grouped" and row.numerics == "bf16",
    ),
    "DeepGEMM FP8 (fp8_mega_moe)": (lambda row: row.kind == "peer" and row.peer == "deep_gemm fp8_mega_moe",),
    "fused bf16": (lambda row: row.kind == "layer" and row.backend == "fused" and row.numerics == "bf16",),
    "fused fp8": (
        lambda row: (
            row.kind == "layer"
            and row.backend == "fused"
            and row.numerics == "fp8"
            and row.weight_copies == "reused"
        ),
    ),
}
IMPLEMENTATIONS = tuple(_CHOICES)


@dataclass(frozen=True)
class Panel:
    """One shape on one machine: rows by implementation and direction."""

    environment: Any
    shape: str
    tokens: int
    rows: dict[str, dict[str, Any]]

    def milliseconds(self, implementation: str, direction: str) -> float | None:
        row = self.rows.get(implementation, {}).get(direction)
        return None if row is None else row.outcome.timing.seconds * 1e3

    def speedup(self, implementation: str) -> float | None:
        """Over the baseline, forward and backward together; None unless both were measured of both."""
        own, other = (
            [self.milliseconds(name, way) for way in DIRECTIONS] for name in (implementation, BASELINE)
        )
        return None if None in (*own, *other) else sum(other) / sum(own)  # type: ignore[arg-type]


def panels(results: list) -> Iterator[Panel]:
    """Every shape of every result in which `fused` was measured."""
    for shape in SHAPES:
        for result in results:
            rows = [row for row in result.rows if _counts(row, shape)]
            tokens = max((row.tokens for row in rows if row.kind == "layer"), default=0)
            found = {name: _rows([r for r in rows if r.tokens == tokens], name) for name in IMPLEMENTATIONS}
            if any(found[name] for name in OURS):
                yield Panel(result.environment, shape, tokens, found)


def section(results: list, kernels: Any) -> str | None:
    """README's table with its caption; None where nothing is to be shown."""
    every = list(panels(results))
    if not every:
        return None
    body, changed = [], {}
    for panel in every:
        for name, precision in OURS.items():
            rows = panel.rows[name]
            if not rows:
                continue
            shown = [rows.get(way) for way in DIRECTIONS]
            other = panel.rows[BASELINE].values() if panel.speedup(name) else ()
            found = [
                n for r in (*rows.values(), *other) for n in staleness.changed(r, panel.environment, kernels)
            ]
            changed.setdefault(id(panel.environment), (panel.environment, []))[1].extend(found)
            layer = f"{panel.shape}, {precision}{' (stale)' if found else ''}"
            times = ["-" if row is None else number(row.outcome.timing.seconds * 1e3) for row in shown]
            speedup = panel.speedup(name)
            body.append(line(layer, place(panel.environment), *times, f"{speedup:.2f}x" if speedup else "-"))
    # What several environments say alike is said once.
    notes = list(
        dict.fromkeys(
            text for where, names in changed.values() for text in staleness.footnote(names, where, kernels)
        )
    )
    tokens = " or ".join(str(count) for count in sorted({panel.tokens for panel in every}))
    table = [*heading("layer", "on", "forward ms", "backward ms", "speed-up"), *body, *notes]
    return CAPTION.format(tokens=tokens) + "\n\n" + "\n".join(table)


def _counts(row: Any, shape: str) -> bool:
    if row.kind not in {"layer", "peer"} or row.shape != shape or row.outcome.status != "measured":
        return False
    if row.kind == "peer":
        return True
    return not row.reserved_sms and row.outcome.timing.protocol == "sustained"


def _rows(rows: list, implementation: str) -> dict[str, Any]:
    for chosen in _CHOICES[implementation]:
        found = {row.direction: row for row in rows if chosen(row) and row.direction in DIRECTIONS}
        if found:
            return found
    return {}
