"""One run: ceilings, staging, layer, in the same process and protocols, as one result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe._ops import library
from mega_moe.bench.ceilings import COPY, ceilings, measure_ceiling
from mega_moe.bench.clocks import make_clock
from mega_moe.bench.environment import describe
from mega_moe.bench.layer import LayerOptions, measure_layer
from mega_moe.bench.problem import random_problem
from mega_moe.bench.protocols import CudaTimer, HostTimer, Protocol, Timer
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import SCHEMA_VERSION, CeilingRow, Result, Row
from mega_moe.bench.shapes import Shape
from mega_moe.bench.stage import FORMS, StageShape, measure_stage


@dataclass(frozen=True)
class Case:
    """One precision and the backends measured in it; None takes every one. ``tokens``: fewer than the run's, and of a
    shape that has no more by itself nothing is measured.

    ``reuse_weight_copies``: as the run's, where that says no. ``directions`` None: those of the run.
    """

    precision: str
    backends: tuple[str, ...] | None
    tokens: int | None = None
    reuse_weight_copies: bool = False
    dw_precision: str = "bf16"
    directions: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Options:
    """What one run measures; `tokens` None takes each shape's own."""

    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    tokens: int | None
    cases: tuple[Case, ...]
    directions: tuple[str, ...]
    protocols: tuple[Protocol, ...]
    dtype: torch.dtype
    dw_dtype: torch.dtype | None
    wheel: Path | None
    reuse_weight_copies: bool = False


def run(options: Options, context: Context, arguments: list[str], progress: Callable[[Row], None]) -> Result:
    """Measures everything that the options name; `progress` sees each row as it comes. Collective over the ranks."""
    library_reason = library.status().reason
    clock = make_clock(context.device, library_reason)
    timer: Timer = CudaTimer(context.device, clock)
    if context.device.type != "cuda":
        timer = HostTimer(clock.reason)
    environment = describe(context, options.wheel)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        progress(row)

    products: dict[tuple[str, str], float] = {}
    copies: dict[str, float] = {}
    if "ceilings" in options.parts:
        for ceiling in ceilings(context.device.type, str(options.dtype).removeprefix("torch.")):
            for row in measure_ceiling(ceiling, options.protocols, timer, context):
                keep(row)
                _note_rate(row, products, copies)
    if "stage" in options.parts:
        for stage_shape in _stage_shapes(options):
            for form in FORMS:
                for stage_row in measure_stage(
                    stage_shape,
                    form,
                    options.protocols,
                    timer,
                    context,
                    library_reason=library_reason,
                    copy_rates=copies,
                ):
                    keep(stage_row)
    if "layer" in options.parts:
        for shape in options.shapes:
            plain = options.tokens or shape.default_tokens
            problem = None
            for case in options.cases:
                tokens = case.tokens or plain
                if case.tokens is not None and case.tokens >= plain:
                    continue
                if problem is None or problem.tokens != tokens:
                    problem = None  # frees the one before
                    problem = random_problem(shape, tokens, options.dtype, context)
                layer = LayerOptions(
                    case.precision,
                    case.backends,
                    case.directions or options.directions,
                    options.dw_dtype,
                    options.reuse_weight_copies or case.reuse_weight_copies,
                    case.dw_precision,
                )
                for layer_row in measure_layer(
                    problem, layer, options.protocols, timer, context, product_rates=products
                ):
                    keep(layer_row)
            del problem
    # Files by their names: where they lay says something of the machine and nothing of the figures.
    words = tuple(Path(word).name if os.sep in word else word for word in arguments)
    return Result(SCHEMA_VERSION, environment, words, tuple(rows))


def _note_rate(row: CeilingRow, products: dict[tuple[str, str], float], copies: dict[str, float]) -> None:
    timing = row.outcome.timing
    if timing is None or row.rate is None:
        return
    if row.name == COPY:
        copies[timing.protocol] = row.rate
    elif row.unit == "TF/s":
        products[timing.protocol, row.name] = row.rate


def _stage_shapes(options: Options) -> list[StageShape]:
    """Each size once: shapes that differ in their experts only stage the same bytes."""
    found: dict[tuple[int, int, int], StageShape] = {}
    for shape in options.shapes:
        tokens = options.tokens or shape.default_tokens
        key = (tokens, shape.hidden, shape.top_k)
        found.setdefault(key, StageShape(tokens, shape.hidden, shape.top_k, shape.num_experts))
    return list(found.values())
