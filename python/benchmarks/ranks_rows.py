"""One rank of the measuring program that ranks.py starts: ceilings, then layers, each row written as it comes.

    torchrun --nproc-per-node N python/benchmarks/ranks_rows.py JOB EVENTS

JOB is the JSON object that ranks_run.py writes. Rank 0 appends JSON objects to EVENTS, one a line, which
ranks_events.py reads.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import gc
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mega_moe._ops import library
from mega_moe.bench.ceilings import ceilings, measure_ceiling
from mega_moe.bench.clocks import make_clock
from mega_moe.bench.environment import describe
from mega_moe.bench.layer import LayerOptions, measure_layer
from mega_moe.bench.problem import Problem, random_problem
from mega_moe.bench.protocols import PROTOCOLS, CudaTimer, HostTimer, Timer
from mega_moe.bench.ranks import Context, first_line, joined
from mega_moe.bench.schema import LayerRow, Outcome, Row, plain
from mega_moe.bench.shapes import find_shape


def main(job: dict[str, Any], events: Path) -> int:
    # A rank that is ended because it hangs says where it was.
    faulthandler.register(signal.SIGTERM, chain=True)
    with joined(job["device"]) as context:
        measure_all(job, Events(events, context.rank == 0), context)
    return 0


class Events:
    """Lines that outlive this process, whatever ends it; only rank 0 writes."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._writes = path, writes

    def tell(self, kind: str, **what: Any) -> None:
        if self._writes:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"event": kind, **what}) + "\n")

    def row(self, row: Row) -> None:
        self.tell("row", row=plain(row))


def measure_all(job: dict[str, Any], events: Events, context: Context) -> None:
    """All that `job` names, in its order, until its deadline. Collective over the ranks."""
    clock = make_clock(context.device, library.status().reason)
    on_gpu = context.device.type == "cuda"
    timer: Timer = CudaTimer(context.device, clock) if on_gpu else HostTimer(clock.reason)
    quick = tuple(protocol.quick() for protocol in PROTOCOLS.values())
    full = quick if job["quick"] else tuple(PROTOCOLS.values())
    dtype = torch.bfloat16 if on_gpu else torch.float32
    wheel = Path(job["wheel"]) if job["wheel"] else None
    events.tell("environment", environment=plain(describe(context, wheel)))
    rates = {(protocol, name): rate for protocol, name, rate in job["rates"]}
    if not rates:
        for ceiling in ceilings(context.device.type, str(dtype).removeprefix("torch.")):
            for row in measure_ceiling(ceiling, full, timer, context):
                events.row(row)
                if row.outcome.timing is not None and row.rate is not None and row.unit == "TF/s":
                    rates[row.outcome.timing.protocol, row.name] = row.rate
    problems = functools.lru_cache(maxsize=1)(functools.partial(_problem, dtype=dtype, context=context))
    for case in job["cases"]:
        late = time.time() + case["seconds"] > job["deadline"]
        if context.maximum(float(late)):
            events.tell("left out", case=case["name"])
            continue
        lost = _lost(case, dtype, context)
        events.tell("begin", case=case["name"], lost=plain(lost))
        protocols = quick if case["quick"] else full
        for layer_row in _rows(case, lost, problems, protocols, timer, context, rates):
            events.row(layer_row)
        events.tell("end", case=case["name"])


def _problem(shape: str, tokens: int, skew: float | None, *, dtype: torch.dtype, context: Context) -> Problem:
    gc.collect()
    return random_problem(find_shape(shape), tokens, dtype, context, skew=skew)


def _rows(
    case: dict[str, Any],
    lost: LayerRow,
    problems: Any,
    protocols: Any,
    timer: Timer,
    context: Context,
    rates: dict[tuple[str, str], float],
) -> Iterator[LayerRow]:
    reason = None
    try:
        problem = problems(case["shape"], case["tokens"], case["skew"])
    except RuntimeError as error:  # out of memory: this row's failure, not the run's
        reason = first_line(error)
    reason = context.first_reason(reason)
    if reason is not None:
        yield dataclasses.replace(lost, outcome=Outcome("failed", (reason,), None))
        return
    options = LayerOptions(
        case["precision"],
        (case["backend"],),
        tuple(case["directions"]),
        None,
        # As all calls of a step but its first.
        reuse_weight_copies=True,
        dw_precision=case["dw_precision"],
        reserved_sms=(case["reserved_sms"],),
    )
    yield from measure_layer(problem, options, protocols, timer, context, product_rates=rates)


def _lost(case: dict[str, Any], dtype: torch.dtype, context: Context) -> LayerRow:
    """The row that stands for a case without figures; who reads the events knows the reason."""
    shape = find_shape(case["shape"])
    return LayerRow(
        kind="layer",
        shape=shape.name,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        tokens=case["tokens"],
        num_ranks=context.num_ranks,
        backend=case["backend"],
        precision=case["precision"],
        dtype=str(dtype).removeprefix("torch."),
        direction="all",
        dw_dtype=None,
        reserved_sms=None,
        flops=None,
        flop_rule=None,
        tflops=None,
        percent_of_ceiling=None,
        peak_bytes=None,
        relative_error=None,
        outcome=Outcome("failed", ("unknown",), None),
        skew=case["skew"],
        dw_precision="fp8" if case["dw_precision"] == "fp8" else None,
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])))
