"""The fused forward's kernel alone: one rank, or several that share the GPU, burst and sustained.

    python -m mega_moe.bench.forward [--shape 30B,235B] [--tokens 16384] [--ranks 1,8] [--reserved 0,16]
                                     [--precision bf16,fp8] [--json FILE]

Tokens are those of all ranks together, so that rows of one shape do the same work. The published table times calls of
`mega_moe.moe`; this one times launches alone, in fp8 on copies of the weights that are made before.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe.bench.clocks import ClockProbe
from mega_moe.bench.forward_ranks import ForwardRanks, Options, prepare_process, why_not
from mega_moe.bench.protocols import PROTOCOLS, CudaTimer, measure
from mega_moe.bench.ranks import Context
from mega_moe.bench.rows import write_rows
from mega_moe.bench.schema import Timing
from mega_moe.bench.shapes import Shape, find_shape, layer_work


@dataclass(frozen=True)
class ForwardRow:
    """The time of one call of all ranks under one protocol."""

    shape: str
    precision: str
    tokens: int
    num_ranks: int
    num_reserved_sms: int
    num_sms: int
    tflops: float
    timing: Timing

    def __str__(self) -> str:
        clock = "" if self.timing.mhz is None else f", {self.timing.mhz:.0f} MHz"
        return (
            f"{self.shape} {self.precision} T={self.tokens} in all, {self.num_ranks} ranks of {self.num_sms} SMs, "
            f"{self.num_reserved_sms} SMs reserved, {self.timing.protocol}: "
            f"{1e3 * self.timing.seconds:.3f} ms, {self.tflops:.0f} TF/s{clock}"
        )


def time_forward(
    shape: Shape,
    tokens: int,
    num_ranks: int,
    num_reserved_sms: int,
    device: torch.device,
    quick: bool,
    precision: str = "bf16",
) -> Iterator[ForwardRow]:
    """A row per protocol. Raises ValueError for tokens that the ranks cannot share evenly."""
    if tokens % num_ranks:
        raise ValueError(f"tokens: got {tokens}, wanted a multiple of {num_ranks} ranks")
    options = Options(shape, tokens // num_ranks, num_ranks, precision)
    ranks = ForwardRanks(options, device, num_reserved_sms)
    ranks.launch(None)
    flops = layer_work(shape, tokens, "forward", precision=precision, dtype="bfloat16").total
    alone = Context(device, None, 0, 1)
    for protocol in PROTOCOLS.values():
        chosen = protocol.quick() if quick else protocol
        timing = measure([ranks.call], chosen, CudaTimer(device, ClockProbe(device)), alone)
        ranks.check()
        yield ForwardRow(
            shape.name,
            precision,
            tokens,
            num_ranks,
            num_reserved_sms,
            ranks.num_sms,
            flops / timing.seconds * 1e-12,
            timing,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mega_moe.bench.forward", description=__doc__)
    parser.add_argument("--shape", default="30B,235B", help="separated by commas (default: 30B,235B)")
    parser.add_argument("--tokens", default="16384", help="of all ranks, separated by commas")
    parser.add_argument("--ranks", default="1", help="ranks that share the GPU, separated by commas")
    parser.add_argument("--reserved", default="0", help="SMs left free, separated by commas")
    parser.add_argument("--precision", default="bf16", help="bf16, fp8 or both, separated by commas")
    parser.add_argument("--quick", action="store_true", help="three windows of each protocol")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    given = parser.parse_args(argv)
    prepare_process()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    reasons = ["there is no CUDA device"]
    precisions = given.precision.split(",")
    if device is not None:
        first = find_shape(given.shape.split(",")[0])
        reasons = [why for p in precisions for why in why_not(Options(first, 128, 1, p), device)]
    if device is None or reasons:
        print("refused: " + "; ".join(reasons))
        return 2
    rows = []
    cases = itertools.product(
        given.shape.split(","),
        precisions,
        map(int, given.tokens.split(",")),
        map(int, given.ranks.split(",")),
        map(int, given.reserved.split(",")),
    )
    for name, precision, tokens, num_ranks, reserved in cases:
        shape = find_shape(name)
        for row in time_forward(shape, tokens, num_ranks, reserved, device, given.quick, precision):
            print(row, flush=True)
            rows.append(row)
    if given.json is not None:
        write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
