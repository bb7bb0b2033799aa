"""The fused backend over processes with a GPU each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.multi_gpu
def test_ranks_of_one_host(cuda_devices: list[torch.device]) -> None:
    count = next(size for size in (8, 4, 2) if size <= len(cuda_devices))
    script = Path(__file__).with_name("fused_ranks.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        str(script),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("steps right") == count
