"""Refuses kernels that spill more than their budget or that ptxas had to compile in a slow form.

    python ci/check_ptxas.py kernels/variants.toml LOG_FOLDER KERNELS

LOG_FOLDER holds one `<variant>.log` per variant with what `nvcc -Xptxas=-v` printed. A variant is refused when its
log is missing or reports no kernel, when spill stores, spill loads or the stack frame of any kernel exceed its
`spill_bytes`, or when the log holds a C75xx remark (wgmma serialised, setmaxnreg dropped).
When none is, the mangled names of each variant's kernels are written to the file KERNELS, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USAGE = re.compile(
    r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
ENTRY = re.compile(r"Compiling entry function '(\S+)'")
REGISTERS = re.compile(r"Used (\d+) registers")
REMARK = re.compile(r"^.*\(?C75\d\d\)?.*$", re.MULTILINE)


def problems(name: str, budget: int, log: str) -> list[str]:
    """What is wrong with one variant's log; empty when it passes."""
    found = USAGE.findall(log)
    wrong = [
        f"{name}: {kind} of {kernel} is {got} bytes, budget {budget} (spill_bytes in variants.toml)"
        for kernel, *usage in found
        for kind, got in zip(("stack frame", "spill stores", "spill loads"), usage)
        if int(got) > budget
    ]
    if not found:
        wrong.append(f"{name}: the log reports no kernel, want one at least (compiled without -Xptxas=-v?)")
    return wrong + [f"{name}: {remark.strip()}" for remark in REMARK.findall(log)]


def main(variants: Path, folder: Path, kernels: Path) -> int:
    wrong: list[str] = []
    names: dict[str, list[str]] = {}
    for variant in tomllib.loads(variants.read_text())["variant"]:
        name, path = variant["name"], folder / f"{variant['name']}.log"
        log = path.read_text() if path.is_file() else ""
        wrong += problems(name, variant["spill_bytes"], log)
        names[name] = ENTRY.findall(log)
        print(f"check_ptxas: {name}: {'/'.join(REGISTERS.findall(log))} registers")
    for line in wrong:
        print(f"check_ptxas: {line}", file=sys.stderr)
    if not wrong:
        kernels.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
