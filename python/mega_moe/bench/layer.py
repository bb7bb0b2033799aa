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
from mega_moe.bench.shapes import DIRECTIONS, Work, layer_work

RESERVED_SMS = (0, 16)
"""SMs left to other work by kernels of ours; other kernels are sized by torch."""

_CHECKED_TOKENS = 256
# Two results that are each within the layer's tolerance of the exact one (bf16: 6e-3) differ by twice that at most.
_LIMITS = {torch.bfloat16: 1.2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Case:
    """One precision and the backends measured in it; `backends` None means every one that explain lists.

    ``tokens``: fewer than the run's, None for those. ``reuse_weight_copies``: where kernels read e4m3 copies of the
    weights, they are made before the time begins. ``dw_precision`` is the buffer's.
    """

    precision: str
    backends: tuple[str, ...] | None
    tokens: int | None = None
    reuse_weight_copies: bool = False
    dw_precision: str = "bf16"
    directions: tuple[str, ...] = DIRECTIONS


def measure_layer(
    problem: Problem,
    options: Case,
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
    explanation = mega_moe.explain(
        **problem.shape.sizes(),
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
    shared = _Shared(problem, options, context, product_rates)
    for verdict in explanation.verdicts:
        if options.backends is not None and verdict.backend not in options.backends:
            continue
        for reserved in RESERVED_SMS if verdict.backend == "fused" else (None,):
            # A verdict of explain is one on the automatic choice, which refuses the reference where its numerics would
            # surprise. Here every backend is asked for by name.
            try:
                buffer = shared.buffer(verdict.backend, problem.tokens, reserved or 0)
            except mega_moe.BackendRefusedError as error:
                outcome = Outcome("refused", verdict.reasons or (str(error),), None)
                yield shared.row(verdict.backend, "all", reserved or None, outcome)
                break
            reuse = buffer.reuse_weight_copies() if options.reuse_weight_copies else contextlib.nullcontext()
            with buffer, reuse:
                for direction in options.directions:
                    run = _Run(shared, buffer, verdict.backend, direction, reserved)
                    yield from run.rows(protocols, timer)
                    # One direction's graphs and buffers are gone before the next begins.
                    del run
                    _release(context)
            del buffer
            _release(context)


class _Shared:
    """What the rows of one problem and precision share, the reference's answer for the first tokens among it."""

    def __init__(
        self,
        problem: Problem,
        options: Case,
        context: Context,
        product_rates: dict[tuple[str, str], float],
    ) -> None:
        self.problem, self.options, self.context = problem, options, context
        self._rates = product_rates
        on_gpu = context.device.type == "cuda"
        self.allocated_before = torch.cuda.memory_allocated(context.device) if on_gpu else None

    def buffer(self, backend: str, tokens: int, reserved_sms: int) -> mega_moe.MoEBuffer:
        return mega_moe.MoEBuffer(
            self.context.group,
            **self.problem.shape.sizes(),
            max_tokens_per_rank=tokens,
            precision=self.options.precision,
            dw_precision=self.options.dw_precision,
            backend=backend,
            dtype=self.problem.dtype,
            device=self.context.device,
            num_reserved_sms=reserved_sms,
        )

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor] | None:
        """y and dx of the first tokens by the reference backend; None where it refuses. Collective, computed once."""
        tokens = min(self.problem.tokens, _CHECKED_TOKENS)
        try:
            buffer = self.buffer("reference", tokens, 0)
        except mega_moe.BackendRefusedError:
            return None
        inputs = self.problem.sets[0].head(tokens)
        with buffer:
            y = self.call(inputs, buffer)
            (dx,) = torch.autograd.grad(y, (inputs.x,), inputs.dy)
        return y.detach(), dx

    def call(self, inputs: InputSet, buffer: mega_moe.MoEBuffer) -> Tensor:
        problem = self.problem
        return mega_moe.moe(
            inputs.x,
            inputs.topk_idx,
            inputs.topk_weights,
            problem.w_gate_up,
            problem.w_down,
            buffer=buffer,
        )

    def row(
        self,
        backend: str,
        direction: str,
        reserved: int | None,
        outcome: Outcome,
        peak_bytes: int | None = None,
        relative_error: float | None = None,
    ) -> LayerRow:
        problem, options, timing = self.problem, self.options, outcome.timing
        dtype = str(problem.dtype).removeprefix("torch.")
        work = None
        if direction != "all":
            work = layer_work(
                problem.shape,
                problem.tokens,
                direction,
                precision=options.precision,
                dtype=dtype,
                dw_precision=options.dw_precision,
            )
        reused = options.reuse_weight_copies and backend == "fused" and options.precision != "bf16"
        return LayerRow(
            kind="layer",
            shape=problem.shape.name,
            **problem.shape.sizes(),
            tokens=problem.tokens,
            num_ranks=self.context.num_ranks,
            backend=backend,
            precision=options.precision,
            dtype=dtype,
            direction=direction,
            dw_dtype=dtype if "backward" in direction else None,
            reserved_sms=reserved,
            flops=work.total if work else None,
            flop_rule=work.rule if work else None,
            tflops=work.total / timing.seconds * 1e-12 if work and timing else None,
            percent_of_ceiling=percent_of_ceiling(work, timing, self._rates) if work and timing else None,
            peak_bytes=peak_bytes,
            relative_error=relative_error,
            outcome=outcome,
            weight_copies="reused" if reused else None,
            dw_precision="fp8" if options.dw_precision == "fp8" else None,
        )


def percent_of_ceiling(work: Work, timing: Timing, rates: dict[tuple[str, str], float]) -> float | None:
    """Time of the GEMMs at the ceilings of this protocol over the measured time; None where one was not measured."""
    floor = 0.0
    for element, flops in work.flops.items():
        rate = rates.get((timing.protocol, product_name(element)))
        if rate is None:
            return None
        floor += flops / (rate * 1e12)
    return 100 * floor / timing.seconds


class _Run:
    """One direction of one backend as calls without arguments, one per input set."""

    def __init__(
        self, shared: _Shared, buffer: mega_moe.MoEBuffer, backend: str, direction: str, reserved: int | None
    ) -> None:
        self._shared, self._buffer, self._direction = shared, buffer, direction
        self._row = functools.partial(shared.row, backend, direction, reserved)
        self._calls: list[Callable[[], tuple[Tensor, ...]]] = []

    def rows(self, protocols: Sequence[Protocol], timer: Timer) -> Iterator[LayerRow]:
        """A row per protocol, or one failed row."""
        context, problem = self._shared.context, self._shared.problem
        peak: int | None = None
        reason: str | None = None
        # A failure here, out of memory above all, is this backend's row and not the end of the run.
        try:
            peak = self._trial()
        except RuntimeError as error:
            reason = first_line(error)
        reason = context.first_reason(reason)
        if reason is not None:
            yield self._row(Outcome("failed", (reason,), None))
            return
        for protocol in protocols:
            timing = measure(self._calls, protocol, timer, context, poison=problem.poison)
            problem.poison()
            relative_error, fault = self._check()
            fault = context.first_reason(fault)
            outcome = Outcome("failed", (fault,), None) if fault else Outcome("measured", (), timing)
            yield self._row(outcome, peak, relative_error)

    def _trial(self) -> int | None:
        """Sets the calls up and runs all that a window runs; the most bytes beyond inputs and weights, on a GPU."""
        context, before = self._shared.context, self._shared.allocated_before
        self._calls = [self._prepare(inputs) for inputs in self._shared.problem.sets]
        self._calls[0]()
        self._shared.problem.poison()
        context.synchronize()
        if before is None:
            return None
        torch.cuda.reset_peak_memory_stats(context.device)
        self._calls[0]()
        context.synchronize()
        return torch.cuda.max_memory_allocated(context.device) - before

    def _check(self) -> tuple[float | None, str | None]:
        """Relative L2 of the first set's checked tokens against the reference backend, and what is wrong, if it is."""
        outputs = [output.detach() for output in self._calls[0]()]
        if not all(bool(torch.isfinite(output).all()) for output in outputs):
            return None, "an output holds NaN or Inf"
        if self._shared.expected is None:
            return None, None
        # outputs[0] is y for the forward, dx otherwise.
        expected = self._shared.expected[0 if self._direction == "forward" else 1].double()
        got = outputs[0][: expected.shape[0]].double()
        error = float((got - expected).norm() / expected.norm())
        limit = _LIMITS[self._shared.problem.dtype]
        if error <= limit:
            return error, None
        return error, f"differs from the reference backend: relative L2 {error:.3g}, wanted at most {limit:g}"

    def _prepare(self, inputs: InputSet) -> Callable[[], tuple[Tensor, ...]]:
        problem = self._shared.problem
        leaves = (inputs.x, inputs.topk_weights, problem.w_gate_up, problem.w_down)
        call = functools.partial(self._shared.call, inputs, self._buffer)
        if self._direction == "forward":
            return lambda: (call(),)
        if self._direction == "backward":
            y = call()
            return lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True)
        return lambda: torch.autograd.grad(call(), leaves, inputs.dy)


def _release(context: Context) -> None:
    # The next backend must not be measured in, or refused by, what this one left in the allocator.
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
