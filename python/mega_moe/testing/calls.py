"""Count what reaches a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mega_moe._ops.layer import CALLS


@contextmanager
def count_op_calls() -> Iterator[Counter[str]]:
    """A counter of the calls ('run', 'backward') of the lowest operators inside the block; filled when it ends."""
    before = CALLS.copy()
    counted: Counter[str] = Counter()
    try:
        yield counted
    finally:
        counted.update(CALLS - before)
