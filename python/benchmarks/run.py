"""The published suite on this machine: writes results/<device>-<date>.json, which report.py reads.

    python python/benchmarks/run.py [--quick] [--wheel FILE] [--results FOLDER] [--shape NAMES]
    torchrun --nproc-per-node N python/benchmarks/run.py          experts over N GPUs; <device>-xN-<date>.json

Measures the installed package, not the sources alongside this file. Exits 1 when a row failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from report import file_name

import mega_moe
from mega_moe.bench import schema
from mega_moe.bench.layer import Case
from mega_moe.bench.protocols import PROTOCOLS
from mega_moe.bench.ranks import Context, joined
from mega_moe.bench.shapes import PARTS, Shape, find_shape
from mega_moe.bench.suite import Options, run
from mega_moe.bench.table import line, render

SHAPES = ("30B", "235B", "DeepSeek-V3")
FP8_PRECISIONS = ("fp8", "fp8_bwd")
# It emulates every rounding to judge kernels by, not to be fast: in fp8 minutes a call at these sizes.
NOT_MEASURED = "reference"
# Where a rank has fewer tokens, in bf16: the fastest, and what everybody has.
FEWER_TOKENS, OF_FEWER = (8192, 1024), ("fused", "grouped")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the published suite on this machine.")
    parser.add_argument("--quick", action="store_true", help="three windows of each protocol")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel that was installed")
    parser.add_argument(
        "--shape", default=",".join(SHAPES), metavar="NAMES", help="shapes, separated by commas"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", default=Path(__file__).resolve().parent / "results"
    )
    words = parser.parse_args(argv)
    with joined("auto") as context:
        shapes = tuple(find_shape(name) for name in words.shape.split(","))
        options = Options(
            parts=PARTS,
            shapes=shapes,
            tokens=None,
            cases=cases(shapes[0], context),
            protocols=tuple(p.quick() if words.quick else p for p in PROTOCOLS.values()),
            dtype=torch.bfloat16 if context.device.type == "cuda" else torch.float32,
            wheel=words.wheel,
        )
        first = context.rank == 0
        result = run(options, context, argv, lambda row: print(line(row), flush=True) if first else None)
    if first:
        words.results.mkdir(parents=True, exist_ok=True)
        path = words.results / file_name(result.environment)
        path.write_text(schema.dumps(result), encoding="utf-8")
        print(render(result), end="")
        print(f"written: {path}")
    return 1 if any(row.outcome.status == "failed" for row in result.rows) else 0


def cases(shape: Shape, context: Context) -> tuple[Case, ...]:
    """Every backend but the emulation in bf16 and fp8, fp8 and fp8_bwd by `fused` with kept copies of the weights, the
    backward of fp8 with dW in fp8 too, and some with fewer tokens."""
    explanation = mega_moe.explain(
        **shape.sizes(),
        max_tokens_per_rank=shape.default_tokens,
        num_ranks=context.num_ranks,
        device=context.device,
    )
    fast = tuple(v.backend for v in explanation.verdicts if v.backend != NOT_MEASURED)
    fewer = (Case("bf16", OF_FEWER, tokens) for tokens in FEWER_TOKENS)
    kept = (Case(precision, ("fused",), reuse_weight_copies=True) for precision in FP8_PRECISIONS)
    dw = Case("fp8", ("fused",), reuse_weight_copies=True, dw_precision="fp8", directions=("backward",))
    return (Case("bf16", fast), Case("fp8", fast), *kept, dw, *fewer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
