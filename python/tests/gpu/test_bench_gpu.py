"""`mega-moe bench` on a GPU: events, clocks read in the kernel, ceilings and layer in one short run."""

from __future__ import annotations

import json
import os
from pathlib import Path

# As in the tools: streams of ranks that share a GPU need hardware queues of their own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from mega_moe import MoEBuffer
from mega_moe._ops import library
from mega_moe.bench import kernels, main, schema
from mega_moe.bench.protocols import PROTOCOLS, make_timer
from mega_moe.bench.schema import CeilingRow, LayerRow

# No CUDA device that the library is built for runs below or above these.
MHZ = (300.0, 3000.0)


def test_clock_of_a_busy_region(cuda_device: torch.device) -> None:
    timer = make_timer(cuda_device, library.status().reason)
    assert timer.mhz_reason is None
    a = torch.randn(4096, 4096, device=cuda_device, dtype=torch.bfloat16)
    seconds, mhz = timer.window([lambda: a @ a], 50)
    assert seconds > 0
    assert mhz is not None
    assert MHZ[0] < mhz < MHZ[1]


def test_event_time_agrees_with_the_spin_that_was_asked_for(cuda_device: torch.device) -> None:
    cycles = 20_000_000
    timer = make_timer(cuda_device, library.status().reason)
    timer.window([lambda: torch.cuda._sleep(cycles)], 1)
    seconds, mhz = timer.window([lambda: torch.cuda._sleep(cycles)], 3)
    assert mhz is not None
    # Three spins of a known number of cycles at the measured clock; launches add microseconds.
    assert seconds * mhz * 1e6 == pytest.approx(3 * cycles, rel=0.1)


def test_short_run(cuda_device: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--device", "cuda", "--quick", "--shape", "tiny", "--tokens", "4096", "--json", str(path)]
    assert main(words) == 0
    result = schema.read(path)
    for row in result.rows:
        timing = row.outcome.timing
        if timing is not None:
            assert timing.timer == "CUDA events"
            assert timing.mhz is not None
            assert MHZ[0] < timing.mhz < MHZ[1]
            assert timing.protocol in PROTOCOLS
    ceilings = {(row.name, row.outcome.status) for row in result.rows if isinstance(row, CeilingRow)}
    assert {
        ("product bfloat16", "measured"),
        ("device copy", "measured"),
        ("peer pull", "refused"),
    } <= ceilings
    layer = {row.backend: row for row in result.rows if isinstance(row, LayerRow) and row.outcome.timing}
    assert {"fused", "grouped", "reference"} <= set(layer)
    fused = [row for row in result.rows if isinstance(row, LayerRow) and row.backend == "fused"]
    assert {(row.precision, row.direction, row.reserved_sms) for row in fused if row.outcome.timing} == {
        ("bf16", "forward", 0),
        ("bf16", "forward", 16),
        ("bf16", "backward", 0),
        ("bf16", "backward", 16),
        ("bf16", "forward_backward", 0),
        ("bf16", "forward_backward", 16),
    }
    assert all(row.peak_bytes is not None and row.peak_bytes > 0 for row in layer.values())
    assert result.environment.kernels_sha256 is not None
    assert result.environment.code is not None
    assert result.environment.num_sms is not None


def test_kernels_alone(cuda_device: torch.device, tmp_path: Path) -> None:
    """Both directions with two ranks that share the GPU, a backward in fp32, and one without dW."""
    path = tmp_path / "kernels.json"
    words = ["--shape", "tiny", "--tokens", "512", "--ranks", "2", "--quick", "--json", str(path)]
    assert kernels.main([*words, "--dw", "fp32", "--parts", "all,dx"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["direction"], row["parts"], row["dw"]) for row in rows[::2]] == [
        ("forward", None, None),
        ("backward", "all", "fp32"),
        ("backward", "dx", None),
    ]
    assert [row["timing"]["protocol"] for row in rows] == ["burst", "sustained"] * 3
    sizes = {"num_experts": 8, "max_tokens_per_rank": 256, "top_k": 2, "hidden": 256, "intermediate": 128}
    for row in rows:
        assert row["timing"]["seconds"] > 0
        training = row["direction"] == "backward"
        assert row["nbytes"] == MoEBuffer.nbytes(**sizes, num_ranks=2, training=training, backend="fused")
