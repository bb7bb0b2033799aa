"""Does training in fp8 end where training in bf16 ends? The same runs in each precision, with the same seeds.

    python -m mega_moe.demo.convergence --out DIR

Writes DIR/convergence.json and DIR/convergence.png, and each run into a folder of its own, where a second invocation
finds it. The verdict on a precision: the mean of its final held-out losses lies within twice the spread of those of
bf16, largest minus smallest over the seeds. Exit status 0 if all do, 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_moe import FallbackWarning
from mega_moe.demo.command import fields_of
from mega_moe.demo.config import Config

PRECISIONS = ("bf16", "fp8", "fp8_bwd")
SPREADS = 2.0  # of bf16, within which another precision must end
SMOOTHED = 20  # steps of a drawn loss: batches differ more than precisions do


def judge(losses: dict[str, list[float]]) -> dict[str, Any]:
    """The verdict on final ``losses`` by precision, seeds in one order; `ok` of each, and of all."""
    base = losses["bf16"]
    spread = max(base) - min(base)
    mean = statistics.fmean(base)
    verdicts = {}
    for precision, finals in losses.items():
        off = statistics.fmean(finals) - mean
        verdicts[precision] = {
            "mean": statistics.fmean(finals),
            "spread": max(finals) - min(finals),
            "mean_minus_bf16": off,
            "minus_bf16_by_seed": [a - b for a, b in zip(finals, base, strict=True)],
            "ok": abs(off) <= SPREADS * spread,
        }
    return {
        "spread_of_bf16": spread,
        "allowed": SPREADS * spread,
        "precisions": verdicts,
        "ok": all(v["ok"] for v in verdicts.values()),
    }


def run_all(
    config: Config,
    out: Path,
    seeds: Sequence[int],
    *,
    backends: dict[str, str],
    device: str | None = None,
) -> dict[str, Any]:
    """Every precision of ``backends`` with every seed, for all steps of ``config``; returns what is written."""
    reports: dict[str, list[dict[str, Any]]] = {precision: [] for precision in backends}
    for seed in seeds:
        for precision, backend in backends.items():
            reports[precision].append(
                _one(replace(config, seed=seed, minutes=0.0), out, precision, backend, device)
            )
    losses = {precision: [r["held_out_loss"] for r in runs] for precision, runs in reports.items()}
    first = reports["bf16"][0]
    result = {
        "config": config.as_dict() | {"seed": list(seeds)},
        "device": first["device"],
        "torch": first["torch"],
        "mega_moe": first["mega_moe"],
        "corpus": first["corpus"],
        "backends": {precision: runs[0]["reason"] for precision, runs in reports.items()},
        "final_held_out": losses,
        "final_training": {p: [r["train_loss"] for r in runs] for p, runs in reports.items()},
        "verdict": judge(losses),
        "held_out": {p: [r["history"]["held_out"] for r in runs] for p, runs in reports.items()},
        "training": {p: [r["history"]["loss"] for r in runs] for p, runs in reports.items()},
    }
    (out / "convergence.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(out / "convergence.png", result)
    return result


def _one(config: Config, out: Path, precision: str, backend: str, device: str | None) -> dict[str, Any]:
    from mega_moe.demo.train import train

    folder = out / f"{precision}-{config.seed}"
    done = folder / "report.json"
    if done.is_file():
        report: dict[str, Any] = json.loads(done.read_text())
        if report["config"] != config.as_dict() or backend not in ("auto", report["backend"]):
            raise ValueError(f"{done}: is of another run, must be removed or --out be another folder")
        return report
    print(f"{precision}, seed {config.seed}", file=sys.stderr)
    return train(config, folder, backend=backend, precision=precision, device=device)


def draw(path: Path, result: dict[str, Any]) -> None:
    """Training loss over the steps, one line a run, and the final held-out losses alongside it."""
    # The object interface: pyplot would choose a screen and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, finals = figure.subplots(1, 2, width_ratios=(2, 1))
    colours = dict(zip(result["held_out"], ("tab:blue", "tab:orange", "tab:green"), strict=False))
    for precision, runs in result["training"].items():
        for at, run in enumerate(runs):
            means = [statistics.fmean(run[max(0, end - SMOOTHED) : end]) for end in range(1, len(run) + 1)]
            curves.plot(
                range(1, len(run) + 1),
                means,
                color=colours[precision],
                alpha=0.8,
                linewidth=1,
                label=None if at else precision,
            )
    curves.set(
        xlabel="step",
        ylabel=f"training loss, nats per byte, mean of {SMOOTHED} steps",
        title=result["device"],
    )
    curves.grid(alpha=0.3)
    curves.legend()
    for at, (precision, losses) in enumerate(result["final_held_out"].items()):
        finals.plot([at] * len(losses), losses, "o", color=colours[precision])
        finals.plot([at - 0.2, at + 0.2], [statistics.fmean(losses)] * 2, color=colours[precision])
    verdict = result["verdict"]
    mean = verdict["precisions"]["bf16"]["mean"]
    finals.axhspan(
        mean - verdict["allowed"], mean + verdict["allowed"], color="grey", alpha=0.2, label="allowed"
    )
    finals.set_xticks(range(len(result["final_held_out"])), list(result["final_held_out"]))
    finals.set(title="final held-out loss, mean as a line")
    finals.grid(alpha=0.3)
    finals.legend()
    figure.savefig(path, dpi=120)


def summary(result: dict[str, Any]) -> str:
    """The verdict in a few lines."""
    verdict = result["verdict"]
    lines = [f"spread of bf16 over {len(result['config']['seed'])} seeds: {verdict['spread_of_bf16']:.4f}"]
    for precision, row in verdict["precisions"].items():
        lines.append(
            f"{precision:8} held-out {row['mean']:.4f}, {row['mean_minus_bf16']:+.4f} from bf16 "
            f"(allowed {verdict['allowed']:.4f}): {'ok' if row['ok'] else 'TOO FAR'}; {result['backends'][precision]}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command; 0 when every precision ends close enough to bf16, 1 when one does not, 2 for bad words or values."""
    defaults = Config()
    made = argparse.ArgumentParser(
        prog="python -m mega_moe.demo.convergence", description=__doc__.splitlines()[0]
    )
    made.add_argument("--steps", type=int, default=defaults.steps, help="of each run (default: %(default)s)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    made.add_argument("--backend", default="auto", help="of the experts (default: %(default)s)")
    made.add_argument("--fp8-backend", help="of fp8 and fp8_bwd, such as reference (default: as --backend)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    made.add_argument("--out", type=Path, default=Path("convergence"), help="default: %(default)s")
    made.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as in mega-moe train")
    words = made.parse_args(argv)
    fp8 = words.fp8_backend or words.backend
    names = ["bf16", *(p for p in words.precisions if p != "bf16")]
    try:
        config = replace(defaults, steps=words.steps, **fields_of(words.set))
        words.out.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            result = run_all(
                config,
                words.out,
                words.seeds,
                backends={name: words.backend if name == "bf16" else fp8 for name in names},
                device=words.device,
            )
    except ValueError as error:
        print(f"{made.prog}: error: {error}", file=sys.stderr)
        return 2
    print(summary(result))
    return 0 if result["verdict"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
