"""`mega-moe bench step` on one GPU: every backend that is here, what only a GPU has, and the fused kernel's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_moe.bench import main, schema

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("cuda_device")
def test_one_gpu(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    words = [
        "step",
        "--model",
        "tiny",
        "--sequence",
        "1024",
        "--steps",
        "4",
        "--skip",
        "2",
        "--json",
        str(out),
    ]
    assert main(words) == 0
    rows = {row.backend: row for row in schema.read(out, schema.StepResult).rows}
    for name in ("fused", "grouped"):
        row = rows[name]
        assert row.status == "measured", row.reasons
        assert row.moe_forwards == row.layers == 2
        assert row.peak_bytes is not None
        assert row.moe_seconds is not None
        assert row.seconds is not None
        assert 0 < row.moe_seconds < row.seconds
        assert str(row.reason).startswith(name)
    # bf16 roundings of two backends apart, from the same weights and tokens.
    assert rows["fused"].losses == pytest.approx(rows["grouped"].losses, rel=2e-2)
    if "H200" in torch.cuda.get_device_name():
        assert rows["fused"].mfu is not None
        assert 0 < rows["fused"].mfu < 1
