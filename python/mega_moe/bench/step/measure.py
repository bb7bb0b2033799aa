"""Training steps of one backend under the clock: the whole step, and the part of it that is spent in MoE layers."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import mega_moe
from mega_moe._ops import registry
from mega_moe.bench.ranks import Context, first_line
from mega_moe.bench.schema import StepRow
from mega_moe.bench.step.model import Adapter, Transformer, initialize
from mega_moe.bench.step.shapes import Model, peak_flops
from mega_moe.integrations import (
    Converted,
    DispatchConfig,
    LoadMeter,
    Meshes,
    clip_grad_norm_,
    convert,
    shard,
)

_LEARNING_RATE = 1e-4
_MAX_NORM = 1.0


@dataclass(frozen=True)
class StepOptions:
    """Of ``steps`` steps the first ``skipped`` do not count; ``num_layers`` of the model's layers are trained."""

    model: Model
    num_layers: int
    precision: str
    steps: int
    skipped: int
    ep_size: int
    num_reserved_sms: int
    seed: int = 0


def measure_backend(options: StepOptions, backend: str, context: Context, meshes: Meshes) -> StepRow:
    """One row. Collective. A refusal, or a failure such as too little memory, is a row as well."""
    of_row = functools.partial(
        StepRow,
        kind="step",
        model=options.model.name,
        layers=options.num_layers,
        model_layers=options.model.num_layers,
        sequence=options.model.sequence,
        num_ranks=context.num_ranks,
        ep_size=options.ep_size,
        backend=backend,
        precision=options.precision,
        reserved_sms=options.num_reserved_sms,
    )
    converted: list[Converted] = []
    found: dict[str, Any] | None = None
    reason: str | None = None
    try:
        try:
            model = _build(options, backend, context, meshes, converted)
        except mega_moe.BackendRefusedError as error:
            return of_row(status="refused", reasons=_reasons(error, backend))
        except RuntimeError as error:  # out of memory above all
            reason = first_line(error)
        # Before the first collective of a step, in which the other ranks would wait for one that failed here.
        reason = context.first_reason(reason)
        if reason is None:
            try:
                found = _train(model, converted[0], options, context)
            except RuntimeError as error:
                reason = first_line(error)
            reason = context.first_reason(reason)
        if found is None or reason is not None:
            return of_row(status="failed", reasons=(reason or "another rank failed",))
        return of_row(status="measured", reason=converted[0].reason, **found)
    finally:
        for one in converted:
            one.destroy()
        model = None  # type: ignore[assignment]
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def _build(
    options: StepOptions, backend: str, context: Context, meshes: Meshes, converted: list[Converted]
) -> Transformer:
    """The model on this rank; what holds its buffers goes into ``converted`` as soon as there is something to free."""
    shape = options.model.with_layers(options.num_layers)
    on_gpu = context.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device("meta"):
        model = Transformer(shape)
    config = DispatchConfig(
        precision=options.precision,
        backend=backend,
        max_tokens_per_rank=shape.sequence,
        num_reserved_sms=options.num_reserved_sms if on_gpu else 0,
    )
    converted.append(
        convert(model, config, mesh=meshes.expert, adapters=[Adapter()], dtype=dtype, device=context.device)
    )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if on_gpu else None
    shard(model, meshes, model.blocks, mp_policy=policy)
    model.to_empty(device=context.device)
    initialize(model, options.seed * context.num_ranks + context.rank)
    return model


def _train(
    model: Transformer, converted: Converted, options: StepOptions, context: Context
) -> dict[str, Any]:
    """The measured fields of a row."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    generator = torch.Generator(context.device).manual_seed(1000 + context.rank)
    size = (1, options.model.sequence + 1)
    meter = LoadMeter(model)
    seconds: list[float] = []
    inside: list[float] = []
    losses: list[Tensor] = []
    forwards = 0
    on_gpu = context.device.type == "cuda"
    with _timed(converted, context) as clock:
        for step in range(options.steps):
            if step == options.skipped:
                meter.reset()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats(context.device)
            tokens = torch.randint(options.model.vocab_size, size, device=context.device, generator=generator)
            context.barrier()
            context.synchronize()
            start = time.perf_counter()
            loss = model(tokens)
            loss.backward()
            clip_grad_norm_(model, _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            context.synchronize()
            elapsed, spent = time.perf_counter() - start, clock.seconds()
            forwards = clock.forwards
            clock.clear()
            losses.append(loss.detach())
            if step >= options.skipped:
                # The slowest rank is the step's time: the others wait for it.
                seconds.append(context.maximum(elapsed))
                inside.append(context.maximum(spent))
    peak = int(context.maximum(torch.cuda.max_memory_allocated(context.device))) if on_gpu else None
    numbers = torch.stack(losses).tolist()
    if not all(map(math.isfinite, numbers)):
        raise RuntimeError(f"the loss is not finite: {numbers}")
    load = float(meter.max_over_mean().mean())
    meter.close()
    mean, on_rank = sum(seconds) / len(seconds), options.model.with_layers(options.num_layers)
    stated = peak_flops(torch.cuda.get_device_name(context.device)) if on_gpu else None
    return {
        "seconds": mean,
        "steps_s": tuple(seconds),
        "tokens_per_s": on_rank.sequence / mean,
        "mfu": on_rank.flops(on_rank.sequence) / mean / stated if stated else None,
        "peak_bytes": peak,
        "moe_seconds": sum(inside) / len(inside),
        "moe_forwards": forwards,
        "load_max_over_mean": load,
        "losses": tuple(numbers),
    }


class _Clock:
    """Time of the calls that reach a backend, in the lowest place where a recomputed forward can be seen."""

    def __init__(self, context: Context) -> None:
        self._on_gpu = context.device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self.forwards = 0

    def wrap(self, call: Callable[..., Any], forward: bool) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self.forwards += forward
            start = self._mark()
            result = call(*args, **options)
            self._spans.append((start, self._mark()))
            return result

        return timed

    def seconds(self) -> float:
        """Sum over the calls since `clear`; the device must have finished them."""
        if self._on_gpu:
            return sum(float(start.elapsed_time(end)) for start, end in self._spans) * 1e-3
        return sum(float(end - start) for start, end in self._spans)

    def clear(self) -> None:
        self._spans.clear()
        self.forwards = 0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def _timed(converted: Converted, context: Context) -> Iterator[_Clock]:
    clock = _Clock(context)
    executors: list[Any] = [registry.get(buffer._live().handle) for buffer in converted.buffers]
    for executor in executors:
        executor.forward = clock.wrap(executor.forward, True)
        executor.backward = clock.wrap(executor.backward, False)
    try:
        yield clock
    finally:
        for executor in executors:
            del executor.forward, executor.backward


def _reasons(error: mega_moe.BackendRefusedError, backend: str) -> tuple[str, ...]:
    """Those of ``backend`` alone, from the list that the error holds."""
    head = f"{backend}: refused: "
    for line in str(error).splitlines():
        if line.strip().startswith(head):
            return tuple(line.strip().removeprefix(head).split("; "))
    return (first_line(error),)
