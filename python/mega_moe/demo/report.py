"""What a run leaves behind: `report.json` and the loss curve `loss.png`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def mean_of_last(losses: list[float], count: int = 50) -> float:
    """Mean of the last `count` losses: one batch is too small to be called the loss."""
    tail = losses[-count:]
    return sum(tail) / len(tail)


def running_mean(losses: list[float]) -> list[float]:
    """At each step the mean so far, in which a loss weighs 5 % less with every later one."""
    running, smooth = losses[0], []
    for loss in losses:
        running += 0.05 * (loss - running)
        smooth.append(running)
    return smooth


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write both files into `out`. `report` needs `history` as the loop keeps it."""
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    draw_losses(out / "loss.png", report["history"], report["backend"])


def draw_losses(path: Path, history: dict[str, Any], backend: str) -> None:
    """Draw training loss (each step, and its running mean) and held-out loss over the steps."""
    # The object interface: pyplot would choose a screen and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses: list[float] = history["loss"]
    smooth = running_mean(losses)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(smooth, color="tab:blue", label="training, running mean")
    if history["held_out"]:
        steps, held_out = zip(*history["held_out"], strict=True)
        axes.plot(steps, held_out, "o-", color="tab:orange", label="held out")
    axes.axhline(math.log(256), color="grey", linestyle=":", linewidth=0.8, label="uniform guess, ln 256")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"mega-moe train, backend {backend}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
