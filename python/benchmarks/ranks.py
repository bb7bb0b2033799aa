"""Everything that the GPUs of one host can tell: a list of commands, run in order within a time budget.

    python3 python/benchmarks/ranks.py --out FOLDER [--gpus N] [--peers FOLDER] [--budget SECONDS]
    python3 python/benchmarks/ranks.py --dry-run --gpus N          prints the list; needs no GPU
    python3 python/benchmarks/ranks.py --device cpu --out FOLDER   a rehearsal with the tiny shape over gloo

Tests and measures the installed package. FOLDER gets <device>-xN-<date>.json and steps/<device>-xN-<date>.json for
report.py, ranks.json (what became of each command), a log of each, and demo/. Exits 1 when a command failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ranks_peers
from report import ROOT, file_name, schema

BUDGET_S = 560.0
SHAPES = ("tiny", "30B", "235B")
TOKENS = (16384, 8192)
_GRACE_S = 5.0  # torchrun ends its ranks in this time


@dataclass(frozen=True)
class Command:
    """One program and the most seconds that it may take."""

    name: str
    limit_s: float
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def commands(gpus: int, device: str, out: Path, peers: Path | None) -> Iterator[Command]:
    """All commands, the most important first."""

    def torchrun(*words: str) -> tuple[str, ...]:
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}")
        return (sys.executable, *launch, *words)

    on_cpu = device == "cpu"
    if on_cpu:
        # The kernels need a GPU; what is written against the public API alone does not.
        yield Command("tests", 90, torchrun("python/tests/gpu/late_ranks.py", "cpu"))
    else:
        suite = ("-m", "pytest", "-m", "multi_gpu", "-q", "-p", "no:cacheprovider", "python/tests/gpu")
        env = {"MEGA_MOE_REQUIRE_INSTALLED": "1", "MEGA_MOE_REQUIRE_GPU": "1"}
        yield Command("tests", 240, (sys.executable, *suite), env)
    for shape in SHAPES[:1] if on_cpu else SHAPES[1:]:
        measure = ("python/benchmarks/run.py", "--quick", "--shape", shape, "--results", str(out / shape))
        yield Command(f"layers-{shape}", 240, torchrun(*measure))
    for tokens in () if peers is None or on_cpu else TOKENS:
        env = {"TOK": str(tokens)}
        for script in ranks_peers.SCRIPTS:
            if (peers / script).is_file():
                yield Command(f"peer-{script}-{tokens}", 120, torchrun(str(peers / script)), env)
    # As many layers as two GPUs hold for each pair of them.
    model = ("tiny",) if on_cpu else ("30B", "--layers", str(4 * gpus))
    for backend in ("fused", "grouped"):
        step = ("bench", "step", "--device", device, "--backend", backend, "--steps", "8", "--skip", "3")
        file = ("--json", str(out / f"step-{backend}.json"))
        yield Command(f"step-{backend}", 120, torchrun("-m", "mega_moe.cli", *step, *file, "--model", *model))
    train = ("train", "--steps", "6" if on_cpu else "40", "--minutes", "0", "--out", str(out / "demo"))
    words = (*train, "--device", "cpu") if on_cpu else train
    yield Command("demo", 120, torchrun("-m", "mega_moe.cli", *words))


def run(command: Command, log: Path, limit_s: float) -> str:
    """passed, failed or timed out. Whatever the program started is ended with it."""
    with log.open("wb") as sink:
        program = subprocess.Popen(
            command.words,
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **command.env},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            return "failed" if program.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            # torchrun's ranks have sessions of their own: it ends them, where it is given the time.
            for way, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, way)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(wait_s)


def collect(out: Path, gpus: int, arguments: Sequence[str]) -> None:
    """One result of all shapes and peers, and one of all steps, from what the commands left so far."""
    results = [schema.read(path) for shape in SHAPES for path in sorted((out / shape).glob("*.json"))]
    peers = [row for tokens in TOKENS for row in ranks_peers.read(out, tokens, gpus)]
    if results:
        rows = list(results[0].rows)
        # The ceilings of the first shape stand for all.
        rows += [row for result in results[1:] for row in result.rows if row.kind != "ceiling"]
        merged = dataclasses.replace(results[0], arguments=tuple(arguments), rows=(*rows, *peers))
        (out / file_name(merged.environment)).write_text(schema.dumps(merged), encoding="utf-8")
    steps = [schema.read(path, schema.StepResult) for path in sorted(out.glob("step-*.json"))]
    if steps:
        rows = [row for result in steps for row in result.rows]
        merged = dataclasses.replace(steps[0], arguments=tuple(arguments), rows=tuple(rows))
        (out / "steps").mkdir(exist_ok=True)
        (out / "steps" / file_name(merged.environment)).write_text(schema.dumps(merged), encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Tests, layers, other implementations, steps and demo.")
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="default: all there are")
    add("--peers", type=Path, metavar="FOLDER", help="scripts of other implementations")
    add("--out", type=Path, metavar="FOLDER", default=Path("demo-run/ranks"), help="of the results")
    add("--budget", type=float, metavar="SECONDS", default=BUDGET_S, help="of the whole run (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, tiny shape, two ranks")
    add("--dry-run", action="store_true", help="print the list and leave")
    words = parser.parse_args(argv)
    gpus = words.gpus or (2 if words.device == "cpu" else _count_gpus())
    if gpus < 1:
        print(
            "ranks: gpus: torch sees none; --gpus N with --dry-run, or --device cpu, needs none",
            file=sys.stderr,
        )
        return 2
    out = words.out.absolute()
    listed = list(commands(gpus, words.device, out, words.peers and words.peers.absolute()))
    if words.dry_run:
        for command in listed:
            env = [f"{name}={value}" for name, value in command.env.items()]
            print(f"{command.name} ({command.limit_s:.0f} s): {' '.join([*env, *command.words])}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    end, became = time.monotonic() + words.budget, {}
    for command in listed:
        left_s = end - time.monotonic()
        status = "left out"
        if left_s > 0:
            status = run(command, out / f"{command.name}.log", min(command.limit_s, left_s))
        became[command.name] = status
        print(f"ranks: {command.name}: {status}", flush=True)
        (out / "ranks.json").write_text(json.dumps(became, indent=1) + "\n")
        collect(out, gpus, [Path(word).name if os.sep in word else word for word in argv])
    return 0 if set(became.values()) <= {"passed", "left out"} else 1


def _count_gpus() -> int:
    """Asked in a program of its own: this one must not hold a device."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
