"""What the tests of the demonstration job share: its smallest useful size, and a run of it under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from mega_moe.demo.config import Config

SMALL: dict[str, Any] = {
    "hidden": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "top_k": 2,
    "intermediate": 32,
    "max_corpus_bytes": 1 << 20,
    "sequence_length": 64,
    "global_batch": 8,
    "eval_sequences": 8,
    "steps": 12,
    "minutes": 0,
    "warmup_steps": 4,
    "log_every": 4,
    "eval_every": 6,
    "checkpoint_every": 6,
}


def small(**changes: Any) -> Config:
    return Config(**{**SMALL, **changes})


def words(out: Path, *more: str) -> list[str]:
    """The command line of a small run on the CPU, after `mega-moe`."""
    fields = {name: value for name, value in SMALL.items() if name not in ("steps", "minutes")}
    sets = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    length = ["--steps", str(SMALL["steps"]), "--minutes", "0"]
    return ["train", "--device", "cpu", "--backend", "grouped", "--out", str(out), *length, *sets, *more]


def torchrun(num_ranks: int, out: Path, *more: str, seconds: float = 150) -> dict[str, Any]:
    """Train under torchrun and return the report. The whole process group dies after `seconds`."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    command += ["-m", "mega_moe.cli", *words(out, *more)]
    # Two cores: the ranks' own threads would fight.
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{num_ranks} ranks ran past {seconds} s:\n{output}") from None
    assert process.returncode == 0, output
    return read_report(out)


def read_report(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report
