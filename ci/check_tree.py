"""Refuse what must not lie in the tree: over-long files, left-over markers, words that tie it to one machine.

    python ci/check_tree.py [ROOT]

Reads every file that git tracks or would track, prints one line per fault and exits 1 when there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 500
# Not written by hand line by line, so its length says nothing about how many ideas it holds.
UNBOUNDED = re.compile(r"LICENSE|docs/api\.md|.*\.(?:json|svg)")

# Each pattern is written so that it does not match its own source.
FAULTS = {
    "left-over marker": re.compile(
        r"\b(?:TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b|^(?:<{7}|>{7}|={7})(?: |$)|\bbreakpoin[t]\("
    ),
    "path of one machine": re.compile(r"(?<![\w.}])/(?:home|root|work|Users)/\w"),
    "address of a package index": re.compile(
        r"https?://\S+/(?:simple|whl)\b|-(?:index|index-url|find-links)[= ]+https?:"
    ),
    "number of a tracker's entry": re.compile(
        r"(?<![\w&/])#[0-9]{1,6}\b|\b(?:issue|ticket|pull request)s? (?:no\. ?)?[0-9]+\b|/(?:issues|pull)/[0-9]",
        re.IGNORECASE,
    ),
}


def check_file(path: Path, name: str) -> list[str]:
    """The faults of one file, each as `name:line: what`. A file that is not UTF-8 text has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    faults = []
    if len(lines) > MAX_LINES and not UNBOUNDED.fullmatch(name):
        faults.append(f"{name}: {len(lines)} lines, at most {MAX_LINES} wanted: one idea a file")
    for number, line in enumerate(lines, 1):
        for what, pattern in FAULTS.items():
            if found := pattern.search(line):
                faults.append(f"{name}:{number}: {what}: {found.group().strip()!r}")
    return faults


def main(argv: list[str]) -> int:
    root = Path(argv[0] if argv else ".")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in sorted(listed.split("\0")) if (root / name).is_file()]
    faults = [fault for name in names for fault in check_file(root / name, name)]
    print(*faults, f"check_tree: {len(names)} files, {len(faults)} faults", sep="\n")
    return 1 if faults or not names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
