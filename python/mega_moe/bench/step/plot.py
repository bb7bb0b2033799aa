"""The step time of each backend and precision as one picture: what is spent in MoE layers, and the rest."""

from __future__ import annotations

from pathlib import Path

from mega_moe.bench.schema import StepResult


def draw(result: StepResult, path: Path) -> None:
    """Write a PNG; ModuleNotFoundError where matplotlib is missing, ValueError where nothing was measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result.rows if row.status == "measured"]
    if not rows:
        raise ValueError("plot: no backend was measured")
    figure, axes = pyplot.subplots(figsize=(7, 1.6 + 0.6 * len(rows)), layout="constrained")
    names = [f"{row.backend} {row.precision}\n{row.tokens_per_s:.0f} tokens/s/GPU" for row in rows]
    inside = [row.moe_seconds or 0.0 for row in rows]
    rest = [(row.seconds or 0.0) - moe for row, moe in zip(rows, inside)]
    axes.barh(names, inside, label="MoE layers", color="#3b6ea5")
    axes.barh(names, rest, left=inside, label="rest of the step", color="#c9ced6")
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one training step")
    first = rows[0]
    axes.set_title(
        f"{first.model}, {first.layers} of {first.model_layers} layers, sequence {first.sequence}, "
        f"{result.environment.device} x {first.num_ranks}",
        fontsize="medium",
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
