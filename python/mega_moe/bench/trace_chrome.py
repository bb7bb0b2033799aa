"""A trace in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mega_moe.bench.trace_events import Trace
from mega_moe.bench.trace_kinds import KINDS, ROLES, event_name


def chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """One process per CTA, one thread per role; ``ts`` and ``dur`` in us from the first event."""
    for process, (rank, cta) in enumerate(trace.ctas):
        yield _name("process_name", process, name=f"rank {rank} CTA {cta}")
        yield _name("process_sort_index", process, sort_index=process)
        for thread, role in enumerate(ROLES):
            yield _name("thread_name", process, thread, name=role)
            yield _name("thread_sort_index", process, thread, sort_index=thread)
    lists = (
        trace.cta,
        trace.role,
        trace.kind,
        trace.chunk,
        trace.expert,
        trace.index,
        trace.start,
        trace.end,
    )
    for cta, role, number, chunk, expert, index, start, end in zip(*(column.tolist() for column in lists)):
        kind = KINDS[number]
        yield {
            "ph": "X",
            "name": event_name(kind, expert, index),
            "cat": f"{kind.part},{kind.state.value}",
            "pid": cta,
            "tid": role,
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": {"chunk": chunk, "expert": expert, "index": index},
        }


def write(trace: Trace, path: Path, notes: dict[str, Any]) -> None:
    """The trace as JSON; ``notes`` (text or numbers) say what was traced."""
    document = {"displayTimeUnit": "ns", "otherData": notes, "traceEvents": list(chrome_events(trace))}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def _name(what: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
