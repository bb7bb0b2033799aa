"""Ranks of a fused kernel that one process plays on one GPU, each with a part of its SMs, for timing and tracing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_moe._backends.choice import facts
from mega_moe._backends.choice.decide import decide
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.layer import KernelLayer
from mega_moe._backends.fused.memory import Shape as BufferShape
from mega_moe._backends.fused.memory import of_virtual_ranks, symmetric_layout
from mega_moe._backends.fused.rows import SavedRows, pool_rows
from mega_moe._backends.fused.weight_copies import WeightCopies, WeightCopy
from mega_moe._base.layer import LayerInputs, Needs
from mega_moe.bench.problem import random_problem
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import Shape

_LIMIT = 20.0  # seconds that a launch waits for the others
_SPIN = 2_000_000  # cycles: longer than the host takes to queue the launches of all ranks
_KEPT = 3  # results of a call that may be alive at once

DIRECTIONS = ("forward", "backward")
PRECISIONS = ("bf16", "fp8", "fp8_bwd")
PARTS = {
    "all": Needs(),
    "dx": Needs(w_gate_up=False, w_down=False),
    "dw": Needs(x=False, topk_weights=False),
}
"""Which gradients a backward is asked for."""


@dataclass(frozen=True)
class Options:
    """One kernel of one layer: `tokens` of each of `num_ranks` ranks, which this process plays on one GPU.

    ``dw_dtype``, ``dw_precision`` and ``parts`` are the backward's. ``saved``: as `MoEBuffer(save_gate_up=)`, the
    forward writes gate and up, and the backward reads them. ``hot``: expert 0 has so many times its even share of the
    rows.
    """

    shape: Shape
    tokens: int
    num_ranks: int
    direction: str = "forward"
    dw_dtype: torch.dtype = torch.bfloat16
    parts: str = "all"
    saved: float = 0.0
    precision: str = "bf16"
    hot: float | None = None
    dw_precision: str = "bf16"

    @property
    def kernel_precision(self) -> str:
        """In which the direction's kernel computes."""
        request = self.request()
        return request.forward_precision if self.direction == "forward" else request.backward_precision

    def request(self, num_ranks: int | None = None) -> Request:
        return Request(
            **self.shape.sizes(),
            max_tokens_per_rank=self.tokens,
            precision=self.precision,
            num_ranks=self.num_ranks if num_ranks is None else num_ranks,
            dtype="bfloat16",
            dw_precision=self.dw_precision,
        )


def why_not(options: Options, device: torch.device) -> list[str]:
    """Every reason against this kernel on this device; empty where it can run."""
    options.request()  # raises for numbers that no device could serve
    # Judged as one rank: the others are this process as well.
    verdicts = decide(options.request(num_ranks=1), [facts.collect(device)], "fused")
    (fused,) = (verdict for verdict in verdicts if verdict.backend == "fused")
    # A note says that something else serves the backward.
    stand_in = [] if options.direction == "forward" or fused.note is None else [fused.note]
    return [*fused.reasons, *stand_in]


def prepare_process() -> None:
    """Before the first CUDA context of this process."""
    # Streams that share a hardware queue would hold back a launch that another waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass(frozen=True)
class _Inputs:
    """What one rank gives to its launch."""

    layer: LayerInputs
    dy: Tensor
    copies: tuple[WeightCopy, WeightCopy] | None  # where the direction's kernel reads e4m3 weights

    @classmethod
    def of(cls, options: Options, device: torch.device, rank: int) -> _Inputs:
        context = Context(device, None, rank, options.num_ranks)
        problem = random_problem(options.shape, options.tokens, torch.bfloat16, context, hot=options.hot)
        first = problem.sets[0]
        copies = None
        if options.kernel_precision == "fp8":
            made = WeightCopies(backward=False)
            backward = options.direction == "backward"
            copies = (
                made.of(problem.w_gate_up.detach(), codes=True, transposed=backward),
                made.of(
                    problem.w_down.detach(), codes=not backward or options.saved > 0, transposed=backward
                ),
            )
        return cls(
            LayerInputs(
                first.x.detach(),
                first.topk_idx,
                first.topk_weights.detach(),
                problem.w_gate_up.detach(),
                problem.w_down.detach(),
            ),
            first.dy,
            copies,
        )


class KernelRanks:
    """Kernels, streams and inputs of ranks that share a GPU; `num_reserved_sms` of it are left free."""

    def __init__(self, options: Options, device: torch.device, num_reserved_sms: int = 0) -> None:
        self._device, self._options = device, options
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
            mode=request.mode(backward=options.direction == "backward" or options.saved > 0),
        )
        everything = torch.cuda.get_device_properties(device).multi_processor_count
        # Clusters are pairs; a trace has a place for every CTA.
        self.num_sms = (everything - num_reserved_sms) // count // 2 * 2
        if num_reserved_sms < 0 or self.num_sms < 2:
            # The kernels take 0 for all SMs.
            raise ValueError(
                f"reserved: got {num_reserved_sms} of {everything} SMs with {count} ranks, wanted 2 SMs a rank or more"
            )
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
        self._layers = [KernelLayer(kernels) for kernels in self.kernels]
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self.inputs = [_Inputs.of(options, device, rank) for rank in range(count)]
        rows = SavedRows.of(layout, options.saved).slots(options.tokens) if options.saved else 0
        columns = 2 * shape.intermediate
        self._saved = [
            torch.empty(rows, columns, dtype=torch.bfloat16, device=device) if rows else None
            for _ in range(count)
        ]
        self._reserve()
        if rows and options.direction == "backward":
            self._each(self._forward)
            self.check()

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel holds on each rank between calls: the part that peers reach, and the workspace."""
        return sum(memory.numel() for memory in self.kernels[0].memory)

    @property
    def saved_nbytes(self) -> int:
        """Bytes of gate and up that each rank keeps from a forward to its backward."""
        saved = self._saved[0]
        return 0 if saved is None else saved.numel() * saved.element_size()

    def launch(self, arrays: Sequence[Tensor] | None) -> list[list[Tensor]]:
        """What every rank's launch gives, with the tracing kernel where ``arrays`` are given. Waits for the device."""
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

    def captured(self) -> torch.cuda.CUDAGraph:
        """One call as a graph: ranks launched one after another start up to 0.1 ms apart, which on devices of their
        own they would not."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.call()
        graph.replay()
        self.check()
        return graph

    def _queue(self, arrays: Sequence[Tensor] | None) -> list[list[Tensor]]:
        one = self._forward if self._options.direction == "forward" else self._backward
        return self._each(lambda rank: one(rank, None if arrays is None else arrays[rank]))

    def _each(self, one: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
        """What each rank's launch on its stream gives."""
        results = []
        for rank, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                results.append(one(rank))
        return results

    def _forward(self, rank: int, trace: Tensor | None = None) -> list[Tensor]:
        """One rank's launch: y."""
        saved = self._saved[rank]
        given = self.inputs[rank]
        # Those of a backward in fp8 are not for the forward in bf16 that saves for it.
        copies = given.copies if self.kernels[rank].shape.mode.forward == "fp8" else None
        y, _ = self._layers[rank].forward(given.layer, copies=copies, saved_gate_up=saved, trace=trace)
        return [y]

    def _backward(self, rank: int, trace: Tensor | None = None) -> list[Tensor]:
        """One rank's launch: the gradients that are asked for."""
        given, options = self.inputs[rank], self._options
        gradients, _ = self._layers[rank].backward(
            given.dy,
            given.layer,
            needs=PARTS[options.parts],
            dw_dtype=options.dw_dtype,
            saved_gate_up=self._saved[rank],
            copies=given.copies,
            trace=trace,
        )
        return [gradient for gradient in gradients if gradient is not None]

    def check(self) -> None:
        """Wait for the device; raises what a launch reported."""
        torch.cuda.synchronize(self._device)
        for kernels in self.kernels:
            kernels.check()

    def _reserve(self) -> None:
        # An allocation between launches that wait for one another could wait for them.
        for given, stream in zip(self.inputs, self._streams):
            with torch.cuda.stream(stream):
                kept = [made for _ in range(_KEPT) for made in self._results(given)]
                torch.empty(1, device=self._device)
                del kept
        torch.cuda.synchronize(self._device)

    def _results(self, given: _Inputs) -> list[Tensor]:
        """Memory as one launch of a rank takes for what it gives."""
        if self._options.direction == "forward":
            return [torch.empty_like(given.layer.x)]
        needs, dtype = PARTS[self._options.parts], self._options.dw_dtype
        made = (
            (given.layer.x, given.layer.x.dtype),
            (given.layer.topk_weights, torch.float32),
            (given.layer.w_gate_up, dtype),
            (given.layer.w_down, dtype),
        )
        return [torch.empty_like(value, dtype=kind) for (value, kind), needed in zip(made, needs) if needed]
