"""``python -m mega_moe.deep_gemm script.py args``: run a trainer that imports deep_gemm on this library.

Without a script it says which of the calls this device serves.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mega_moe.deep_gemm.installing import install, serves
from mega_moe.deep_gemm.symm_buffer import MMA_TYPES

_USAGE = "usage: python -m mega_moe.deep_gemm SCRIPT [arguments]   or   ... -m MODULE [arguments]"


def main(words: list[str]) -> int:
    """Install the face, then run the script or module as Python would, with ``sys.argv`` as it expects it."""
    module = words[:1] == ["-m"]
    rest = words[1:] if module else words
    if not rest or (rest[0].startswith("-") and not module):
        print(_USAGE, *(_report() if not words else ()), sep="\n", file=sys.stderr)
        return 2
    install()
    sys.argv = rest
    if module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        # As the interpreter does it: the script's own folder comes first.
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")
    return 0


def _report() -> list[str]:
    """A line for each mma_type."""
    verdicts = ((mma_type, serves(precision)) for mma_type, precision in MMA_TYPES.items())
    return [
        f"{mma_type}: {'not on the fused kernels: ' + '; '.join(reasons) if reasons else 'served by the fused kernels'}"
        for mma_type, reasons in verdicts
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
