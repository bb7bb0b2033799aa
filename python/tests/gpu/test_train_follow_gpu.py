"""The demo trained with the fused backend alongside the reference, for so few steps that roundings decide little.

`python -m mega_moe.demo.follow` compares whole runs with the noise of the reference; here the losses just must be near.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mega_moe.demo.config import Config

pytest.importorskip("tqdm", reason="the demo needs the extra 'demo'")
pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
from mega_moe.demo import follow

STEPS = 80
NEAR = 0.1  # nats per byte, of the mean of the last 50 steps


def test_fused_learns_as_the_reference_does(cuda_device: torch.device, tmp_path: Path) -> None:
    verdict = follow.follow(Config(steps=STEPS, minutes=0.0), tmp_path, "fused", "cuda")
    (fused, *references) = json.loads((tmp_path / "follow.json").read_text())["runs"]
    assert fused["backend"] == "fused"
    assert fused["losses"][-1] < 0.75 * fused["losses"][0]
    for run in references:
        assert abs(verdict.other - run["end"]) < NEAR, verdict
    # The first steps are small, and roundings have not grown yet.
    for step, (got, want) in enumerate(zip(fused["losses"][:10], references[0]["losses"])):
        assert abs(got - want) < 1e-2, step
