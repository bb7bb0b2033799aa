"""docs/benchmarks.png: TF/s of the layer by backend, alongside the product's ceiling of the same run and protocol.

Of each shape the most tokens, evenly routed, on all SMs: the other rows would leave no room for their names.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

SHADES = {"burst": 1.0, "sustained": 0.5}
DASHES = {"burst": "-", "sustained": "--"}
DIRECTIONS = ("forward", "backward", "forward_backward")
CEILING_COLORS = ("0.1", "0.6")


def draw(results: list, path: Path, stamp: str) -> None:
    """Write the picture of `figure_of`; `stamp` goes into the file's Description."""
    # Its own colours on a white ground, so that the file reads on a dark page too.
    figure_of(results).savefig(path, dpi=110, metadata={"Description": stamp}, facecolor="white")


def figure_of(results: list) -> Figure:
    """One panel per result, with the same colours in all and one legend alongside them."""
    layers = [shown_rows(result) for result in results]
    names = dict.fromkeys(implementation(row) for layer in layers for row in layer)
    colors = dict(zip(names, mpl.color_sequences["tab10"] * len(names)))
    figure = Figure(figsize=(12, 0.6 + 3.6 * len(results)), layout="constrained")
    for panel, result, layer in zip(figure.subplots(len(results), 1, squeeze=False).flat, results, layers):
        draw_result(panel, result, layer, colors)
    entries = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels())
    }
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=7)
    return figure


def shown_rows(result) -> list:
    """Measured rows of the layer, evenly routed, on all SMs, with the most tokens of their shape."""
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
    return [row for row in layer if row.tokens == most[row.shape]]


def draw_result(panel, result, layer: list, colors: dict) -> None:
    where = result.environment
    shapes = list(dict.fromkeys(row.shape for row in layer))
    groups = sorted(
        {group_of(row) for row in layer}, key=lambda g: (shapes.index(g[0]), DIRECTIONS.index(g[2]))
    )
    own = {(implementation(row), row.outcome.timing.protocol) for row in layer}
    series = [(name, protocol) for name in colors for protocol in SHADES if (name, protocol) in own]
    width = 0.8 / max(1, len(series))
    for index, (name, protocol) in enumerate(series):
        bars = {
            group_of(row): row.tflops
            for row in layer
            if (implementation(row), row.outcome.timing.protocol) == (name, protocol)
        }
        places = [groups.index(group) + (index - (len(series) - 1) / 2) * width for group in bars]
        panel.bar(
            places,
            list(bars.values()),
            width,
            color=colors[name],
            alpha=SHADES[protocol],
            label=f"{name}, {protocol}",
        )
    ceilings = [
        row for row in result.rows if row.kind == "ceiling" and row.rate is not None and row.unit == "TF/s"
    ]
    of_name = dict(zip(dict.fromkeys(row.name for row in ceilings), CEILING_COLORS * len(ceilings)))
    for row in ceilings:
        protocol = row.outcome.timing.protocol
        panel.axhline(
            row.rate,
            color=of_name[row.name],
            linewidth=1.2,
            linestyle=DASHES[protocol],
            label=f"{row.name}, {protocol}",
        )
    panel.set_xticks(
        range(len(groups)),
        [f"{shape}, T {tokens}\n{way.replace('_', '+')}" for shape, tokens, way in groups],
        fontsize=7,
    )
    panel.set_xlim(-0.5, len(groups) - 0.5)
    panel.set_ylabel("TF/s")
    ranks = "" if where.num_ranks == 1 else f" x {where.num_ranks}"
    panel.set_title(f"{where.device}{ranks}, {where.date[:10]}, torch {where.torch}", fontsize=9)


def group_of(row) -> tuple[str, int, str]:
    """The bars that stand side by side."""
    return row.shape, row.tokens, row.direction


def implementation(row) -> str:
    """Backend with its precision: what has one colour."""
    return f"{row.backend} {row.numerics}"
