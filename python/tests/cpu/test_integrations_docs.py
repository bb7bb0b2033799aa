"""docs/training.md: its examples run as they stand, and its command line too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mega_moe

from ._trainers import need

need("transformers")

GUIDE = (Path(__file__).resolve().parents[3] / "docs/training.md").read_text(encoding="utf-8")
FIRST, SWITCH = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def run(folder: Path, *command: str) -> str:
    # torchrun may be anywhere; the module is where torch is.
    words = [sys.executable, *command]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(mega_moe.__file__).parents[1]),
    }
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ten_lines(tmp_path: Path) -> None:
    assert (
        len([line for line in FIRST.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    )
    out = run(tmp_path, "-c", FIRST)
    assert "('model.layers.0.mlp.experts', 'model.layers.1.mlp.experts') grouped, since fused: refused" in out


def test_transformers_switch(tmp_path: Path) -> None:
    assert "torch.Size([1, 12])" in run(tmp_path, "-c", SWITCH)


@pytest.mark.parametrize(
    "command", re.findall(r"^mega-moe (bench step --device cpu.*)$", GUIDE, re.MULTILINE)
)
def test_the_benchmark_without_a_gpu(command: str, tmp_path: Path) -> None:
    assert "grouped" in run(tmp_path, "-m", "mega_moe.cli", *command.split())


def test_the_guide_has_such_a_command() -> None:
    assert GUIDE.count("\nmega-moe bench step --device cpu") == 1
