"""The command `mega-moe bench`: words of the command line to a run, its table and its JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mega_moe._backends.choice.decide import BACKENDS
from mega_moe._base.types import DW_PRECISIONS, PRECISIONS, check_dw_precision
from mega_moe.bench.shapes import DIRECTIONS, PARTS, SHAPES, find_shape
from mega_moe.bench.words import add_run_options, check_run_options, listed

# What a run needs is imported by it: help and refused words come without torch.
if TYPE_CHECKING:
    from mega_moe.bench import kernel_ranks, schema
    from mega_moe.bench.ranks import Context
    from mega_moe.bench.suite import Options

_DTYPES = ("bfloat16", "float32")
_PROTOCOLS = ("burst", "sustained")


def parser() -> argparse.ArgumentParser:
    """The options of the command; lists are separated by commas."""
    made = argparse.ArgumentParser(
        prog="mega-moe bench",
        description="Time the layer with every backend, and this machine's ceilings. Under torchrun the experts "
        "are spread over the ranks and the slowest rank counts. Without a GPU the tiny shape runs in seconds.",
        epilog="`mega-moe bench step` times whole training steps, `python -m mega_moe.bench.kernels` launches of the "
        "fused kernels alone.",
    )
    add = made.add_argument
    add("--shape", help=f"of {', '.join(SHAPES)} (default: 30B,235B on a GPU, else tiny)")
    add("--tokens", type=int, help="tokens per rank (default: the shape's own)")
    add("--backend", help=f"of {', '.join(BACKENDS)} (default: all)")
    add("--protocol", default=",".join(_PROTOCOLS), help=f"of {', '.join(_PROTOCOLS)} (default: both)")
    add("--direction", default=",".join(DIRECTIONS), help=f"of {', '.join(DIRECTIONS)} (default: all)")
    add("--precision", default="bf16", help=f"of {', '.join(PRECISIONS)} (default: bf16)")
    add("--dw-precision", choices=DW_PRECISIONS, default="bf16", help="of a backward in fp8 (default: bf16)")
    add(
        "--part",
        default=",".join(PARTS),
        help=f"of {', '.join(PARTS)} (default: both), host: host time of a call",
    )
    add("--dtype", choices=_DTYPES, help="of x and weights (default: bfloat16 on a GPU, else float32)")
    add(
        "--reuse-weight-copies",
        action="store_true",
        help="in fp8, keep the copies of the weights from call to call, as a step after its first call does",
    )
    add_run_options(made)
    add("--quick", action="store_true", help="the same windows, but three of each: less time, more noise")
    add(
        "--trace",
        type=Path,
        metavar="OUT",
        help="instead of timing, record what every role of a fused kernel does in one call: print a summary and write "
        "OUT.json for Perfetto; takes --tokens, --virtual-ranks, one --shape, one --precision and one --direction, "
        "forward (default) or backward",
    )
    add(
        "--virtual-ranks",
        type=int,
        metavar="N",
        default=1,
        help="with --trace: play N ranks on one GPU, each with its share of SMs (default: 1)",
    )
    return made


def main(argv: list[str]) -> int:
    """Runs the command; 1 when a row failed or every row of the layer was refused, 2 for bad words, else 0."""
    words = parser().parse_args(argv)
    from mega_moe.bench import kernel_ranks, schema, trace
    from mega_moe.bench.ranks import joined
    from mega_moe.bench.suite import run
    from mega_moe.bench.table import render

    if words.trace is not None:
        kernel_ranks.prepare_process()
    try:
        with joined(words.device) as context:
            if words.trace is not None:
                trace.run(_trace_options(words), words.trace, context)
                return 0
            options = _options(words, context.device.type)
            first = context.rank == 0
            refused = list(_refusals(options, context))
            if refused and context.maximum(float(None in refused)) == 0:
                if first:
                    print(*refused, "nothing is left to be timed", sep="\n", file=sys.stderr)
                return 1
            result = run(options, context, argv, lambda row: _report(row, first))
            if first:
                print(render(result), end="")
                if words.json is not None:
                    words.json.write_text(schema.dumps(result), encoding="utf-8")
    except ValueError as error:
        print(f"mega-moe bench: {error}", file=sys.stderr)
        return 2
    failed = any(row.outcome.status == "failed" for row in result.rows)
    layer = {row.outcome.status for row in result.rows if row.kind == "layer"}
    return 1 if failed or layer == {"refused"} else 0


def _refusals(options: Options, context: Context) -> Iterator[str | None]:
    """For each shape, precision and backend of the layer why it will be refused, None where it will not: minutes of
    ceilings are measured first, for nothing where all are."""
    import mega_moe

    if "layer" not in options.parts:
        return
    for shape in options.shapes:
        for case in options.cases:
            for backend in case.backends or BACKENDS:
                verdict = mega_moe.explain(
                    **shape.sizes(),
                    max_tokens_per_rank=options.tokens or shape.default_tokens,
                    precision=case.precision,
                    dw_precision=case.dw_precision,
                    dtype=options.dtype,
                    num_ranks=context.num_ranks,
                    backend=backend,
                    device=context.device,
                )
                yield None if verdict.chosen else f"{shape.name} {case.precision}: {verdict.verdict(backend)}"


def _report(row: schema.Row, first: bool) -> None:
    from mega_moe.bench.table import line

    if first:
        print(line(row), file=sys.stderr, flush=True)


# Words that say nothing of a trace.
_NOT_WITH_TRACE = (
    "backend",
    "protocol",
    "part",
    "dtype",
    "dw_precision",
    "reuse_weight_copies",
    "quick",
    "wheel",
    "json",
)


def _trace_options(words: argparse.Namespace) -> kernel_ranks.Options:
    from mega_moe.bench import kernel_ranks

    plain = parser()
    for name in _NOT_WITH_TRACE:
        if getattr(words, name) != plain.get_default(name):
            raise ValueError(f"{name.replace('_', '-')}: cannot be combined with --trace")
    if "," in (words.shape or ""):
        raise ValueError(f"shape: got {words.shape!r}, wanted one shape to trace")
    shape = find_shape(words.shape or "30B")
    direction = "forward" if words.direction == plain.get_default("direction") else words.direction
    if direction not in kernel_ranks.DIRECTIONS:
        raise ValueError(
            f"direction: got {direction!r}, wanted one of {', '.join(kernel_ranks.DIRECTIONS)} to trace"
        )
    if words.precision not in kernel_ranks.PRECISIONS:
        known = ", ".join(kernel_ranks.PRECISIONS)
        raise ValueError(f"precision: got {words.precision!r}, wanted one of {known} to trace")
    _check_tokens(words)
    return kernel_ranks.Options(
        shape,
        words.tokens or shape.default_tokens,
        words.virtual_ranks,
        direction,
        precision=words.precision,
    )


def _check_tokens(words: argparse.Namespace) -> None:
    if words.tokens is not None and words.tokens < 1:
        raise ValueError(f"tokens: got {words.tokens}, wanted at least 1")


def _options(words: argparse.Namespace, device_type: str) -> Options:
    import torch

    from mega_moe.bench.layer import Case
    from mega_moe.bench.protocols import PROTOCOLS
    from mega_moe.bench.suite import Options

    on_gpu = device_type == "cuda"
    if words.virtual_ranks != 1:
        raise ValueError(
            "virtual-ranks: can only be combined with --trace; torchrun starts ranks to be timed"
        )
    _check_tokens(words)
    check_run_options(words)
    shapes = (words.shape or ("30B,235B" if on_gpu else "tiny")).split(",")
    protocols = [PROTOCOLS[name] for name in listed("protocol", words.protocol, _PROTOCOLS)]
    backends = tuple(listed("backend", words.backend, BACKENDS)) if words.backend else None
    precisions = listed("precision", words.precision, PRECISIONS)
    for name in precisions:
        check_dw_precision(words.dw_precision, name)
    return Options(
        parts=tuple(listed("part", words.part, (*PARTS, "host"))),
        shapes=tuple(find_shape(name.strip()) for name in shapes),
        tokens=words.tokens,
        cases=tuple(
            Case(
                precision=name,
                backends=backends,
                reuse_weight_copies=words.reuse_weight_copies,
                dw_precision=words.dw_precision,
                directions=tuple(listed("direction", words.direction, DIRECTIONS)),
            )
            for name in precisions
        ),
        protocols=tuple(protocol.quick() if words.quick else protocol for protocol in protocols),
        dtype=getattr(torch, words.dtype or ("bfloat16" if on_gpu else "float32")),
        wheel=words.wheel,
    )
