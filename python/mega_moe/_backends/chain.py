"""Launches that wait inside the kernel run one after another per device, in host order, whatever their streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

# (device, rank that one process plays there): the last launch. Virtual ranks of one device must run at once.
_last: dict[tuple[int, int], tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def in_order(device: torch.device, lane: int = 0) -> Iterator[None]:
    """Around one launch on the current stream of ``device``. In a capture the graph alone orders its launches."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    stream = torch.cuda.current_stream(device)
    key = (device.index or 0, lane)
    with _lock:
        before = _last.get(key)
        if before is not None and before[0] != stream:
            stream.wait_event(before[1])
        yield
        event = torch.cuda.Event() if before is None else before[1]
        event.record(stream)
        _last[key] = (stream, event)
