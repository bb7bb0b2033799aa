"""A converted model under FSDP2 over processes with a GPU each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.multi_gpu
def test_experts_spread_over_all_gpus(cuda_devices: list[torch.device]) -> None:
    count = next(size for size in (8, 4, 2) if size <= len(cuda_devices))
    script = Path(__file__).with_name("sharded_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == count
