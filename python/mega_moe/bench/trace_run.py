"""The fused forward under the tracing kernel: one rank, or several that share the GPU, each with a part of its SMs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_moe._backends import facts
from mega_moe._backends.decide import decide
from mega_moe._backends.kernel_forward import KernelForward
from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.kernel_router import KernelRouter
from mega_moe._backends.pools import pool_rows
from mega_moe._backends.request import Request
from mega_moe._backends.symmetric import Shape as BufferShape
from mega_moe._backends.symmetric import of_virtual_ranks, symmetric_layout
from mega_moe._backends.tables import plain_tables
from mega_moe.bench.problem import random_problem
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import Shape
from mega_moe.bench.trace_check import Tile, tiles_of
from mega_moe.bench.trace_events import Trace, read
from mega_moe.bench.trace_kinds import ROLES, WORDS

FIRST_ROWS = 512  # of a lane; twice as many whenever one was full
MOST_ROWS = 1 << 16
TILE_COLUMNS = {"gate/up": 128, "down": 256}
"""Columns of one tile, by part; of gate and of up as many each."""

_LIMIT = 20.0  # seconds that a launch waits for the others
_SPIN = 2_000_000  # cycles: longer than the host takes to queue the launches of all ranks


@dataclass(frozen=True)
class Options:
    """One layer: `tokens` of each of `num_ranks` ranks, which this process plays on one GPU."""

    shape: Shape
    tokens: int
    num_ranks: int

    def request(self) -> Request:
        return Request(
            **self.shape.sizes(), max_tokens_per_rank=self.tokens, num_ranks=self.num_ranks, dtype="bfloat16"
        )


@dataclass(frozen=True)
class Recorded:
    """The trace of one call, the tiles that it must show, and us from before to after all launches of a call."""

    trace: Trace
    tiles: set[Tile]
    plain_us: float  # of the kernel that users run
    traced_us: float
    num_sms: int  # of each rank


def why_not(options: Options, device: torch.device) -> list[str]:
    """Every reason against a trace on this device; empty where one can be recorded."""
    options.request()  # raises for numbers that no device could serve
    known = facts.collect(device)
    # Judged as one rank: the others are this process as well.
    alone = Request(**options.shape.sizes(), max_tokens_per_rank=options.tokens, dtype="bfloat16")
    (fused,) = (verdict for verdict in decide(alone, [known], "fused") if verdict.backend == "fused")
    reasons = list(fused.reasons)
    if device.type == "cuda" and known.library_loaded:
        serving = "{}{}".format(*(known.compute_capability or (0, 0)))
        tracing = (v for v in known.variants if v.op == "forward_trace")
        if not any(variant.architecture.rstrip("af") == serving for variant in tracing):
            reasons.append(f"this wheel holds no tracing variant of the forward kernel for sm_{serving}")
    return reasons


def prepare_process() -> None:
    """Before the first CUDA context of this process."""
    # Streams that share a hardware queue would hold back a launch that another waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def record(options: Options, device: torch.device) -> Recorded:
    """Launches the layer plain and traced, each once warm and once measured, and reads the events.

    Raises RuntimeError when the traced kernel's result differs from the plain one's.
    """
    ranks = _Ranks(options, device)
    want = ranks.launch(None)
    plain_us = ranks.timed(None)
    rows = FIRST_ROWS
    while True:
        arrays = [
            torch.zeros(ranks.num_sms, len(ROLES), rows, WORDS, dtype=torch.int64, device=device)
            for _ in range(options.num_ranks)
        ]
        got = ranks.launch(arrays)
        trace = read(arrays)
        if not trace.full_lanes or rows >= MOST_ROWS:
            break
        rows *= 2
    for rank, (plain, traced) in enumerate(zip(want, got, strict=True)):
        # As bits, in which NaN is equal to itself.
        if not torch.equal(plain.view(torch.int16), traced.view(torch.int16)):
            raise RuntimeError(f"rank {rank}: the traced kernel's y differs from the plain one's")
    for array in arrays:
        array.zero_()
    traced_us = ranks.timed(arrays)
    return Recorded(read(arrays), ranks.tiles(), plain_us, traced_us, ranks.num_sms)


@dataclass(frozen=True)
class _Inputs:
    """What one rank gives to its launch."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor

    @classmethod
    def of(cls, options: Options, device: torch.device, rank: int) -> _Inputs:
        context = Context(device, None, rank, options.num_ranks)
        problem = random_problem(options.shape, options.tokens, torch.bfloat16, context)
        first = problem.sets[0]
        given = (first.x, first.topk_idx, first.topk_weights, problem.w_gate_up, problem.w_down)
        return cls(*(tensor.detach() for tensor in given))


class _Ranks:
    """Kernels, streams and inputs of ranks that share a GPU."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options, self._device = options, device
        count, shape = options.num_ranks, options.shape
        request = options.request()
        layout = BufferShape(
            options.tokens,
            shape.top_k,
            shape.num_experts,
            shape.hidden,
            intermediate=shape.intermediate,
            num_ranks=count,
            pool_rows=pool_rows(request),
            home=True,
        )
        everything = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_sms = everything // count // 2 * 2  # clusters are pairs; the trace has a place for every CTA
        parts = of_virtual_ranks(symmetric_layout(layout).total, device, count)
        self._kernels = [
            KernelRank(
                layout,
                rank,
                parts[rank],
                num_sms=self.num_sms,
                arrival_timeout=_LIMIT,
                progress_timeout=_LIMIT,
                lane=rank,
            )
            for rank in range(count)
        ]
        self._forwards = [KernelForward(kernels) for kernels in self._kernels]
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._inputs = [_Inputs.of(options, device, rank) for rank in range(count)]
        self._reserve()

    def launch(self, arrays: Sequence[Tensor] | None) -> list[Tensor]:
        """y of every rank, from launches with the tracing kernel where ``arrays`` are given. Waits for the device."""
        torch.cuda.synchronize(self._device)
        results = self._queue(arrays)
        self._check()
        return results

    def timed(self, arrays: Sequence[Tensor] | None) -> float:
        """us from before to after one launch of every rank."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        outer = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        # Keeps the device busy until all launches are queued, so that the host's time is not measured.
        torch.cuda._sleep(_SPIN)
        begin.record(outer)
        for stream in self._streams:
            stream.wait_stream(outer)
        self._queue(arrays)
        for stream in self._streams:
            outer.wait_stream(stream)
        end.record(outer)
        self._check()
        return 1e3 * float(begin.elapsed_time(end))

    def tiles(self) -> set[Tile]:
        shape = self._options.shape
        ids = [inputs.topk_idx for inputs in self._inputs]
        tables = [
            plain_tables(ids, rank, shape.num_experts, KernelRouter(kernels).limit())
            for rank, kernels in enumerate(self._kernels)
        ]
        columns = {
            "gate/up": shape.intermediate // TILE_COLUMNS["gate/up"],
            "down": shape.hidden // TILE_COLUMNS["down"],
        }
        return tiles_of([t.expert_rows for t in tables], [t.expert_slots for t in tables], columns)

    def _queue(self, arrays: Sequence[Tensor] | None) -> list[Tensor]:
        results = []
        for rank, (forward, given, stream) in enumerate(zip(self._forwards, self._inputs, self._streams)):
            with torch.cuda.stream(stream):
                y, _ = forward.forward(
                    given.x,
                    given.topk_idx,
                    given.topk_weights,
                    given.w_gate_up,
                    given.w_down,
                    trace=None if arrays is None else arrays[rank],
                )
            results.append(y)
        return results

    def _check(self) -> None:
        torch.cuda.synchronize(self._device)
        for kernels in self._kernels:
            kernels.check()

    def _reserve(self) -> None:
        # An allocation between launches that wait for one another could wait for them.
        for given, stream in zip(self._inputs, self._streams):
            with torch.cuda.stream(stream):
                kept = [torch.empty_like(given.x) for _ in range(3)]
                torch.empty(1, device=self._device)
                del kept
        torch.cuda.synchronize(self._device)
