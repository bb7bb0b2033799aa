"""The machine code of a wheel's kernels, by which published benchmark rows are judged: one sha256 per variant.

Of the instructions alone. Addresses, encodings, names and offsets into constant bank 0, where the parameters lie, do
not count: the same code under another name or behind another parameter has the same hash. Needs cuobjdump and nvdisasm
and takes tens of seconds, so finish_wheel does it once and writes the hashes into the wheel.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

TOOLS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
FUNCTION = re.compile(r"\s*Function : (\S+)")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\*")
NOT_CODE = (
    (re.compile(r"(c\[0x0\]\[[^]]*?)\+?0x[0-9a-f]+\]"), r"\1]"),
    (re.compile(r"\b_Z\w+"), "_Z"),
    (re.compile(r"\s+"), " "),
)


def tool(name: str) -> str:
    """Path of a program: of NVIDIA's packages, alongside this Python, or on PATH."""
    places = [str(TOOLS), sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(f"{name}: not found in {places}; it comes with the dependency group repair")
    return found


def instructions(listing: str) -> dict[str, list[str]]:
    """What counts of a listing by `cuobjdump -sass`, by mangled name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            lines = found.setdefault(match[1], [])
        elif match := INSTRUCTION.match(line):
            text = match[1]
            for pattern, kept in NOT_CODE:
                text = pattern.sub(kept, text)
            lines.append(text)
    return found


def hashes(listing: str, kernels: Mapping[str, list[str]]) -> dict[str, str]:
    """Hex sha256 of each variant's code; ``kernels``: the mangled names of each variant, in the order that counts.

    Raises ValueError where listing and names do not cover each other.
    """
    code = instructions(listing)
    named = sorted(name for names in kernels.values() for name in names)
    if named != sorted(code) or not all(kernels.values()) or not all(code.values()):
        got = {name: len(lines) for name, lines in code.items()}
        raise ValueError(f"machine code: got instructions {got}, wanted some of each of {dict(kernels)}")
    return {
        variant: hashlib.sha256("\n".join(line for name in names for line in code[name]).encode()).hexdigest()
        for variant, names in sorted(kernels.items())
    }


def of_library(library: Path, kernels: Mapping[str, list[str]]) -> dict[str, str]:
    """As `hashes`, of a compiled library; ValueError where it cannot be disassembled."""
    # cuobjdump starts nvdisasm from PATH.
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    run = subprocess.run(
        [tool("cuobjdump"), "-sass", library],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": path},
    )
    if run.returncode:
        raise ValueError(f"cuobjdump -sass {library.name}: {(run.stderr or run.stdout).strip()[-300:]}")
    return hashes(run.stdout, kernels)
