"""The routing kernel alone: one rank, or several that share the GPU, in CUDA graphs and as single launches.

    python -m mega_moe.bench.route [--tokens N] [--top-k K] [--experts E] [--ranks 1,8] [--json FILE]

Ranks that share a GPU have an even part of its SMs and one stream each; a row's time is that of a call of all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.memory import Shape, of_virtual_ranks, symmetric_layout
from mega_moe._ops import library
from mega_moe.bench.rows import write_rows
from mega_moe.testing.tables import plain_tables

LAUNCHES = 20  # in a graph
REPEATS = 30
INPUT_SETS = 4  # ids differ from launch to launch
_LIMIT = 20.0  # seconds that a launch waits for the others


@dataclass(frozen=True)
class RouteRow:
    """Microseconds of one call of all ranks: ``single`` one launch between events, ``graph`` one of many in a row."""

    tokens: int
    top_k: int
    num_experts: int
    num_ranks: int
    num_sms: int
    routing: str
    weighted: bool
    graph_us: float
    graph_us_all: tuple[float, ...]
    single_us: float


class _Ranks:
    """Routers, streams and inputs of ranks that share a GPU."""

    def __init__(self, shape: Shape, routing: str, weighted: bool, device: torch.device) -> None:
        self.shape, self.device = shape, device
        everything = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_sms = everything // shape.num_ranks
        ranks = range(shape.num_ranks)
        parts = of_virtual_ranks(symmetric_layout(shape).total, device, shape.num_ranks)
        self.routers = [
            KernelRank(
                shape,
                rank,
                parts[rank],
                num_sms=self.num_sms,
                arrival_timeout=_LIMIT,
                progress_timeout=_LIMIT,
                lane=rank,
            )
            for rank in ranks
        ]
        self.streams = [torch.cuda.Stream(device) for _ in ranks]
        self.ids = [[_ids(routing, shape, device) for _ in ranks] for _ in range(INPUT_SETS)]
        weights = [torch.rand(shape.max_tokens, shape.top_k, device=device) for _ in ranks]
        self.weights: Sequence[Tensor | None] = weights if weighted else [None] * shape.num_ranks
        self.warm()

    def warm(self) -> None:
        # An allocation between launches that wait for one another could wait for them.
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.empty(1, device=self.device)
        torch.cuda.synchronize(self.device)

    def launch(self, rank: int, index: int) -> Tensor:
        ids = self.ids[index % INPUT_SETS][rank]
        return self.routers[rank].route(ids, self.weights[rank]).tokens_per_expert

    def between_events(self, work: Callable[[int], object]) -> float:
        """Microseconds from before to after ``work(rank)`` on every rank's stream."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        outer = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        # Keeps the device busy until all launches are queued, so that the host's time is not measured.
        torch.cuda._sleep(2_000_000)
        begin.record(outer)
        for stream in self.streams:
            stream.wait_stream(outer)
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                work(rank)
        for stream in self.streams:
            outer.wait_stream(stream)
        end.record(outer)
        torch.cuda.synchronize(self.device)
        return 1e3 * float(begin.elapsed_time(end))

    def check(self) -> None:
        """The last call's counts against sorts."""
        torch.cuda.synchronize(self.device)
        got = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                got.append(self.launch(rank, 0))
        torch.cuda.synchronize(self.device)
        for rank, counts in enumerate(got):
            want = plain_tables(self.ids[0], rank, self.shape.num_experts, *self.shape.chunk_limits())
            if not torch.equal(counts, want.counts[: len(counts)]):
                raise RuntimeError(f"rank {rank}: tokens per expert differ from a sort's after the timing")
            self.routers[rank].check()


def _ids(routing: str, shape: Shape, device: torch.device) -> Tensor:
    if routing == "one expert":
        return torch.zeros(shape.max_tokens, shape.top_k, dtype=torch.int64, device=device)
    return torch.rand(shape.max_tokens, shape.num_experts, device=device).topk(shape.top_k, dim=1).indices


def measure_route(shape: Shape, routing: str, weighted: bool, device: torch.device) -> RouteRow:
    """One row; raises when the counts are wrong afterwards."""
    ranks = _Ranks(shape, routing, weighted, device)
    ranks.check()  # also loads the kernel, which must not happen while one waits for another
    graphs = [torch.cuda.CUDAGraph() for _ in ranks.streams]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for index in range(LAUNCHES):
                ranks.launch(rank, index)
    ranks.warm()
    times = [ranks.between_events(lambda rank: graphs[rank].replay()) / LAUNCHES for _ in range(REPEATS)]
    single = [ranks.between_events(lambda rank, i=i: ranks.launch(rank, i)) for i in range(REPEATS)]  # type: ignore[misc]
    ranks.check()
    return RouteRow(
        shape.max_tokens,
        shape.top_k,
        shape.num_experts,
        shape.num_ranks,
        ranks.num_sms,
        routing,
        weighted,
        statistics.median(times[3:]),
        tuple(round(time, 2) for time in times),
        statistics.median(single[3:]),
    )


def main(argv: list[str] | None = None) -> int:
    words = argparse.ArgumentParser(prog="python -m mega_moe.bench.route", description=__doc__)
    words.add_argument("--tokens", default="16384", help="per rank, separated by commas (default: 16384)")
    words.add_argument("--top-k", type=int, default=8)
    words.add_argument("--experts", default="128", help="separated by commas (default: 128)")
    words.add_argument("--ranks", default="1,8", help="separated by commas (default: 1,8)")
    words.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    given = words.parse_args(argv)
    # Streams that share a hardware queue would hold back a launch that another waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    library.require()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for num_ranks in map(int, given.ranks.split(",")):
        for experts in map(int, given.experts.split(",")):
            for tokens in map(int, given.tokens.split(",")):
                for routing, weighted in (("random", True), ("random", False), ("one expert", True)):
                    shape = Shape(tokens, given.top_k, experts, 128, num_ranks)
                    row = measure_route(shape, routing, weighted, device)
                    rows.append(row)
                    print(
                        f"ranks {row.num_ranks} x {row.num_sms} SMs, {row.tokens} tokens, top {row.top_k} of "
                        f"{row.num_experts}, {row.routing}, weights {row.weighted}: "
                        f"graph {row.graph_us:.2f} us, single {row.single_us:.2f} us",
                        flush=True,
                    )
    if given.json is not None:
        write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
