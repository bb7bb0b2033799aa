"""The fused kernels alone: one rank, or several that share the GPU, burst and sustained.

    python -m mega_moe.bench.kernels [--direction forward,backward] [--shape 30B,235B] [--tokens 16384] [--ranks 1,8]
        [--precision bf16,fp8] [--reserved 0,16] [--dw bf16,fp32,fp8] [--parts all,dx,dw] [--saved 0,1.1]
        [--hot 4] [--json FILE]

Tokens are those of all ranks together, so that rows of one shape do the same work. The published table times calls of
`mega_moe.moe`; this one times launches alone, replayed from a CUDA graph, in fp8 on copies of the weights that are made
before. `--dw` is the dtype of a backward's weight gradients, of which "fp8" means bf16 from GEMMs of e4m3, as of
`MoEBuffer(dw_precision="fp8")`. `--parts` is what a backward is asked for: everything, the gradients of x and of the
routing weights, or those of the experts' weights. `--saved` is what `MoEBuffer` takes as `save_gate_up`. `--hot` gives
expert 0 so many times its even share of the rows, with as many rows in all.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mega_moe._backends.fused.rows import check_share
from mega_moe._ops import library
from mega_moe.bench.kernel_ranks import (
    DIRECTIONS,
    PARTS,
    PRECISIONS,
    KernelRanks,
    Options,
    prepare_process,
    why_not,
)
from mega_moe.bench.protocols import PROTOCOLS, CudaTimer, measure
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import Timing
from mega_moe.bench.shapes import backward_flops, find_shape, layer_work
from mega_moe.bench.words import listed

# dtype and precision of the weights' gradients.
_DW = {
    "bf16": (torch.bfloat16, "bf16"),
    "fp32": (torch.float32, "bf16"),
    "fp8": (torch.bfloat16, "fp8"),
}


@dataclass(frozen=True)
class KernelRow:
    """The time of one call of all ranks under one protocol."""

    direction: str
    shape: str
    precision: str
    tokens: int
    num_ranks: int
    num_reserved_sms: int
    num_sms: int
    dw: str | None  # of a backward that is asked for the weights' gradients: as `--dw` names them
    parts: str | None  # of a backward: what it is asked for
    saved: float  # share of gate and up that is kept from the forward to the backward
    saved_nbytes: int  # that this takes on each rank
    hot: float | None  # rows of expert 0 over its even share
    nbytes: int  # that the kernel holds on each rank, whatever the routing
    tflops: float
    timing: Timing

    def __str__(self) -> str:
        clock = "" if self.timing.mhz is None else f", {self.timing.mhz:.0f} MHz"
        dw = "" if self.dw is None else f", dW in {self.dw}"
        parts = "" if self.parts in (None, "all") else f" of {self.parts} alone"
        hot = "" if self.hot is None else f", expert 0 has {self.hot:g} times its share"
        saved = "" if self.saved == 0 else f", {self.saved_nbytes / 2**30:.2f} GiB of gate and up kept"
        return (
            f"{self.shape} {self.precision} {self.direction}{parts}{dw}, T={self.tokens} in all, "
            f"{self.num_ranks} ranks of {self.num_sms} SMs, {self.num_reserved_sms} SMs reserved, "
            f"{self.timing.protocol}: {1e3 * self.timing.seconds:.3f} ms, {self.tflops:.0f} TF/s{clock}, "
            f"{self.nbytes / 2**30:.2f} GiB a rank{saved}{hot}"
        )


def time_kernel(
    options: Options, num_reserved_sms: int, device: torch.device, quick: bool
) -> Iterator[KernelRow]:
    """A row per protocol."""
    ranks = KernelRanks(options, device, num_reserved_sms)
    ranks.launch(None)
    graph = ranks.captured()
    backward = options.direction == "backward"
    dw = next(name for name, of in _DW.items() if of == (options.dw_dtype, options.dw_precision))
    alone = Context(device, None, 0, 1)
    for protocol in PROTOCOLS.values():
        chosen = protocol.quick() if quick else protocol
        timing = measure([graph.replay], chosen, CudaTimer(device), alone)
        ranks.check()
        yield KernelRow(
            direction=options.direction,
            shape=options.shape.name,
            precision=options.precision,
            tokens=options.tokens * options.num_ranks,
            num_ranks=options.num_ranks,
            num_reserved_sms=num_reserved_sms,
            num_sms=ranks.num_sms,
            dw=dw if backward and options.parts != "dx" else None,
            parts=options.parts if backward else None,
            saved=options.saved,
            saved_nbytes=ranks.saved_nbytes,
            hot=options.hot,
            nbytes=ranks.nbytes,
            tflops=flops(options) / timing.seconds * 1e-12,
            timing=timing,
        )


def flops(options: Options) -> float:
    """FLOPs of all ranks' GEMMs."""
    tokens = options.tokens * options.num_ranks
    if options.direction == "forward":
        return layer_work(
            options.shape, tokens, "forward", precision=options.precision, dtype="bfloat16"
        ).total
    return backward_flops(options.shape, tokens, dx=options.parts != "dw", dw=options.parts != "dx")


def cases(words: argparse.Namespace) -> Iterator[tuple[Options, int]]:
    """Options and SMs left free for every combination of the words, each once.

    Raises ValueError for a word that is not known, and for tokens that the ranks cannot share evenly.
    """
    known = {"direction": DIRECTIONS, "precision": PRECISIONS, "parts": PARTS, "dw": _DW}
    directions, precisions, parts, gradients = (
        listed(name, getattr(words, name), names) for name, names in known.items()
    )
    shapes = [find_shape(name) for name in words.shape.split(",")]
    saved_shares = [check_share(float(share)) for share in words.saved.split(",")]
    tokens, ranks, reserved = (
        [int(count) for count in text.split(",")] for text in (words.tokens, words.ranks, words.reserved)
    )
    for shape, total, num_ranks, free, saved, precision in itertools.product(
        shapes, tokens, ranks, reserved, saved_shares, precisions
    ):
        if total % num_ranks:
            raise ValueError(f"tokens: got {total}, wanted a multiple of {num_ranks} ranks")
        plain = Options(shape, total // num_ranks, num_ranks, saved=saved, precision=precision, hot=words.hot)
        for direction in directions:
            if direction == "forward":
                yield plain, free
                continue
            for part, dw in itertools.product(parts, gradients):
                # Without weight gradients their dtype says nothing.
                if part == "dx" and dw != gradients[0]:
                    continue
                dtype, dw_precision = _DW[dw]
                made = replace(
                    plain, direction=direction, dw_dtype=dtype, parts=part, dw_precision=dw_precision
                )
                made.request()  # raises for a --dw that the precision does not know
                yield made, free


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m mega_moe.bench.kernels", description=__doc__)
    add = made.add_argument
    add("--direction", default="forward,backward", help="separated by commas (default: both)")
    add("--shape", default="30B,235B", help="separated by commas (default: 30B,235B)")
    add("--tokens", default="16384", help="of all ranks, separated by commas")
    add("--ranks", default="1", help="ranks that share the GPU, separated by commas")
    add("--precision", default="bf16", help=f"of {', '.join(PRECISIONS)} (default: bf16)")
    add("--reserved", default="0", help="SMs left free, separated by commas")
    add("--dw", default="bf16", help=f"of {', '.join(_DW)} (default: bf16)")
    add("--parts", default="all", help=f"of {', '.join(PARTS)} (default: all)")
    add("--saved", default="0", help="as save_gate_up of a buffer, separated by commas (default: 0)")
    add("--hot", type=float, help="rows of expert 0 over its even share (default: even experts)")
    add("--quick", action="store_true", help="three windows of each protocol")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    return made


def main(argv: list[str] | None = None) -> int:
    """0 when every row was measured, 2 for bad words and where a kernel cannot run."""
    given = parser().parse_args(argv)
    prepare_process()
    try:
        wanted = list(cases(given))
    except ValueError as error:
        print(f"refused: {error}")
        return 2
    if not torch.cuda.is_available():
        print("refused: there is no CUDA device")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    for options, _ in wanted:
        if reasons := why_not(options, device):
            print(f"refused: {options.shape.name} {options.direction}: {'; '.join(reasons)}")
            return 2
    rows = []
    for options, reserved in wanted:
        for row in time_kernel(options, reserved, device, given.quick):
            print(row, flush=True)
            rows.append(row)
        if given.json is not None:
            # After every case: a later one that fails takes nothing along.
            device_name, build = torch.cuda.get_device_name(), library.build_record()
            result = {"device": device_name, "build": build, "rows": [asdict(row) for row in rows]}
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
