"""A script of this folder as the ranks of one host, under a limit that holds for the ranks too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Longer than a script takes, short enough that one that hangs leaves time for the rest of a run.
LIMIT_S = 75.0
# torchrun ends its ranks when it is asked to, and kills them after 30 s; killed itself it would leave them running.
ENDING_S = 40.0


def check_ranks(script: str, said: str, count: int) -> None:
    """`count` ranks of `script` succeed, and each says so."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    program = subprocess.Popen(
        [*launch, str(Path(__file__).with_name(script))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = program.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        program.terminate()
        output, _ = program.communicate(timeout=ENDING_S)
        raise AssertionError(f"{script}: no end within {LIMIT_S:.0f} s\n{output}") from None
    assert program.returncode == 0, output
    assert output.count(said) == count, output


def most_ranks(num_devices: int) -> int:
    return next(size for size in (8, 4, 2) if size <= num_devices)
