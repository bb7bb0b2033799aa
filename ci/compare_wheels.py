"""Refuses two builds of the same sources that differ, and names the files in which they do.

python ci/compare_wheels.py WHEEL OTHER
"""

from __future__ import annotations

import sys
from pathlib import Path

import wheel_file


def differences(first: Path, second: Path) -> list[str]:
    """One line per difference; empty when the two are equal to the last byte."""
    if first.read_bytes() == second.read_bytes():
        return []
    one, other = wheel_file.read(first), wheel_file.read(second)
    found = [f"only in one: {name}" for name in sorted(one.keys() ^ other.keys())]
    found += [f"differs: {name}" for name in sorted(one.keys() & other.keys()) if one[name] != other[name]]
    return found or ["equal files, packed in another way (times, order, modes or compression)"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = differences(*map(Path, arguments))
    for line in found:
        print(f"compare_wheels: {line}", file=sys.stderr)
    if not found:
        print("compare_wheels: both are equal to the last byte")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
