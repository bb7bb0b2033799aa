"""Times the staging kernel against the device copy, in bursts and in a CUDA graph. Prints JSON.

    python kernels/bench/stage_timing.py [--library LIBRARY ...] [--tokens 16384] [--hidden 2048 4096]

Several libraries (builds with other tiles) are compared in one run, each in a process of its own, because an op can
be registered once in a process. A figure is the median of several bursts: about 10 ms of work after 0.25 s of
idleness. Input sets rotate, so that nothing is read from the L2 cache. Rates count bytes read plus bytes written;
the ceiling is a copy of 2 GiB in the same protocol. Results are poisoned before and spot-checked after the timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOP_K = 8
NUM_EXPERTS = 128
BURST_MS = 10.0
IDLE_S = 0.25
REPEATS = 7
LARGE_BYTES = 1 << 31


def event_ms(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def burst_us(calls: list[Callable[[], None]], graph: bool) -> float:
    """Microseconds of one call, the calls taken in turn: median over bursts."""
    for call in calls:
        call()
    rounds = 3
    estimate = event_ms(lambda: [call() for _ in range(rounds) for call in calls] and None) / rounds
    rounds = max(1, round(BURST_MS / estimate))

    def eager() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    run = eager
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            eager()
        run = captured.replay
        run()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        time.sleep(IDLE_S)
        times.append(event_ms(run) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def copy_calls(nbytes: int, sets: int) -> list[Callable[[], None]]:
    """Copies that read nbytes / 2 and write as much."""
    pairs = [torch.empty(2, nbytes // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(sets)]
    return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]


class Staging:
    """Rotating input sets and buffers for one shape and form."""

    def __init__(self, ops: Any, tokens: int, hidden: int, quantize: bool) -> None:
        layout = ops.staging_layout(tokens, TOP_K, hidden, quantize)
        elements, slots = tokens * hidden, tokens * TOP_K
        written = elements + elements // 128 * 4 if quantize else 2 * elements
        self.nbytes = 2 * elements + written + slots * (8 + 4 + 2 + 4)
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self.sets = max(3, -(-4 * cache // self.nbytes))
        self.calls: list[Callable[[], None]] = []
        self.buffers = []
        for _ in range(self.sets):
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            ids = torch.randint(0, NUM_EXPERTS, (tokens, TOP_K), device="cuda")
            weights = torch.rand(tokens, TOP_K, device="cuda")
            buffer = torch.full((layout[-1],), 0xFF, dtype=torch.uint8, device="cuda")
            buffer[layout[4] :].zero_()
            self.buffers.append((x, buffer))
            arguments = (x, ids, weights, buffer.data_ptr(), layout[-1], tokens, NUM_EXPERTS, quantize)
            self.calls.append(lambda arguments=arguments: ops.stage(*arguments))
        self.codes = slice(0, written - elements // 32 if quantize else written)
        self.quantize = quantize

    def check(self) -> None:
        """Every buffer holds its x: equal bytes, or codes whose groups reach the largest code and no NaN."""
        for x, buffer in self.buffers:
            staged = buffer[self.codes]
            if self.quantize:
                largest = (staged.view(-1, 128) & 0x7F).amax(1)
                assert bool((largest == 0x7E).all()), "a group does not reach 448"
            else:
                assert torch.equal(staged.view(torch.int16), x.view(torch.int16).flatten()), "x differs"


def measure(library: Path, tokens: int, hidden: list[int]) -> list[dict[str, Any]]:
    torch.ops.load_library(str(library))
    ops = torch.ops.mega_moe_kernels
    rows = []
    for graph in (False, True):
        ceiling = 2 * LARGE_BYTES / burst_us(copy_calls(2 * LARGE_BYTES, 1), graph=graph) / 1e3
        for width in hidden:
            for quantize in (False, True):
                staging = Staging(ops, tokens, width, quantize)
                stage = burst_us(staging.calls, graph=graph)
                staging.check()
                copy = burst_us(copy_calls(staging.nbytes, staging.sets), graph=graph)
                rows.append(
                    {
                        "library": str(library),
                        "form": "fp8" if quantize else "bf16",
                        "tokens": tokens,
                        "hidden": width,
                        "protocol": "graph" if graph else "burst",
                        "us": round(stage, 2),
                        "gb_per_s": round(staging.nbytes / stage / 1e3, 1),
                        "percent_of_large_copy": round(staging.nbytes / stage / 1e3 / ceiling * 100, 1),
                        "percent_of_equal_copy": round(copy / stage * 100, 1),
                        "large_copy_gb_per_s": round(ceiling, 1),
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def installed_library() -> Path:
    import mega_moe

    return Path(mega_moe.__file__).parent / "_lib" / "mega_moe_ops.so"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--library", type=Path, nargs="+", help="built libraries; default: the installed one")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096])
    arguments = parser.parse_args()
    libraries = arguments.library or [installed_library()]
    if len(libraries) == 1:
        print(json.dumps(measure(libraries[0], arguments.tokens, arguments.hidden), indent=1))
        return 0
    rows: list[Any] = []
    for library in libraries:
        hidden = map(str, arguments.hidden)
        options = ["--tokens", str(arguments.tokens), "--hidden", *hidden, "--library", str(library)]
        run = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, check=True)
        rows += json.loads(run.stdout)
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
