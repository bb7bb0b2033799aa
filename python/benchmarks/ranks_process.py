"""Programs under a hard limit: output into a file, and the end of a whole tree of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
GRACE_S = 5.0  # torchrun ends its ranks in this time, or they are killed here


@dataclass(frozen=True)
class Ended:
    """`code` is None for a program that was ended here; `reason` then says why."""

    code: int | None
    seconds: float
    reason: str | None


def run(
    command: Sequence[str | Path],
    output: Path,
    limit_s: float,
    *,
    env: Mapping[str, str] | None = None,
    stalled: Callable[[], str | None] = lambda: None,
) -> Ended:
    """Runs `command` with its output appended to `output`; after `limit_s`, or when `stalled` gives a reason, ends it.

    Whatever the program has started is ended with it, in sessions of its own too, as torchrun's ranks are.
    """
    start = time.monotonic()
    with output.open("ab") as sink:
        program = subprocess.Popen(
            [str(word) for word in command],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
        reason = None
        try:
            while program.poll() is None:
                time.sleep(POLL_S)
                reason = stalled()
                if reason is None and time.monotonic() - start > limit_s:
                    reason = f"no end within {limit_s:.0f} s"
                if reason is not None:
                    break
        finally:
            # Also on an interrupt: nothing may go on using the devices.
            if program.poll() is None:
                end_tree(program)
    seconds = time.monotonic() - start
    return Ended(None if reason else program.returncode, seconds, reason)


def end_tree(program: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Asks the program to end, then kills it and each process below it that is still there."""
    known = tree(program.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while time.monotonic() < end and (program.poll() is None or any(map(alive, known.items()))):
        time.sleep(POLL_S)
        known |= tree(program.pid)
    for process in known.items():
        if alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGKILL)
    program.wait()
    # What comes next wants the devices, which a killed process holds until it is gone.
    end = time.monotonic() + grace_s
    while time.monotonic() < end and any(map(alive, known.items())):
        time.sleep(POLL_S)


def tree(root: int) -> dict[int, str]:
    """The processes below `root`, itself included: when each started by its number, which may be given out again."""
    parents, starts = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; the fields after the last one do not.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], starts[int(folder.name)] = int(fields[1]), fields[19]
    found = {root} & starts.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: starts[pid] for pid in found}


def alive(process: tuple[int, str]) -> bool:
    """Whether this very process runs; one that has ended and only waits to be asked for does not."""
    try:
        fields = Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == process[1] and fields[0] != "Z"
