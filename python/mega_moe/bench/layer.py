"""mega_moe.moe under the clock: every backend side by side, forward, backward alone, and both."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import mega_moe
from mega_moe.bench.ceilings import product_name
from mega_moe.bench.problem import InputSet, Problem
from mega_moe.bench.protocols import Protocol, Timer, measure
from mega_moe.bench.ranks import Context, first_line
from mega_moe.bench.schema import LayerRow, Outcome, Timing
from mega_moe.bench.shapes import Work, layer_work

RESERVING_BACKENDS = {"fused": ("forward", "backward", "forward_backward")}
"""Directions in which a backend's kernels can leave SMs to other work; all others run kernels that torch sizes."""
RESERVED_SMS = (0, 16)

_CHECKED_TOKENS = 256
# Two results that are each within the layer's tolerance of the exact one (bf16: 6e-3) differ by twice that at most.
_LIMITS = {torch.bfloat16: 1.2e-2, torch.float32: 1e-4}

GradBuffers = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class LayerOptions:
    """`backends` None means every one that explain lists; `dw_dtype` None means the weights' dtype.

    `reuse_weight_copies`: where kernels read e4m3 copies of the weights, they are made before the time begins.
    `dw_precision` is the buffer's. `reserved_sms`: each of them, where a backend can leave SMs.
    """

    precision: str
    backends: tuple[str, ...] | None
    directions: tuple[str, ...]
    dw_dtype: torch.dtype | None
    reuse_weight_copies: bool = False
    dw_precision: str = "bf16"
    reserved_sms: tuple[int, ...] = RESERVED_SMS


def measure_layer(
    problem: Problem,
    options: LayerOptions,
    protocols: Sequence[Protocol],
    timer: Timer,
    context: Context,
    *,
    product_rates: dict[tuple[str, str], float],
) -> Iterator[LayerRow]:
    """Rows of every backend, refusals included. Collective over the ranks.

    `product_rates` holds the measured ceilings in TF/s by (protocol, name of the ceiling).
    Raises ValueError for a backend that explain does not list.
    """
    shape = problem.shape
    explanation = mega_moe.explain(
        **shape.sizes(),
        max_tokens_per_rank=problem.tokens,
        precision=options.precision,
        dw_precision=options.dw_precision,
        dtype=problem.dtype,
        num_ranks=context.num_ranks,
        device=context.device,
    )
    known = [verdict.backend for verdict in explanation.verdicts]
    for name in options.backends or ():
        if name not in known:
            raise ValueError(f"backend: got {name!r}, wanted one of {', '.join(known)}")
    case = _Case(problem, options, context, product_rates)
    for verdict in explanation.verdicts:
        if options.backends is not None and verdict.backend not in options.backends:
            continue
        for reserved, directions in reservations(verdict.backend, options.directions, options.reserved_sms):
            # A verdict of explain is one on the automatic choice, which refuses the reference where its numerics would
            # surprise. Here every backend is asked for by name.
            try:
                buffer = case.buffer(verdict.backend, problem.tokens, reserved or 0)
            except mega_moe.BackendRefusedError as error:
                outcome = Outcome("refused", verdict.reasons or (str(error),), None)
                yield case.row(verdict.backend, outcome, reserved=reserved or None)
                break
            reuse = buffer.reuse_weight_copies() if options.reuse_weight_copies else contextlib.nullcontext()
            with buffer, reuse:
                yield from _measure_backend(
                    case, verdict.backend, directions, buffer, reserved, protocols, timer
                )
            del buffer
            _release(context)


def reservations(
    backend: str, directions: Sequence[str], reserved_sms: Sequence[int]
) -> Iterator[tuple[int | None, tuple[str, ...]]]:
    """Reserved SMs, None where they mean nothing, and the directions to measure so."""
    reserving = tuple(d for d in directions if d in RESERVING_BACKENDS.get(backend, ()))
    if reserving:
        for reserved in reserved_sms:
            yield reserved, reserving
    rest = tuple(d for d in directions if d not in reserving)
    if rest:
        yield None, rest


def _measure_backend(
    case: _Case,
    backend: str,
    directions: Sequence[str],
    buffer: mega_moe.MoEBuffer,
    reserved: int | None,
    protocols: Sequence[Protocol],
    timer: Timer,
) -> Iterator[LayerRow]:
    for direction in directions:
        # A function of its own, so that one direction's graphs and buffers are gone before the next begins.
        yield from _measure_direction(
            case, _Calls(case, buffer, direction), backend, direction, reserved, protocols, timer
        )
        _release(case.context)


def _measure_direction(
    case: _Case,
    calls: _Calls,
    backend: str,
    direction: str,
    reserved: int | None,
    protocols: Sequence[Protocol],
    timer: Timer,
) -> Iterator[LayerRow]:
    # A failure here, out of memory above all, is this backend's row and not the end of the run.
    peak: int | None = None
    reason: str | None = None
    try:
        peak = calls.trial(case.allocated_before)
    except RuntimeError as error:
        reason = first_line(error)
    reason = case.context.first_reason(reason)
    if reason is not None:
        yield case.row(backend, Outcome("failed", (reason,), None), direction=direction, reserved=reserved)
        return
    for protocol in protocols:
        timing = measure(calls.calls, protocol, timer, case.context, poison=case.problem.poison)
        case.problem.poison()
        relative_error, fault = calls.check()
        fault = case.context.first_reason(fault)
        yield case.row(
            backend,
            Outcome("failed", (fault,), None) if fault else Outcome("measured", (), timing),
            direction=direction,
            reserved=reserved,
            peak_bytes=peak,
            relative_error=relative_error,
        )


class _Case:
    """What the rows of one problem and precision share, the reference's answer for the first tokens among it."""

    def __init__(
        self,
        problem: Problem,
        options: LayerOptions,
        context: Context,
        product_rates: dict[tuple[str, str], float],
    ) -> None:
        self.problem, self.options, self.context = problem, options, context
        self._rates = product_rates
        self.allocated_before = _allocated(context)
        self.dtype_name = str(problem.dtype).removeprefix("torch.")

    def buffer(self, backend: str, tokens: int, reserved_sms: int) -> mega_moe.MoEBuffer:
        shape = self.problem.shape
        return mega_moe.MoEBuffer(
            self.context.group,
            **shape.sizes(),
            max_tokens_per_rank=tokens,
            precision=self.options.precision,
            dw_precision=self.options.dw_precision,
            backend=backend,
            dtype=self.problem.dtype,
            device=self.context.device,
            num_reserved_sms=reserved_sms,
        )

    @functools.cached_property
    def checked_tokens(self) -> int:
        return min(self.problem.tokens, _CHECKED_TOKENS)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor] | None:
        """y and dx of the first tokens by the reference backend; None where it refuses. Collective, computed once."""
        try:
            buffer = self.buffer("reference", self.checked_tokens, 0)
        except mega_moe.BackendRefusedError:
            return None
        inputs = self.problem.sets[0].head(self.checked_tokens)
        with buffer:
            y = self.call(inputs, buffer, None)
            (dx,) = torch.autograd.grad(y, (inputs.x,), inputs.dy)
        return y.detach(), dx

    def call(self, inputs: InputSet, buffer: mega_moe.MoEBuffer, grad_buffers: GradBuffers) -> Tensor:
        return mega_moe.moe(
            inputs.x,
            inputs.topk_idx,
            inputs.topk_weights,
            self.problem.w_gate_up,
            self.problem.w_down,
            buffer=buffer,
            grad_buffers=grad_buffers,
        )

    def row(
        self,
        backend: str,
        outcome: Outcome,
        *,
        direction: str = "all",
        reserved: int | None = None,
        peak_bytes: int | None = None,
        relative_error: float | None = None,
    ) -> LayerRow:
        shape, timing = self.problem.shape, outcome.timing
        work = None
        if direction != "all":
            work = layer_work(
                shape,
                self.problem.tokens,
                direction,
                precision=self.options.precision,
                dtype=self.dtype_name,
                dw_precision=self.options.dw_precision,
            ).on_the_busiest_rank(self.problem.skew)
        dw_dtype = None
        if direction in ("backward", "forward_backward"):
            dw_dtype = str(self.options.dw_dtype or self.problem.dtype).removeprefix("torch.")
        reused = self.options.reuse_weight_copies and backend == "fused" and self.options.precision != "bf16"
        return LayerRow(
            kind="layer",
            shape=shape.name,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            tokens=self.problem.tokens,
            num_ranks=self.context.num_ranks,
            backend=backend,
            precision=self.options.precision,
            dtype=self.dtype_name,
            direction=direction,
            dw_dtype=dw_dtype,
            reserved_sms=reserved,
            flops=work.total if work else None,
            flop_rule=work.rule if work else None,
            tflops=work.total / timing.seconds * 1e-12 if work and timing else None,
            percent_of_ceiling=percent_of_ceiling(work, timing, self._rates) if work and timing else None,
            peak_bytes=peak_bytes,
            relative_error=relative_error,
            outcome=outcome,
            skew=self.problem.skew,
            weight_copies="reused" if reused else None,
            dw_precision="fp8" if self.options.dw_precision == "fp8" else None,
        )


def percent_of_ceiling(work: Work, timing: Timing, rates: dict[tuple[str, str], float]) -> float | None:
    """Time of the products at the ceilings of this protocol over the measured time; None where one was not measured."""
    floor = 0.0
    for element, flops in work.flops.items():
        rate = rates.get((timing.protocol, product_name(element)))
        if rate is None:
            return None
        floor += flops / (rate * 1e12)
    return 100 * floor / timing.seconds


class _Calls:
    """One direction of one backend as calls without arguments, one per input set."""

    def __init__(self, case: _Case, buffer: mega_moe.MoEBuffer, direction: str) -> None:
        self._case, self._buffer, self._direction = case, buffer, direction
        self._grad_buffers: GradBuffers = None
        problem, dw_dtype = case.problem, case.options.dw_dtype
        if dw_dtype is not None and direction != "forward":
            self._grad_buffers = (
                torch.zeros_like(problem.w_gate_up, dtype=dw_dtype, requires_grad=False),
                torch.zeros_like(problem.w_down, dtype=dw_dtype, requires_grad=False),
            )
        self.calls: list[Callable[[], tuple[Tensor, ...]]] = []

    def trial(self, allocated_before: int | None) -> int | None:
        """Sets the calls up and runs all that a window runs; returns the most bytes beyond `allocated_before`."""
        self.calls = [self._prepare(inputs) for inputs in self._case.problem.sets]
        self.calls[0]()
        self._case.problem.poison()
        self._case.context.synchronize()
        if allocated_before is None:
            return None
        torch.cuda.reset_peak_memory_stats(self._case.context.device)
        self.calls[0]()
        self._case.context.synchronize()
        return torch.cuda.max_memory_allocated(self._case.context.device) - allocated_before

    def check(self) -> tuple[float | None, str | None]:
        """Relative L2 of the first set's checked tokens against the reference backend, and what is wrong, if it is."""
        outputs = [output.detach() for output in self.calls[0]()]
        for output in (*outputs, *(self._grad_buffers or ())):
            if not bool(torch.isfinite(output).all()):
                return None, "an output holds NaN or Inf"
        if self._case.expected is None:
            return None, None
        # outputs[0] is y for the forward, dx otherwise.
        expected = self._case.expected[0 if self._direction == "forward" else 1].double()
        got = outputs[0][: expected.shape[0]].double()
        error = float((got - expected).norm() / expected.norm())
        limit = _LIMITS[self._case.problem.dtype]
        if error <= limit:
            return error, None
        return error, f"differs from the reference backend: relative L2 {error:.3g}, wanted at most {limit:g}"

    def _prepare(self, inputs: InputSet) -> Callable[[], tuple[Tensor, ...]]:
        problem = self._case.problem
        leaves = (inputs.x, inputs.topk_weights, problem.w_gate_up, problem.w_down)
        call = functools.partial(self._case.call, inputs, self._buffer, self._grad_buffers)
        if self._direction == "forward":
            return lambda: (call(),)
        if self._direction == "backward":
            y = call()
            return lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True)
        return lambda: torch.autograd.grad(call(), leaves, inputs.dy)


def _allocated(context: Context) -> int | None:
    return torch.cuda.memory_allocated(context.device) if context.device.type == "cuda" else None


def _release(context: Context) -> None:
    # The next backend must not be measured in, or refused by, what this one left in the allocator.
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
