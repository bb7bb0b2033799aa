"""An installation on a machine with a GPU: workers forked after the import, a bare environment, the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mega_moe

LAYER = """
import warnings
import torch
import mega_moe
def train():
    warnings.simplefilter("ignore", mega_moe.FallbackWarning)
    with mega_moe.MoEBuffer(None, num_experts=8, max_tokens_per_rank=64, top_k=2, hidden=256, intermediate=128,
                            device="cuda") as buffer:
        layer = mega_moe.nn.MegaMoE(256, 128, 8, buffer=buffer, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ids = torch.arange(64, device="cuda").reshape(32, 2) % 8
        layer(x, ids, torch.full((32, 2), 0.5, device="cuda")).float().square().mean().backward()
        torch.cuda.synchronize()
        assert torch.isfinite(x.grad).all()
        print("trained on", buffer.backend, flush=True)
"""
FORKED = """
import os
from mega_moe._ops import library
_, status = mega_moe.moe, library.status()
assert status.loaded, status.reason
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    train()
    os._exit(0)
_, code = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(code))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {**os.environ, "PYTHONPATH": str(Path(mega_moe.__file__).parents[1]), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.gpu
def test_a_worker_forked_after_the_import(cuda_device: torch.device) -> None:
    """Importing and loading make no CUDA context, so a forked worker may make its own."""
    done = python(LAYER + FORKED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained on ")


@pytest.mark.gpu
def test_no_home_and_no_compiler(cuda_device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "home")  # below a file, so that nobody can make it
    done = python(
        LAYER + "train()", HOME=nowhere, XDG_CACHE_HOME=nowhere, PATH=str(tmp_path), CUDA_HOME=nowhere
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained on ")


@pytest.mark.gpu
def test_the_doctor_has_nothing_to_say_of_driver_and_architecture(cuda_device: torch.device) -> None:
    done = python("import sys; from mega_moe.cli import main; sys.exit(main(['doctor']))")
    assert done.returncode == 0, done.stdout + done.stderr
    advice = [line for line in done.stdout.splitlines() if line.startswith("advice: ")]
    assert not [line for line in advice if "driver" in line or "this wheel holds" in line], advice
    assert "library: loaded" in done.stdout
