"""`mega-moe bench --trace OUT`: record one call of a fused kernel, sum it up, write it for Perfetto, and draw it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mega_moe.bench import trace_chrome, trace_draw
from mega_moe.bench.environment import describe
from mega_moe.bench.kernel_ranks import Options
from mega_moe.bench.ranks import Context
from mega_moe.bench.trace_check import order_faults, tile_faults
from mega_moe.bench.trace_run import Recorded, record, why_no_trace
from mega_moe.bench.trace_summary import summarise
from mega_moe.bench.trace_table import render

_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class Files:
    """Where the trace goes: OUT.json and OUT.png."""

    json: Path
    png: Path

    @classmethod
    def of(cls, out: Path) -> Files:
        """Raises ValueError when the folder is missing."""
        if not out.name or not out.absolute().parent.is_dir():
            raise ValueError(f"trace: got {out}, wanted the beginning of a file name in a folder that exists")
        return cls(out.with_name(out.name + ".json"), out.with_name(out.name + ".png"))


def run(options: Options, files: Files, context: Context) -> int:
    """Prints the summary and writes the files; 1 when the trace is not that of a right schedule, else 0.

    Raises ValueError with every reason where no trace can be recorded.
    """
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
    print(render(summarise(recorded.trace)), end="")
    faults = _judge(recorded)
    trace_chrome.write(
        recorded.trace,
        files.json,
        {
            "layer": title,
            "date": environment.date,
            "driver": environment.driver,
            "torch": environment.torch,
            "kernels_sha256": environment.kernels_sha256,
        },
    )
    print(f"written: {files.json}")
    if reason := trace_draw.missing_reason():
        print(f"not drawn: {reason}", file=sys.stderr)
    else:
        trace_draw.draw(recorded.trace, files.png, title)
        print(f"written: {files.png}")
    return 1 if faults else 0


def _title(options: Options, recorded: Recorded, device: str) -> str:
    return (
        f"{options.shape.name} {options.precision} {options.direction}, "
        f"T={options.tokens} x {options.num_ranks} ranks of {recorded.num_sms} SMs, {device}: "
        f"{recorded.plain_us:.1f} us, traced {recorded.traced_us:.1f} us"
    )


def _judge(recorded: Recorded) -> list[str]:
    """Prints whether the schedule was right -> its faults."""
    if recorded.trace.full_lanes:
        print("schedule: not judged, since events were dropped")
        return []
    wanted = recorded.wanted
    faults = [*tile_faults(recorded.trace, wanted.tiles), *order_faults(recorded.trace, wanted.whole)]
    if not faults:
        print(f"schedule: right, each of {wanted.products()} products once and after what it reads")
        return []
    print(f"schedule: {len(faults)} faults, the first of them")
    print(*(f"  {fault}" for fault in faults[:_SHOWN_FAULTS]), sep="\n")
    return faults
