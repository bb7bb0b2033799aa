"""The tracing form of the backward on a GPU: its events are those of the schedule that the layer must have had.

`record` itself refuses a traced launch whose gradients have other bits than the plain one's.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

# As in the tool: streams of ranks that share a GPU need hardware queues of their own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from mega_moe.bench import main
from mega_moe.bench.kernel_ranks import Options
from mega_moe.bench.shapes import Shape
from mega_moe.bench.trace_events import KINDS, ROLES, State

from ._precision import FP8, PRECISIONS
from ._schedule import order_faults, tile_faults
from .test_trace_gpu import OPTIONS as OF_FORWARD
from .test_trace_gpu import SMALL, events, recorded

OPTIONS = {
    **{name: replace(options, direction="backward") for name, options in OF_FORWARD.items()},
    # More rows of an expert than one part of its gradients.
    "parts": Options(Shape("parts", 256, 128, 1, 1, 0), 20000, 1, "backward"),
    "fp8, parts": Options(Shape("parts", 512, 128, 1, 1, 0), 20000, 1, "backward", precision="fp8"),
}
CASES = [pytest.param(name, marks=FP8.marks) if name.startswith("fp8") else name for name in OPTIONS]


@pytest.mark.parametrize("case", CASES)
def test_every_product_is_made_once(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    assert got.trace.full_lanes == ()
    assert got.trace.malformed == 0
    assert tile_faults(got.trace, got.wanted.tiles) == []
    assert {KINDS[tile[1]].part for tile in got.wanted.tiles} == {"dz", "dx", "wgrad"}
    # Two warpgroups, both weights, one column of tiles of each where the extents are 256 and 128.
    gradients = [count for tile, count in got.wanted.tiles.items() if KINDS[tile[1]].part == "wgrad"]
    assert (max(gradients) > 4) == case.endswith(("parts", "many chunks"))


@pytest.mark.parametrize("case", CASES)
def test_loads_begin_after_the_epilogues_of_their_rows(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    for part in ("dz", "dx", "wgrad"):
        assert events(got.trace, State.EPILOGUE, part) == events(got.trace, State.GEMM, part) > 0
    assert bool(got.wanted.whole) == (not case.endswith("parts"))
    assert order_faults(got.trace, got.wanted.whole) == []


@pytest.mark.parametrize("case", CASES)
def test_events_of_a_lane_follow_one_another(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    trace = got.trace
    for cta in range(len(trace.ctas)):
        for role in range(len(ROLES)):
            lane = (trace.cta == cta) & (trace.role == role)
            start, end = trace.start[lane], trace.end[lane]
            assert bool((start[1:] >= end[:-1]).all()), f"CTA {trace.ctas[cta]} {ROLES[role]}"
    assert len(trace.ctas) == got.num_sms * OPTIONS[case].num_ranks
    # The kernel lies between the events that timed it; the two clocks differ by less than that.
    assert 0 < trace.span * 1e-3 <= got.traced_us * 1.1 + 5


@PRECISIONS
def test_tool_from_end_to_end(
    cuda_device: torch.device, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    words = ["--device", "cuda", "--shape", SMALL[precision], "--tokens", "512", "--precision", precision]
    assert main([*words, "--direction", "backward", "--trace", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{SMALL[precision]} {precision} backward, T=512" in said
    assert Path(f"{out}.json").stat().st_size > 0
