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
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USAGE = re.compile(
    r"Function properties for (?P<kernel>\S+)\s+(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
ENTRY = re.compile(r"Compiling entry function '(\S+)'")
REGISTERS = re.compile(r"Used (\d+) registers")
REMARK = re.compile(r"^.*\(?C75\d\d\)?.*$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    kernel: str
    stack: int
    stores: int
    loads: int


def usages(log: str) -> list[Usage]:
    """Memory that ptxas says each kernel takes besides registers."""
    return [
        Usage(match["kernel"], int(match["stack"]), int(match["stores"]), int(match["loads"]))
        for match in USAGE.finditer(log)
    ]


def problems(name: str, budget: int, log: str | None) -> list[str]:
    """What is wrong with one variant's log; empty when it passes."""
    if log is None:
        return [f"{name}: no log, want what ptxas said"]
    found = usages(log)
    if not found:
        return [f"{name}: the log reports no kernel, want one at least (compiled without -Xptxas=-v?)"]
    wrong = [
        f"{name}: {kind} of {usage.kernel} is {got} bytes, budget {budget} (spill_bytes in variants.toml)"
        for usage in found
        for kind, got in (
            ("stack frame", usage.stack),
            ("spill stores", usage.stores),
            ("spill loads", usage.loads),
        )
        if got > budget
    ]
    wrong += [f"{name}: {remark.strip()}" for remark in REMARK.findall(log)]
    return wrong


def main(variants: Path, folder: Path, kernels: Path) -> int:
    wrong: list[str] = []
    names: dict[str, list[str]] = {}
    for variant in tomllib.loads(variants.read_text())["variant"]:
        path = folder / f"{variant['name']}.log"
        log = path.read_text() if path.is_file() else None
        found = problems(variant["name"], variant["spill_bytes"], log)
        wrong += found
        if not found and log:
            names[variant["name"]] = ENTRY.findall(log)
            print(
                f"check_ptxas: {variant['name']}: {'/'.join(REGISTERS.findall(log))} registers, within its budget"
            )
    for line in wrong:
        print(f"check_ptxas: {line}", file=sys.stderr)
    if not wrong:
        kernels.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
