"""One run: ceilings and layer, in the same process and protocols, as one result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe._ops import library
from mega_moe.bench.ceilings import ceilings, measure_ceiling
from mega_moe.bench.clocks import make_clock
from mega_moe.bench.environment import describe
from mega_moe.bench.layer import LayerOptions, measure_layer
from mega_moe.bench.problem import random_problem
from mega_moe.bench.protocols import CudaTimer, HostTimer, Protocol, Timer
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import SCHEMA_VERSION, Result, Row
from mega_moe.bench.shapes import Shape


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
    clock = make_clock(context.device, library.status().reason)
    timer: Timer = CudaTimer(context.device, clock)
    if context.device.type != "cuda":
        timer = HostTimer(clock.reason)
    environment = describe(context, options.wheel)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        progress(row)

    products: dict[tuple[str, str], float] = {}
    if "ceilings" in options.parts:
        for ceiling in ceilings(context.device.type, str(options.dtype).removeprefix("torch.")):
            for row in measure_ceiling(ceiling, options.protocols, timer, context):
                keep(row)
                if row.unit == "TF/s" and row.outcome.timing is not None and row.rate is not None:
                    products[row.outcome.timing.protocol, row.name] = row.rate
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
