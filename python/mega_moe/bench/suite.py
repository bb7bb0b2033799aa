"""One run: ceilings and layer, in the same process and protocols, as one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe._ops import library
from mega_moe.bench.ceilings import ceilings, measure_ceiling
from mega_moe.bench.environment import describe
from mega_moe.bench.host import TOKENS, measure_host
from mega_moe.bench.layer import Case, measure_layer
from mega_moe.bench.problem import random_problem
from mega_moe.bench.protocols import Protocol, make_timer
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import SCHEMA_VERSION, Result, Row
from mega_moe.bench.shapes import Shape
from mega_moe.bench.words import without_folders


@dataclass(frozen=True)
class Options:
    """What one run measures; `tokens` None takes each shape's own."""

    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    tokens: int | None
    cases: tuple[Case, ...]
    protocols: tuple[Protocol, ...]
    dtype: torch.dtype
    wheel: Path | None


def run(options: Options, context: Context, arguments: list[str], progress: Callable[[Row], None]) -> Result:
    """Measures everything that the options name; `progress` sees each row as it comes. Collective over the ranks."""
    timer = make_timer(context.device, library.status().reason)
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
    if "host" in options.parts:
        for shape in options.shapes:
            small = random_problem(shape, options.tokens or TOKENS, options.dtype, context)
            for case in options.cases:
                for host_row in measure_host(small, case, context):
                    keep(host_row)
            del small
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
                for layer_row in measure_layer(
                    problem, case, options.protocols, timer, context, product_rates=products
                ):
                    keep(layer_row)
            del problem
    return Result(SCHEMA_VERSION, environment, without_folders(arguments), tuple(rows))
