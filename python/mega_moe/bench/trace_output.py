"""A trace for people: a short table, and a file in the Chrome trace event format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_moe.bench.table import columns
from mega_moe.bench.trace_events import KINDS, ROLES, TRAFFIC, State, Trace, event_name, kinds_in


def summary(trace: Trace) -> str:
    """How busy tensor cores and roles are, how much traffic runs during GEMMs, and the events of each kind."""
    ctas = len(trace.ctas)
    full = len(trace.full_lanes)
    dropped = f"unknown number in {full} full lanes, so the figures are too small" if full else "none"
    lines = [
        f"kernel {trace.span * 1e-3:.1f} us, ranks {trace.num_ranks}, CTAs {ctas}, events {len(trace)}",
        f"dropped events: {dropped}; malformed rows: {trace.malformed}",
    ]
    if not len(trace):
        return "\n".join(lines) + "\n"
    gemm = trace.where(kinds_in(State.GEMM))
    lines.append(f"tensor cores busy {_percent(trace, gemm):.1f} % of the kernel's time")
    for part in TRAFFIC:
        moving = trace.where(kinds_in(State.COPY, part))
        if bool(moving.any()):
            lines.append(f"CTAs in a GEMM during {part}: {_overlap(trace, moving, gemm):.1f} %")
    roles = [
        (name, *(f"{_percent(trace, trace.where(kinds_in(state), role)):.1f}" for state in State))
        for role, name in enumerate(ROLES)
    ]
    lines += ["", *columns([("role", *(f"{state.value} %" for state in State)), *roles])]
    kinds = []
    for kind in KINDS.values():
        times = (trace.end - trace.start)[trace.where([kind])].double() * 1e-3
        if len(times):
            kinds.append((kind.label, str(len(times)), f"{times.mean():.2f}", f"{times.max():.2f}"))
    lines += ["", *columns([("event", "count", "mean us", "longest us"), *kinds])]
    return "\n".join(lines) + "\n"


def _union(trace: Trace, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and ends of the time that some events cover in their CTA, overlaps merged."""
    # CTAs lie apart by more than the whole time, so that spans of two never meet.
    apart = trace.span + 1
    shift = trace.cta[mask] * apart
    start, order = (trace.start[mask] + shift).sort()
    end = (trace.end[mask] + shift)[order].cummax(0).values
    first = torch.ones_like(start, dtype=torch.bool)
    first[1:] = start[1:] > end[:-1]
    last = first.roll(-1)
    start, end = start[first], end[last]
    return start % apart, end - start // apart * apart


def _percent(trace: Trace, mask: Tensor) -> float:
    """Share of the kernel's time that some events cover, mean over the CTAs."""
    if not bool(mask.any()) or not trace.span:
        return 0.0
    start, end = _union(trace, mask)
    return 100 * int((end - start).sum()) / (trace.span * len(trace.ctas))


def _overlap(trace: Trace, during: Tensor, mask: Tensor) -> float:
    """Mean share of the CTAs that are in the events of `mask` while the events of `during` run, every lane counted."""
    if not bool(mask.any()):
        return 0.0
    start, end = _union(trace, mask)

    def covered(times: Tensor) -> Tensor:
        return _elapsed(start, times) - _elapsed(end, times)

    begins, ends = trace.start[during], trace.end[during]
    length = max(int((ends - begins).sum()), 1)
    return 100 * int((covered(ends) - covered(begins)).sum()) / (length * len(trace.ctas))


def _elapsed(points: Tensor, times: Tensor) -> Tensor:
    """For each time t the sum of t - p over the points p before it."""
    points = points.sort().values
    sums = torch.cat((points.new_zeros(1), points.cumsum(0)))
    count = torch.searchsorted(points, times)
    return count * times - sums[count]


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """One process per CTA, one thread per role; ``ts`` and ``dur`` in us from the first event."""
    for process, (rank, cta) in enumerate(trace.ctas):
        yield _name("process_name", process, name=f"rank {rank} CTA {cta}")
        yield _name("process_sort_index", process, sort_index=process)
        for thread, role in enumerate(ROLES):
            yield _name("thread_name", process, thread, name=role)
            yield _name("thread_sort_index", process, thread, sort_index=thread)
    fields = (
        trace.cta,
        trace.role,
        trace.kind,
        trace.chunk,
        trace.expert,
        trace.index,
        trace.start,
        trace.end,
    )
    for cta, role, number, chunk, expert, index, start, end in zip(*(column.tolist() for column in fields)):
        kind = KINDS[number]
        yield {
            "ph": "X",
            "name": event_name(kind, expert, index),
            "cat": f"{kind.part},{kind.state.value}",
            "pid": cta,
            "tid": role,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": {"kind": number, "chunk": chunk, "expert": expert, "index": index},
        }


def write_chrome(trace: Trace, path: Path, notes: dict[str, Any]) -> None:
    """The trace as JSON; ``notes`` (text or numbers) say what was traced."""
    document = {"displayTimeUnit": "ns", "otherData": notes, "traceEvents": list(chrome_events(trace))}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def _name(what: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
