"""`mega-moe bench --trace OUT`: record one call of a fused kernel, sum it up, and write it for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mega_moe._backends.choice import facts
from mega_moe.bench.environment import describe
from mega_moe.bench.kernel_ranks import KernelRanks, Options, why_not
from mega_moe.bench.ranks import Context
from mega_moe.bench.trace_events import ROLES, WORDS, Trace, read
from mega_moe.bench.trace_output import summary, write_chrome

FIRST_ROWS = 512  # of a lane; twice as many whenever one was full
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Recorded:
    """The trace of one call, and us from before to after all launches of a call."""

    trace: Trace
    ranks: KernelRanks
    plain_us: float  # of the kernel that users run
    traced_us: float


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
    return Recorded(read(arrays), ranks, plain_us, traced_us)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def run(options: Options, out: Path, context: Context) -> None:
    """Prints the summary and writes OUT.json.

    Raises ValueError when the folder is missing, and with every reason where no trace can be recorded.
    """
    if not out.name or not out.absolute().parent.is_dir():
        raise ValueError(f"trace: got {out}, wanted the beginning of a file name in a folder that exists")
    if context.num_ranks > 1:
        raise ValueError(
            f"trace: got {context.num_ranks} processes, wanted one; --virtual-ranks plays several ranks on its GPU"
        )
    if reasons := why_no_trace(options, context.device):
        raise ValueError(f"trace: no trace can be recorded here: {'; '.join(reasons)}")
    recorded = record(options, context.device)
    environment = describe(context, None)
    title = _title(options, recorded, environment.device)
    print(title)
    print(summary(recorded.trace), end="")
    file = out.with_name(out.name + ".json")
    notes = {"layer": title, "date": environment.date, "driver": environment.driver}
    notes |= {"torch": environment.torch, "kernels_sha256": environment.kernels_sha256}
    write_chrome(recorded.trace, file, notes)
    print(f"written: {file}")


def _title(options: Options, recorded: Recorded, device: str) -> str:
    return (
        f"{options.shape.name} {options.precision} {options.direction}, "
        f"T={options.tokens} x {options.num_ranks} ranks of {recorded.ranks.num_sms} SMs, {device}: "
        f"{recorded.plain_us:.1f} us, traced {recorded.traced_us:.1f} us"
    )
