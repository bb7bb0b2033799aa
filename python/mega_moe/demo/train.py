"""The loop: progress, time box, evaluation, checkpoints, report."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import mega_moe
from mega_moe.demo import checkpoint
from mega_moe.demo.config import RESUMABLE, Config
from mega_moe.demo.corpus import load_corpus
from mega_moe.demo.parallel import Ranks, connect, disconnect
from mega_moe.demo.report import mean_of_last, write_report
from mega_moe.demo.trainer import StepResult, Trainer


def train(
    config: Config,
    out: Path,
    *,
    backend: str = "auto",
    precision: str = "bf16",
    device: str | None = None,
    ep_size: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the job and return its report, the same on every rank; rank 0 writes it and the loss curve into `out`.

    Progress goes to standard error. Raises ValueError for settings that do not fit, among them a resume whose
    checkpoint was made with another model, text or seed.
    """
    ranks = connect(device, ep_size)
    try:
        corpus = load_corpus(config)
        trainer = Trainer(config, corpus, ranks, backend=backend, precision=precision)
        with trainer.buffer:
            report = _Run(trainer, out, resume).finish()
        # A rank that leaves takes its connections along, and rank 0 the store, from those at their last exchange.
        ranks.barrier()
        return report
    finally:
        disconnect(ranks)


def learning_rate(config: Config, step: int, progress: float) -> float:
    """Warm-up over the first steps, constant, then a straight fall to zero over the last part of the run."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    return config.learning_rate * warm * min(1.0, (1.0 - progress) / config.decay_share)


class _Run:
    """One invocation: where it started and what the run has seen, earlier invocations included."""

    def __init__(self, trainer: Trainer, out: Path, resume: bool) -> None:
        self.trainer, self.config, self.ranks = trainer, trainer.config, trainer.ranks
        self.out, self.checkpoints = out, out / "checkpoints"
        self.history: dict[str, Any] = {field: [] for field in (*StepResult._fields, "held_out")}
        if resume:
            self._resume()
        self.first_step = len(self.history["loss"])
        self.started = time.monotonic()
        self.bar = tqdm(
            total=self.config.steps,
            initial=self.first_step,
            unit="step",
            file=sys.stderr,
            mininterval=1.0,  # a log file keeps every refresh
            disable=self.ranks.rank != 0,
        )

    def finish(self) -> dict[str, Any]:
        """Train to the end of the steps or of the time, then evaluate, check, save and report."""
        config, trainer, step = self.config, self.trainer, self.first_step
        self._introduce()
        while (progress := self._progress(step)) < 1.0:
            result = trainer.step(step, learning_rate(config, step, progress))
            step += 1
            self._record(step, result)
            if step % config.eval_every == 0 and step < config.steps:
                self._evaluate(step)
            if step % config.checkpoint_every == 0 and step < config.steps:
                self._save(step)
        speed, seconds = self._tokens_per_second(step), time.monotonic() - self.started
        self._evaluate(step)
        self._save(step)
        self.bar.close()
        report = self._report(step, speed, seconds)
        if self.ranks.rank == 0:
            write_report(self.out, report)
        return report

    def _progress(self, step: int) -> float:
        """Share of the run that is over, by steps or by time, whichever is further: a slow machine still ends at a
        learning rate of zero. The ranks agree on the slowest one's clock."""
        share = step / self.config.steps
        if self.config.minutes:
            elapsed = torch.tensor(time.monotonic() - self.started, device=self.ranks.device)
            share = max(share, self.ranks.max(elapsed).item() / (60 * self.config.minutes))
        return share

    def _record(self, step: int, result: StepResult) -> None:
        for field, value in result._asdict().items():
            self.history[field].append(value)
        speed = f"{self._tokens_per_second(step):.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {result.loss:.3f}, {speed}", refresh=False)
        self.bar.update()
        if step % self.config.log_every == 0:
            self._say(
                f"step {step}: loss {mean_of_last(self.history['loss']):.3f} nats per byte (mean of the last steps), "
                f"{speed}, expert load max/mean {result.load_max_over_mean:.2f}, balance loss {result.balance:.3f}, "
                f"gradient norm {result.gradient_norm:.2f}"
            )

    def _evaluate(self, step: int) -> None:
        loss = self.trainer.evaluate()
        self.history["held_out"].append((step, loss))
        self._say(f"step {step}: held-out loss {loss:.3f} nats per byte")

    def _save(self, step: int) -> None:
        run = {"config": self.config.as_dict(), "corpus": self.trainer.corpus.sha256, "history": self.history}
        self._say(f"step {step}: saved {self.trainer.save(self.checkpoints, step, run)}")

    def _resume(self) -> None:
        path = checkpoint.newest(self.checkpoints)
        run = checkpoint.read_run(path)
        saved = {**run["config"], "corpus": run["corpus"]}
        for name, value in {**self.config.as_dict(), "corpus": self.trainer.corpus.sha256}.items():
            if name not in RESUMABLE and saved[name] != value:
                raise ValueError(f"resume: {name} is {value}, but {path} was made with {saved[name]}")
        step = len(run["history"]["loss"])
        if step >= self.config.steps:
            raise ValueError(
                f"resume: {path} is at step {step}, so steps must be larger, not {self.config.steps}"
            )
        self.trainer.load(path)
        self.history = run["history"]

    def _introduce(self) -> None:
        config, ranks, corpus, buffer = self.config, self.ranks, self.trainer.corpus, self.trainer.buffer
        count = config.num_experts * 3 * config.hidden * config.intermediate * config.num_layers
        self._say(f"corpus: {corpus.num_files} files under {corpus.folder}, sha256 {corpus.sha256}")
        self._say(f"corpus: {len(corpus.train)} bytes to train on, {len(corpus.validation)} held out")
        self._say(
            f"model: {config.num_layers} layers, hidden {config.hidden}, {config.num_experts} experts of width "
            f"{config.intermediate}, top-{config.top_k}; {count / 1e6:.1f} M expert weights"
        )
        self._say(f"ranks: {ranks.world_size} on {ranks.device.type}, experts spread over {ranks.ep_size}")
        self._say(f"backend: {buffer.backend} ({buffer.reason})")
        if self.first_step:
            self._say(f"resumed after step {self.first_step}")

    def _report(self, step: int, tokens_per_second: float, seconds: float) -> dict[str, Any]:
        corpus, buffer = self.trainer.corpus, self.trainer.buffer
        return {
            "mega_moe": mega_moe.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _device_name(self.ranks),
            "ranks": self.ranks.world_size,
            "ep_size": self.ranks.ep_size,
            "backend": buffer.backend,
            "reason": buffer.reason,
            "precision": buffer.precision,
            "config": self.config.as_dict(),
            "corpus": {
                "sha256": corpus.sha256,
                "files": corpus.num_files,
                "train_bytes": len(corpus.train),
                "held_out_bytes": len(corpus.validation),
            },
            "first_step": self.first_step,
            "steps": step,
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "train_loss": mean_of_last(self.history["loss"]),
            "held_out_loss": self.history["held_out"][-1][1],
            "weights_moved": self.trainer.weights_moved(),
            "out": str(self.out),
            "history": self.history,
        }

    def _tokens_per_second(self, step: int) -> float:
        return (step - self.first_step) * self.config.tokens_per_step / (time.monotonic() - self.started)

    def _say(self, line: str) -> None:
        if self.ranks.rank == 0:
            self.bar.write(line, file=sys.stderr)


def _device_name(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    return platform.processor() or platform.machine()
