"""docs/benchmarks.png: latency of the layer by implementation, from the figures of summary.py."""

from __future__ import annotations

from pathlib import Path

import summary
from cells import number, place
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = dict(zip(summary.IMPLEMENTATIONS, ("#9aa5b1", "#e0a030", "#3b75b5", "#2f7d4f"), strict=True))


def draw(results: list, path: Path, stamp: str) -> None:
    """Write the picture of `figure_of`; `stamp` goes into the file's Description."""
    # Its own colours on a white ground, so that the file reads on a dark page too.
    figure_of(results).savefig(path, dpi=110, metadata={"Description": stamp}, facecolor="white")


def figure_of(results: list) -> Figure:
    """A row of panels for each machine, a column for each shape; one colour per implementation in all of them."""
    panels = list(summary.panels(results))
    places = list(dict.fromkeys(place(panel.environment) for panel in panels))
    shapes = list(dict.fromkeys(panel.shape for panel in panels))
    size = max(1, len(places)), max(1, len(shapes))
    figure = Figure(figsize=(3.2 + 3.6 * size[1], 0.5 + 2.7 * size[0]), layout="constrained")
    axes = figure.subplots(*size, squeeze=False)
    for one in axes.flat:
        one.set_axis_off()
    for panel in panels:
        one = axes[places.index(place(panel.environment))][shapes.index(panel.shape)]
        one.set_axis_on()
        draw_panel(one, panel)
    entries = {
        label: handle for one in figure.axes for handle, label in zip(*one.get_legend_handles_labels())
    }
    order = [name for name in summary.IMPLEMENTATIONS if name in entries]
    figure.legend([entries[name] for name in order], order, loc="outside right center", frameon=False)
    return figure


def draw_panel(axes: Axes, panel: summary.Panel) -> None:
    shown = [name for name in summary.IMPLEMENTATIONS if panel.rows[name]]
    centers, edge = [], 0.0
    for way in summary.DIRECTIONS:
        # Bars stand without gaps for what was not measured in this direction.
        bars = [(name, ms) for name in shown if (ms := panel.milliseconds(name, way)) is not None]
        for at, (name, ms) in enumerate(bars):
            drawn = axes.bar(edge + at, ms, 0.9, color=COLORS[name], label=name)
            axes.bar_label(drawn, [number(ms)], fontsize=8)
        centers.append(edge + (len(bars) - 1) / 2)
        edge += len(bars) + 0.8
    axes.set_xticks(centers, summary.DIRECTIONS)
    axes.set_ylabel("ms per call")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{panel.shape}, {place(panel.environment)}, {panel.tokens} tokens per GPU", fontsize=9)
