"""docs/benchmarks.png: TF/s of the layer by backend, beside the product's ceiling of the same run and protocol.

Of each shape the most tokens, evenly routed, on all SMs: the other rows would leave no room for their names.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

SHADES = {"burst": 1.0, "sustained": 0.5}
DASHES = {"burst": "-", "sustained": "--"}


def draw(results: list, path: Path, stamp: str) -> None:
    """One panel per result; `stamp` goes into the file's Description."""
    figure = Figure(figsize=(10, 0.6 + 3.6 * len(results)), layout="constrained")
    for panel, result in zip(figure.subplots(len(results), 1, squeeze=False).flat, results):
        draw_result(panel, result)
    # Its own colours on a white ground, so that the file reads on a dark page too.
    figure.savefig(path, dpi=110, metadata={"Description": stamp}, facecolor="white")


def draw_result(panel, result) -> None:
    where = result.environment
    layer = [
        row
        for row in result.rows
        if row.kind == "layer"
        and row.outcome.status == "measured"
        and row.skew is None
        and not row.reserved_sms
    ]
    most = {
        shape: max(row.tokens for row in layer if row.shape == shape) for shape in {r.shape for r in layer}
    }
    layer = [row for row in layer if row.tokens == most[row.shape]]
    groups = list(dict.fromkeys(group_of(row) for row in layer))
    series = list(dict.fromkeys(series_of(row) for row in layer))
    backends = list(dict.fromkeys(label for label, _ in series))
    colors = dict(zip(backends, mpl.color_sequences["tab10"] * len(backends)))
    width = 0.8 / max(1, len(series))
    for index, (backend, protocol) in enumerate(series):
        bars = {group_of(row): row.tflops for row in layer if series_of(row) == (backend, protocol)}
        places = [groups.index(group) + (index - (len(series) - 1) / 2) * width for group in bars]
        label = f"{backend}, {protocol}"
        panel.bar(
            places, list(bars.values()), width, color=colors[backend], alpha=SHADES[protocol], label=label
        )
    for row in result.rows:
        if row.kind == "ceiling" and row.rate is not None and row.unit == "TF/s":
            protocol = row.outcome.timing.protocol
            panel.axhline(
                row.rate,
                color="0.3",
                linewidth=0.8,
                linestyle=DASHES[protocol],
                label=f"{row.name}, {protocol}",
            )
    panel.set_xticks(
        range(len(groups)),
        [f"{shape}, T {tokens}\n{way.replace('_', '+')}" for shape, tokens, way in groups],
        fontsize=7,
    )
    panel.set_ylabel("TF/s")
    ranks = "" if where.num_ranks == 1 else f" x {where.num_ranks}"
    panel.set_title(f"{where.device}{ranks}, {where.date[:10]}, torch {where.torch}", fontsize=9)
    panel.margins(y=0.2)  # room for the legend above the bars
    panel.legend(fontsize=6, ncols=3)


def group_of(row) -> tuple[str, int, str]:
    """The bars that stand side by side."""
    return row.shape, row.tokens, row.direction


def series_of(row) -> tuple[str, str]:
    """Backend with its precision, and the protocol."""
    return f"{row.backend} {row.numerics}", row.outcome.timing.protocol
