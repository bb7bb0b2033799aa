"""The kernel that makes e4m3 copies of weights, against the device copy: each weight of a layer, both copies or one.

python -m mega_moe.bench.quantize_weights [--shape 30B,235B] [--ep 1,8] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe._ops import library
from mega_moe.bench.ceilings import COPY, ceilings
from mega_moe.bench.clocks import ClockProbe
from mega_moe.bench.protocols import PROTOCOLS, CudaTimer, measure
from mega_moe.bench.ranks import Context
from mega_moe.bench.rows import write_rows
from mega_moe.bench.schema import Timing
from mega_moe.bench.shapes import Shape, find_shape

COPIES = ("both", "codes", "transposed")
_BLOCK = 128
_E4M3 = torch.float8_e4m3fn
# Relative L2 of codes times scales against normal weights: 3 mantissa bits give 2.6 % at most.
_ERROR = 0.03


def quantize_bytes(experts: int, rows: int, columns: int, copies: str) -> int:
    """Bytes read plus bytes written: bf16 in, e4m3 out once or twice, an fp32 scale per block."""
    elements = experts * rows * columns
    return elements * (4 if copies == "both" else 3) + 4 * elements // _BLOCK**2


@dataclass(frozen=True)
class QuantizeRow:
    """One weight ``[experts, rows, columns]`` of a layer under one protocol."""

    shape: str
    ep_size: int
    weight: str
    experts: int
    rows: int
    columns: int
    copies: str
    bytes: int
    gb_per_s: float
    percent_of_copy: float
    timing: Timing

    def __str__(self) -> str:
        return (
            f"{self.shape} EP {self.ep_size} {self.weight} [{self.experts}, {self.rows}, {self.columns}], "
            f"{self.copies}, {self.timing.protocol}: {1e3 * self.timing.seconds:.3f} ms, {self.gb_per_s:.0f} GB/s, "
            f"{self.percent_of_copy:.0f} % of the device copy"
        )


class _Weight:
    """A weight, its copies, and the call that makes them."""

    def __init__(self, experts: int, rows: int, columns: int, copies: str, device: torch.device) -> None:
        extents = experts, rows, columns
        self._weight = torch.randn(extents, device=device, dtype=torch.bfloat16)
        turned = (experts, columns, rows)
        self._codes = None if copies == "transposed" else torch.empty(extents, dtype=_E4M3, device=device)
        self._turned = None if copies == "codes" else torch.empty(turned, dtype=_E4M3, device=device)
        self._scales = torch.empty(experts, rows // _BLOCK, columns // _BLOCK, device=device)

    def call(self) -> None:
        library.require().quantize_weights(self._weight, self._codes, self._turned, self._scales, False)

    def poison(self) -> None:
        for tensor in (self._codes, self._turned):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)

    def check(self) -> None:
        """Raises RuntimeError where the last call's copies of the first and last expert are not the weight's."""
        for expert in {0, len(self._weight) - 1}:
            want = self._weight[expert].float()
            scales = self._scales[expert].repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            for copy in (self._codes, self._turned):
                if copy is None:
                    continue
                codes = copy[expert] if copy is self._codes else copy[expert].T
                error = float((codes.float() * scales - want).norm() / want.norm())
                if not error <= _ERROR:
                    raise RuntimeError(
                        f"copy of expert {expert}: got relative L2 {error:.3g}, wanted {_ERROR}"
                    )


def _copy_rates(device: torch.device, alone: Context, quick: bool) -> dict[str, float]:
    """GB/s of the device copy by protocol."""
    (ceiling,) = (c for c in ceilings(device.type, "bfloat16") if c.name == COPY)
    ready = ceiling.prepare(alone)
    if isinstance(ready, str):
        raise RuntimeError(ready)
    rates = {}
    for name, protocol in PROTOCOLS.items():
        chosen = protocol.quick() if quick else protocol
        timing = measure(ready.calls, chosen, CudaTimer(device, ClockProbe(device)), alone)
        rates[name] = ceiling.work / timing.seconds * 1e-9
    return rates


def time_quantize(
    shape: Shape, ep_size: int, rates: dict[str, float], device: torch.device, quick: bool
) -> Iterator[QuantizeRow]:
    """A row per weight, copies and protocol. Raises ValueError for experts that the ranks cannot share."""
    if shape.num_experts % ep_size:
        raise ValueError(f"ep: got {ep_size}, wanted a divisor of {shape.num_experts} experts")
    experts = shape.num_experts // ep_size
    weights = {
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    alone = Context(device, None, 0, 1)
    for name, (rows, columns) in weights.items():
        for copies in COPIES:
            made = _Weight(experts, rows, columns, copies, device)
            for protocol in PROTOCOLS.values():
                chosen = protocol.quick() if quick else protocol
                timer = CudaTimer(device, ClockProbe(device))
                timing = measure([made.call], chosen, timer, alone, poison=made.poison)
                made.check()
                size = quantize_bytes(experts, rows, columns, copies)
                rate = size / timing.seconds * 1e-9
                percent = 100 * rate / rates[protocol.name]
                yield QuantizeRow(
                    shape.name,
                    ep_size,
                    name,
                    experts,
                    rows,
                    columns,
                    copies,
                    size,
                    rate,
                    percent,
                    timing,
                )
            del made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mega_moe.bench.quantize_weights", description=__doc__)
    parser.add_argument("--shape", default="30B,235B", help="separated by commas (default: 30B,235B)")
    parser.add_argument(
        "--ep", default="1,8", help="ranks that share the experts, separated by commas (default: 1,8)"
    )
    parser.add_argument("--quick", action="store_true", help="three windows of each protocol")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("refused: there is no CUDA device")
        return 2
    status = library.status()
    if not status.loaded:
        print(f"refused: {status.reason}")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rates = _copy_rates(device, Context(device, None, 0, 1), given.quick)
    print("device copy: " + ", ".join(f"{rate:.0f} GB/s {name}" for name, rate in rates.items()), flush=True)
    rows = []
    for name in given.shape.split(","):
        for ep_size in map(int, given.ep.split(",")):
            for row in time_quantize(find_shape(name), ep_size, rates, device, given.quick):
                print(row, flush=True)
                rows.append(row)
    if given.json is not None:
        write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
