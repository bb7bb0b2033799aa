"""A trace in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mega_moe.bench.trace_events import Trace
from mega_moe.bench.trace_kinds import KINDS, ROLES, event_name

_ARGUMENTS = ("kind", "chunk", "expert", "index")


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
            "args": {"kind": number, "chunk": chunk, "expert": expert, "index": index},
        }


def write(trace: Trace, path: Path, notes: dict[str, Any]) -> None:
    """The trace as JSON; ``notes`` (text or numbers) say what was traced."""
    whole = {
        "ctas": trace.ctas,
        "num_ranks": trace.num_ranks,
        "full_lanes": trace.full_lanes,
        "malformed": trace.malformed,
    }
    document = {
        "displayTimeUnit": "ns",
        "otherData": {**notes, "trace": whole},
        "traceEvents": list(chrome_events(trace)),
    }
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[Trace, dict[str, Any]]:
    """What `write` was given. Raises ValueError for a file that it did not write."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        notes = document["otherData"]
        whole = notes.pop("trace")
        complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
        rows = [
            (event["pid"], event["tid"], *(event["args"][name] for name in _ARGUMENTS), *_times(event))
            for event in complete
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no trace of this tool: {error!r}") from error
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4 + len(_ARGUMENTS))
    cta, role, kind, chunk, expert, index, start, end = table.unbind(1)
    trace = Trace(
        cta=cta,
        role=role,
        kind=kind,
        chunk=chunk,
        expert=expert,
        index=index,
        start=start,
        end=end,
        ctas=tuple((rank, number) for rank, number in whole["ctas"]),
        num_ranks=whole["num_ranks"],
        full_lanes=tuple((rank, number, lane) for rank, number, lane in whole["full_lanes"]),
        malformed=whole["malformed"],
    )
    return trace, notes


def _times(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)


def _name(what: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
