"""Whether training with a backend follows training with the reference: one run alongside three that differ by one ulp.

    python -m mega_moe.demo.follow [--backend fused] [--steps 400] [--out demo-run/follow]

Training amplifies every rounding, so two right backends part after some steps. How far apart right runs end is seen
from the reference itself: it trains three times, from an input embedding as drawn, one ulp up and one ulp down. A run
is judged by the mean loss of its last 50 steps. It follows when that lies at most twice the spread of the three outside
of their range; a fourth reference run would lie further out in 5 % of all cases, were such means normally distributed.

Writes follow.json and follow.png into the folder; the status is 1 when the backend does not follow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mega_moe
from mega_moe.demo.config import Config
from mega_moe.demo.corpus import Corpus, load_corpus
from mega_moe.demo.parallel import Ranks, connect
from mega_moe.demo.report import mean_of_last, running_mean
from mega_moe.demo.train import learning_rate
from mega_moe.demo.trainer import Trainer

LAST = 50  # steps whose mean loss is compared
SPREADS = 2.0  # that a run may lie outside of the references' range
REFERENCE = "reference"


@dataclass(frozen=True)
class Run:
    """One training: its backend, ulps by which every number of the embedding was moved, and the loss of each step."""

    backend: str
    ulps: int
    seconds: float
    losses: list[float]

    @property
    def name(self) -> str:
        return f"{self.backend}{f' {self.ulps:+d} ulp' if self.ulps else ''}"

    @property
    def end(self) -> float:
        return mean_of_last(self.losses, LAST)


@dataclass(frozen=True)
class Verdict:
    """Mean losses of the last steps, in nats per byte."""

    references: list[float]
    other: float
    spread: float  # of the references
    outside: float  # how far the other lies outside of their range
    follows: bool

    def __str__(self) -> str:
        listed = ", ".join(f"{value:.4f}" for value in self.references)
        return (
            f"{'follows' if self.follows else 'DOES NOT FOLLOW'} the reference: {self.other:.4f}, references {listed}, "
            f"spread {self.spread:.4f}, {self.outside:.4f} outside, at most {SPREADS * self.spread:.4f} allowed"
        )


def judge(references: list[float], other: float) -> Verdict:
    low, high = min(references), max(references)
    spread, outside = high - low, max(low - other, other - high, 0.0)
    return Verdict(references, other, spread, outside, outside <= SPREADS * spread)


def train_once(config: Config, corpus: Corpus, ranks: Ranks, backend: str, ulps: int) -> Run:
    trainer = Trainer(config, corpus, ranks, backend=backend)
    with trainer.buffer:
        with torch.no_grad():
            embedding = trainer.model.embedding.weight
            for _ in range(abs(ulps)):
                embedding.copy_(torch.nextafter(embedding, torch.full_like(embedding, float("inf") * ulps)))
        start = time.monotonic()
        losses = [
            trainer.step(step, learning_rate(config, step, step / config.steps)).loss
            for step in range(config.steps)
        ]
        return Run(backend, ulps, time.monotonic() - start, losses)


def follow(config: Config, out: Path, backend: str, device: str | None = None) -> Verdict:
    """Trains four times, tells each run on standard error, writes both files. Raises ValueError under torchrun."""
    ranks = connect(device, None)
    if ranks.world_size > 1:
        raise ValueError(
            f"ranks: got {ranks.world_size} processes, wanted one: runs are compared step by step"
        )
    corpus = load_corpus(config)
    runs = []
    for name, ulps in ((backend, 0), (REFERENCE, 0), (REFERENCE, 1), (REFERENCE, -1)):
        run = train_once(config, corpus, ranks, name, ulps)
        runs.append(run)
        print(
            f"{run.name}: {len(run.losses)} steps in {run.seconds:.1f} s, loss {run.end:.4f} at the end",
            file=sys.stderr,
        )
    verdict = judge([run.end for run in runs[1:]], runs[0].end)
    out.mkdir(parents=True, exist_ok=True)
    (out / "follow.json").write_text(
        json.dumps(_document(config, corpus, ranks, runs, verdict), indent=1) + "\n"
    )
    draw(out / "follow.png", runs, verdict)
    return verdict


def _document(
    config: Config, corpus: Corpus, ranks: Ranks, runs: list[Run], verdict: Verdict
) -> dict[str, Any]:
    on_gpu = ranks.device.type == "cuda"
    return {
        "mega_moe": mega_moe.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "corpus_sha256": corpus.sha256,
        "config": config.as_dict(),
        "last_steps": LAST,
        "spreads_allowed": SPREADS,
        "verdict": asdict(verdict),
        "runs": [{**asdict(run), "name": run.name, "end": run.end} for run in runs],
    }


def draw(path: Path, runs: list[Run], verdict: Verdict) -> None:
    """Running means of all runs, whole and the last steps enlarged, and how far each is from the first reference."""
    # The object interface: pyplot would choose a screen and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    whole, apart = figure.subplots(1, 2)
    first = running_mean(runs[1].losses)
    for number, run in enumerate(runs):
        smooth = running_mean(run.losses)
        style: dict[str, Any] = (
            {"color": "tab:red", "zorder": 3}
            if number == 0
            else {"color": "tab:blue", "alpha": 1.0 - 0.25 * number}
        )
        whole.plot(smooth, linewidth=1.2, label=f"{run.name}: {run.end:.4f}", **style)
        if number != 1:
            apart.plot([a - b for a, b in zip(smooth, first)], linewidth=1.2, label=run.name, **style)
    whole.set(xlabel="step", ylabel="training loss, nats per byte (running mean)")
    apart.set(xlabel="step", ylabel=f"difference to {runs[1].name}")
    apart.axhline(0, color="tab:blue", linewidth=0.8)
    for axes in (whole, apart):
        axes.axvspan(len(first) - LAST, len(first), color="0.9", zorder=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{runs[0].name} {'follows' if verdict.follows else 'does not follow'} the reference")
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mega_moe.demo.follow", description=__doc__)
    parser.add_argument("--backend", default="fused", help="that is to follow (default: fused)")
    parser.add_argument("--steps", type=int, default=400, help="of each of the four runs (default: 400)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-run/follow"), help="(default: demo-run/follow)"
    )
    words = parser.parse_args(argv)
    try:
        if words.steps < LAST:
            raise ValueError(f"steps: got {words.steps}, wanted at least {LAST}")
        config = replace(Config(), steps=words.steps, minutes=0.0)
        verdict = follow(config, words.out, words.backend, words.device)
    except (ValueError, FloatingPointError, mega_moe.MegaMoEError) as error:
        print(f"follow: {error}", file=sys.stderr)
        return 2
    print(f"{words.backend} {verdict}")
    print(f"written: {words.out}/follow.json and follow.png")
    return 0 if verdict.follows else 1


if __name__ == "__main__":
    raise SystemExit(main())
