"""A trace as a picture: some CTAs by role, and the whole device over time. Needs matplotlib, of the extra `demo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_moe.bench.trace_events import Trace, kinds_in
from mega_moe.bench.trace_kinds import ROLES, TRAFFIC, State
from mega_moe.bench.trace_summary import edges_of, per_cta, share_over_time, spans_of

SHOWN_CTAS = 4
INTERVALS = 400  # of the area chart
ZOOM_US = 60.0  # that the enlarged timeline shows, from the middle: some tiles, where the whole is a blur

COLORS = {
    State.PRODUCTS: "#2f7d4f",
    State.EPILOGUE: "#e0a030",
    State.COPY: "#3b75b5",
    State.WAIT: "#d9d9d9",
    State.SETUP: "#8c6bb1",
}
_LINES = dict(zip(TRAFFIC, ("#3b75b5", "#c0392b", "black")))


def missing_reason() -> str | None:
    """Why no picture can be drawn here, None where one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (the extra mega-moe[demo] brings it)"
    return None


def shown_ctas(trace: Trace) -> list[int]:
    """Positions of a handful of CTAs, evenly spread, the first and the last among them."""
    count = min(SHOWN_CTAS, len(trace.ctas))
    return torch.linspace(0, len(trace.ctas) - 1, count).round().int().tolist() if count else []


def math_states(trace: Trace, edges: Tensor) -> dict[State, Tensor]:
    """How many CTAs' math warpgroups are in each state, in each interval; the three add up to all CTAs.

    A CTA is in products while any of its warpgroups is, else in an epilogue while any is, else it waits.
    """
    products = share_over_time(per_cta(trace, trace.where(kinds_in(State.PRODUCTS))), edges, 1)
    both = trace.where([*kinds_in(State.PRODUCTS), *kinds_in(State.EPILOGUE)])
    working = share_over_time(per_cta(trace, both), edges, 1)
    return {
        State.PRODUCTS: products,
        State.EPILOGUE: working - products,
        State.WAIT: len(trace.ctas) - working,
    }


def traffic(trace: Trace, edges: Tensor) -> dict[str, Tensor]:
    """How many CTAs move rows, in each interval, by part."""
    return {
        part: share_over_time(per_cta(trace, trace.where(kinds_in(State.COPY, part))), edges, 1)
        for part in TRAFFIC
    }


def draw(trace: Trace, path: Path, title: str) -> None:
    """Write the PNG."""
    # The object interface: pyplot would choose a screen and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    whole = max(trace.span * 1e-3, 1e-3)
    shown = shown_ctas(trace)
    height = 0.6 + 0.15 * len(shown) * len(ROLES)
    figure = Figure(figsize=(16, 2 * height + 6), layout="constrained")
    FigureCanvasAgg(figure)
    zoomed, lanes, area, lines = figure.subplots(4, 1, height_ratios=[height, height, 3, 2])
    figure.suptitle(title)
    figure.legend(
        handles=[Patch(color=color, label=state.value) for state, color in COLORS.items()],
        loc="outside lower center",
        ncols=len(COLORS),
        fontsize=8,
    )
    window = min(ZOOM_US, whole)
    _draw_lanes(zoomed, trace, shown, ((whole - window) / 2, (whole + window) / 2))
    _draw_lanes(lanes, trace, shown, (0.0, whole))

    edges = edges_of(trace, INTERVALS)
    middles = ((edges[:-1] + edges[1:]).double() / 2e3).tolist()
    states = math_states(trace, edges)
    area.stackplot(
        middles,
        [values.tolist() for values in states.values()],
        colors=[COLORS[state] for state in states],
        labels=[f"math: {state.value}" for state in states],
    )
    area.set(ylabel="CTAs", ylim=(0, max(1, len(trace.ctas))))
    for part, values in traffic(trace, edges).items():
        if not bool(values.any()):
            continue
        lines.plot(middles, values.tolist(), color=_LINES[part], linewidth=1.2, label=part)
    lines.set(ylabel="CTAs moving rows", xlabel="us from the first event", ylim=(0, None))
    for axes in (area, lines):
        axes.set_xlim(0, whole)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.savefig(path, dpi=120, facecolor="white")


def _draw_lanes(axes: Any, trace: Trace, shown: list[int], window: tuple[float, float]) -> None:
    labels = []
    inside = (trace.end * 1e-3 >= window[0]) & (trace.start * 1e-3 <= window[1])
    for position, cta in enumerate(shown):
        rank, number = trace.ctas[cta]
        where = f"rank {rank} CTA {number}" if trace.num_ranks > 1 else f"CTA {number}"
        for role, name in enumerate(ROLES):
            lane = position * len(ROLES) + role
            labels.append(f"{where} {name}")
            for state, color in COLORS.items():
                spans = spans_of(trace, inside & (trace.cta == cta) & trace.where(kinds_in(state), role))
                starts, lengths = spans.start / 1e3, (spans.end - spans.start) / 1e3
                axes.broken_barh(
                    list(zip(starts.tolist(), lengths.tolist())), (lane + 0.1, 0.8), color=color, linewidth=0
                )
        if position:
            axes.axhline(position * len(ROLES), color="0.3", linewidth=0.8)
    axes.set_yticks([lane + 0.5 for lane in range(len(labels))], labels, fontsize=6)
    axes.set(xlim=window, ylim=(max(1, len(labels)), 0))
