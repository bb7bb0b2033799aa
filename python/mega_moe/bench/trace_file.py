"""A written trace: its summary and its picture, also where the machine of the GPU has no matplotlib.

    python -m mega_moe.bench.trace_file OUT.json

Prints the summary and draws OUT.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mega_moe.bench import trace_chrome, trace_draw
from mega_moe.bench.trace_summary import summarise
from mega_moe.bench.trace_table import render


def main(argv: list[str] | None = None) -> int:
    """0 when the picture was drawn, 1 without matplotlib, 2 for a file that is no trace."""
    words = argparse.ArgumentParser(prog="python -m mega_moe.bench.trace_file", description=__doc__)
    words.add_argument("file", type=Path, metavar="OUT.json")
    path = words.parse_args(argv).file
    try:
        trace, notes = trace_chrome.load(path)
    except (OSError, ValueError) as error:
        print(f"trace_file: {error}", file=sys.stderr)
        return 2
    print(notes.get("layer", path.name))
    print(render(summarise(trace)), end="")
    if reason := trace_draw.missing_reason():
        print(f"not drawn: {reason}", file=sys.stderr)
        return 1
    trace_draw.draw(trace, path.with_suffix(".png"), str(notes.get("layer", path.name)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
