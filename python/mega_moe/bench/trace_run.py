"""A fused kernel in its tracing form: one rank, or several that share the GPU, each with a part of its SMs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mega_moe._backends.choice import facts
from mega_moe.bench.kernel_ranks import KernelRanks, Options, why_not
from mega_moe.bench.trace_events import Trace, read
from mega_moe.bench.trace_kinds import ROLES, WORDS
from mega_moe.bench.trace_tiles import Wanted, of_backward, of_forward
from mega_moe.testing.tables import plain_tables

FIRST_ROWS = 512  # of a lane; twice as many whenever one was full
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Recorded:
    """The trace of one call, what it must show, and us from before to after all launches of a call."""

    trace: Trace
    wanted: Wanted
    plain_us: float  # of the kernel that users run
    traced_us: float
    num_sms: int  # of each rank


def why_no_trace(options: Options, device: torch.device) -> list[str]:
    """Every reason against a trace on this device; empty where one can be recorded."""
    reasons = why_not(options, device)
    known = facts.collect(device)
    if device.type == "cuda" and known.library_loaded:
        serving = "{}{}".format(*(known.compute_capability or (0, 0)))
        wanted = (options.direction, options.kernel_precision)
        tracing = (v for v in known.variants if v.trace and (v.op, v.precision) == wanted)
        if not any(variant.architecture.rstrip("af") == serving for variant in tracing):
            reasons.append(
                f"this wheel holds no tracing variant of the {options.kernel_precision} {options.direction} kernel for "
                f"sm_{serving}"
            )
    return reasons


def record(options: Options, device: torch.device) -> Recorded:
    """Launches the kernel plain and traced, each once warm and once measured, and reads the events.

    Raises RuntimeError when the traced kernel's results differ from the plain one's.
    """
    ranks = KernelRanks(options, device)
    want = ranks.launch(None)
    plain_us = ranks.timed(None)
    rows = FIRST_ROWS
    while True:
        arrays = [
            torch.zeros(ranks.num_sms, len(ROLES), rows, WORDS, dtype=torch.int64, device=device)
            for _ in range(options.num_ranks)
        ]
        got = ranks.launch(arrays)
        trace = read(arrays)
        if not trace.full_lanes or rows >= MOST_ROWS:
            break
        rows *= 2
    for rank, pairs in enumerate(zip(want, got, strict=True)):
        for plain, traced in zip(*pairs, strict=True):
            # As bits, in which NaN is equal to itself.
            if not torch.equal(_bits(plain), _bits(traced)):
                raise RuntimeError(f"rank {rank}: the traced kernel's results differ from the plain one's")
    for array in arrays:
        array.zero_()
    traced_us = ranks.timed(arrays)
    return Recorded(read(arrays), _wanted(options, ranks), plain_us, traced_us, ranks.num_sms)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def _wanted(options: Options, ranks: KernelRanks) -> Wanted:
    shape = options.shape
    ids = [inputs.layer.topk_idx for inputs in ranks.inputs]
    tables = [
        plain_tables(ids, rank, shape.num_experts, *kernels.shape.chunk_limits())
        for rank, kernels in enumerate(ranks.kernels)
    ]
    rows, slots = [t.expert_rows for t in tables], [t.expert_slots for t in tables]
    of_direction = of_forward if options.direction == "forward" else of_backward
    return of_direction(rows, slots, shape.hidden, shape.intermediate)
