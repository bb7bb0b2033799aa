"""Every program under examples/ runs as its first lines say, on a CPU or, where there is one, on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ._trainers import need

EXAMPLES = Path(__file__).parents[3] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

for _name in ("transformers", "accelerate", "peft", "torchtitan"):
    need(_name)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str, pattern: str = r"loss ([0-9.]+)") -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_hf_trainer(tmp_path: Path) -> None:
    text = run(tmp_path, str(EXAMPLES / "hf_trainer.py"), "--steps", "10")
    first, *_, last = losses(text, r"'loss': '?([0-9.]+)")
    assert last < first - 0.3


def test_lora(tmp_path: Path) -> None:
    text = run(tmp_path, str(EXAMPLES / "lora.py"), "--steps", "5")
    trained, merged = losses(text, r"(?:trained|merged) ([0-9.]+)")
    assert trained < losses(text)[0] - 0.1
    assert merged == pytest.approx(trained, abs=2e-2)


def test_routing_replay(tmp_path: Path) -> None:
    text = run(tmp_path, str(EXAMPLES / "rl_routing_replay.py"))
    rewards = losses(text, r"reward ([0-9.]+)")
    assert len(rewards) == 3
    assert rewards[-1] > rewards[0]


def test_fsdp2_and_expert_parallelism(tmp_path: Path) -> None:
    import torch

    ranks = max(1, min(2, torch.cuda.device_count())) if torch.cuda.is_available() else 2
    text = run(tmp_path, *TORCHRUN, str(ranks), str(EXAMPLES / "fsdp2_expert_parallel.py"))
    assert len(losses(text)) == 3
    assert all(5 < loss < 8 for loss in losses(text))  # random tokens: log(512) is 6.2


def test_torchtitan_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its trainer reads it, command line included; test_integrations_torchtitan_trainer runs such a model."""
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import apply_overrides

    from mega_moe.integrations.torchtitan_trainer import MegaMoERoutedExperts

    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, layers in (("qwen3_debug", 8), ("qwen3_30b_a3b", 48)):
        words = ["--module", "torchtitan_qwen3", "--config", name, "--training.steps", "3"]
        config = ConfigManager().parse_args(words)
        assert config.training.steps == 3
        assert len(apply_overrides(config.override, config)) == layers
        served = config.model_spec.model.layers[0].moe.routed_experts
        assert isinstance(served, MegaMoERoutedExperts.Config)
        assert served.settings["max_tokens_per_rank"] == 4 * 4096
