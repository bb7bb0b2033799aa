"""Ranks of the fused forward that one process plays on one GPU, each with a part of its SMs, for timing and tracing."""

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
from mega_moe._backends.pools import pool_rows
from mega_moe._backends.request import Request
from mega_moe._backends.symmetric import Shape as BufferShape
from mega_moe._backends.symmetric import of_virtual_ranks, symmetric_layout
from mega_moe._backends.weight_copies import WeightCopies, WeightCopy
from mega_moe.bench.problem import random_problem
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import Shape

_LIMIT = 20.0  # seconds that a launch waits for the others
_SPIN = 2_000_000  # cycles: longer than the host takes to queue the launches of all ranks


@dataclass(frozen=True)
class Options:
    """One layer: `tokens` of each of `num_ranks` ranks, which this process plays on one GPU."""

    shape: Shape
    tokens: int
    num_ranks: int
    precision: str = "bf16"

    def request(self, num_ranks: int | None = None) -> Request:
        return Request(
            **self.shape.sizes(),
            max_tokens_per_rank=self.tokens,
            precision=self.precision,
            num_ranks=self.num_ranks if num_ranks is None else num_ranks,
            dtype="bfloat16",
        )


def why_not(options: Options, device: torch.device) -> list[str]:
    """Every reason against the fused forward on this device; empty where it can run."""
    options.request()  # raises for numbers that no device could serve
    # Judged as one rank: the others are this process as well.
    verdicts = decide(options.request(num_ranks=1), [facts.collect(device)], "fused")
    (fused,) = (verdict for verdict in verdicts if verdict.backend == "fused")
    return list(fused.reasons)


def prepare_process() -> None:
    """Before the first CUDA context of this process."""
    # Streams that share a hardware queue would hold back a launch that another waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass(frozen=True)
class _Inputs:
    """What one rank gives to its launch."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor | WeightCopy
    w_down: Tensor | WeightCopy

    @classmethod
    def of(cls, options: Options, device: torch.device, rank: int) -> _Inputs:
        context = Context(device, None, rank, options.num_ranks)
        problem = random_problem(options.shape, options.tokens, torch.bfloat16, context)
        first = problem.sets[0]
        given = (first.x, first.topk_idx, first.topk_weights)
        weights: list[Tensor] | list[WeightCopy] = [problem.w_gate_up.detach(), problem.w_down.detach()]
        if options.request().forward_precision == "fp8":
            copies = WeightCopies(backward=False)
            weights = [
                copies.of(weight.detach(), codes=True, transposed=False)
                for weight in (problem.w_gate_up, problem.w_down)
            ]
        return cls(*(tensor.detach() for tensor in given), *weights)


class ForwardRanks:
    """Kernels, streams and inputs of ranks that share a GPU; `num_reserved_sms` of it are left free."""

    def __init__(self, options: Options, device: torch.device, num_reserved_sms: int = 0) -> None:
        self._device = device
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
            quantise=request.forward_precision == "fp8",
            home=True,
        )
        everything = torch.cuda.get_device_properties(device).multi_processor_count
        # Clusters are pairs; a trace has a place for every CTA.
        self.num_sms = (everything - num_reserved_sms) // count // 2 * 2
        parts = of_virtual_ranks(symmetric_layout(layout).total, device, count)
        self.kernels = [
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
        self._forwards = [KernelForward(kernels) for kernels in self.kernels]
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self.inputs = [_Inputs.of(options, device, rank) for rank in range(count)]
        self._reserve()

    def launch(self, arrays: Sequence[Tensor] | None) -> list[Tensor]:
        """y of every rank, from launches with the tracing kernel where ``arrays`` are given. Waits for the device."""
        torch.cuda.synchronize(self._device)
        results = self._queue(arrays)
        self.check()
        return results

    def timed(self, arrays: Sequence[Tensor] | None) -> float:
        """us from before to after one launch of every rank."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        # Keeps the device busy until all launches are queued, so that the host's time is not measured.
        torch.cuda._sleep(_SPIN)
        begin.record()
        self.call(arrays)
        end.record()
        self.check()
        return 1e3 * float(begin.elapsed_time(end))

    def call(self, arrays: Sequence[Tensor] | None = None) -> None:
        """One launch of every rank, after and before what the current stream holds. Does not wait."""
        outer = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(outer)
        self._queue(arrays)
        for stream in self._streams:
            outer.wait_stream(stream)

    def _queue(self, arrays: Sequence[Tensor] | None) -> list[Tensor]:
        results = []
        for rank, (forward, given, stream) in enumerate(zip(self._forwards, self.inputs, self._streams)):
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

    def check(self) -> None:
        """Wait for the device; raises what a launch reported."""
        torch.cuda.synchronize(self._device)
        for kernels in self.kernels:
            kernels.check()

    def _reserve(self) -> None:
        # An allocation between launches that wait for one another could wait for them.
        for given, stream in zip(self.inputs, self._streams):
            with torch.cuda.stream(stream):
                kept = [torch.empty_like(given.x) for _ in range(3)]
                torch.empty(1, device=self._device)
                del kept
        torch.cuda.synchronize(self._device)
