"""The tracing form of the forward on a GPU: its events are those of the schedule that the layer must have had."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

# As in the tool: streams of ranks that share a GPU need hardware queues of their own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from mega_moe.bench import main
from mega_moe.bench.kernel_ranks import Options
from mega_moe.bench.shapes import Shape
from mega_moe.bench.trace import record, why_no_trace
from mega_moe.bench.trace_events import KINDS, ROLES, State, Trace

from ._precision import FP8, PRECISIONS, hidden_of
from ._schedule import Wanted, order_faults, tile_faults, wanted_of

_BF16 = {
    # Odd numbers of column blocks, so that the last cluster of an expert has a CTA without a tile.
    "odd columns": Options(Shape("odd columns", 768, 384, 16, 4, 0), 1000, 1),
    "few rows": Options(Shape("few rows", 256, 128, 8, 2, 0), 3, 1),
    # One rank has more rows than both pools hold together.
    "many chunks": Options(Shape("many chunks", 256, 128, 16, 2, 0), 32768, 2, hot=8.0),
    "two ranks": Options(Shape("two ranks", 512, 256, 16, 4, 0), 700, 2),
    "eight ranks": Options(Shape("eight ranks", 256, 256, 64, 8, 0), 512, 8),
}
# The same tiles in e4m3, of the next H that its kernels take.
_FP8 = {
    f"fp8, {name}": replace(
        options,
        shape=replace(options.shape, hidden=hidden_of("fp8", options.shape.hidden)),
        precision="fp8",
    )
    for name, options in _BF16.items()
}
CASES = [*_BF16, *(pytest.param(name, marks=FP8.marks) for name in _FP8)]
OPTIONS = _BF16 | _FP8
# Known to the tool, and of an H that the precision's kernels take.
SMALL = {"bf16": "tiny", "fp8": "30B"}


class Recorded(NamedTuple):
    """The trace of one call and what it must show."""

    trace: Trace
    wanted: Wanted
    num_sms: int
    traced_us: float


@functools.cache
def recorded(options: Options, device: torch.device) -> Recorded:
    """Recorded once, by the first test that asks for it."""
    assert why_no_trace(options, device) == []
    got = record(options, device)
    return Recorded(got.trace, wanted_of(options, got.ranks), got.ranks.num_sms, got.traced_us)


def events(trace: Trace, state: State, part: str) -> int:
    kinds = [kind for kind in KINDS.values() if kind.state is state and kind.part == part]
    return int(trace.where(kinds).sum())


@pytest.mark.parametrize("case", CASES)
def test_every_tile_has_products_once(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    assert got.trace.full_lanes == ()
    assert got.trace.malformed == 0
    assert got.wanted.total() > 0
    assert tile_faults(got.trace, got.wanted.tiles) == []
    chunks = {tile[2] for tile in got.wanted.tiles}
    assert (len(chunks) > 1) == case.endswith("many chunks")


@pytest.mark.parametrize("case", CASES)
def test_down_tiles_begin_after_the_epilogues_of_their_rows(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    assert events(got.trace, State.EPILOGUE, "gate/up") == events(got.trace, State.GEMM, "gate/up")
    assert events(got.trace, State.GEMM, "down") > 0
    assert order_faults(got.trace) == []


@pytest.mark.parametrize("case", CASES)
def test_events_of_a_lane_follow_one_another(case: str, cuda_device: torch.device) -> None:
    trace = recorded(OPTIONS[case], cuda_device).trace
    for cta in range(len(trace.ctas)):
        for role in range(len(ROLES)):
            lane = (trace.cta == cta) & (trace.role == role)
            start, end = trace.start[lane], trace.end[lane]
            assert bool((start[1:] >= end[:-1]).all()), f"CTA {trace.ctas[cta]} {ROLES[role]}"


@pytest.mark.parametrize("case", CASES)
def test_every_cta_routes_once_and_rows_move(case: str, cuda_device: torch.device) -> None:
    got = recorded(OPTIONS[case], cuda_device)
    options, trace = OPTIONS[case], got.trace
    assert len(trace.ctas) == got.num_sms * options.num_ranks
    routing = trace.where([kind for kind in KINDS.values() if kind.part == "routing"])
    assert sorted(trace.cta[routing].tolist()) == list(range(len(trace.ctas)))
    # A row of up to 4096 bytes is pulled in one piece, a token once to each rank that has one of its experts.
    assert options.shape.hidden * 2 <= 4096
    # All warps copy the first tokens, eight each at most, before there are roles to record.
    unseen = 8 * 12 * len(trace.ctas)
    assert events(trace, State.COPY, "pull") >= options.tokens * options.num_ranks - unseen
    if options.tokens * options.num_ranks > unseen:
        assert events(trace, State.COPY, "pull") > 0
    assert events(trace, State.COPY, "push") > 0
    if options.num_ranks > 1:
        assert events(trace, State.COPY, "owner sum") > 0
    gemms = trace.where([kind for kind in KINDS.values() if kind.state is State.GEMM])
    assert 0 < int(trace.start[gemms].min()) < trace.span
    # The kernel lies between the events that timed it; the two clocks differ by less than that.
    assert 0 < trace.span * 1e-3 <= got.traced_us * 1.1 + 5


@PRECISIONS
def test_tool_from_end_to_end(
    cuda_device: torch.device, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    words = ["--device", "cuda", "--shape", SMALL[precision], "--tokens", "512", "--precision", precision]
    assert main([*words, "--trace", str(out)]) == 0
    said = capsys.readouterr().out
    assert "ranks 1, CTAs" in said
    assert f"written: {out}.json" in said
    assert Path(f"{out}.json").stat().st_size > 0
