"""Refuses C++ includes that the build would take and the layers do not allow.

    python ci/check_layers.py [KERNELS_FOLDER]

The build gives each layer only the include folders that it may use, so a forbidden include of binding/ or host/ does
not compile. What compiles all the same is refused here: device/, layout/ and include/ reaching up or out, the order
within device/, the tensor core of one architecture elsewhere, torch's unstable headers, relative paths, and cycles.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
# From the top: what a folder may include is itself and all below it. Those on one line do not know each other.
ORDER = (
    "device/kernel",
    "device/sm",  # sm90 and its like
    "device/combine device/dispatch",
    "device/quantize device/schedule",
    "device/route",
    "device/comm",
    "device/common",
    "device/ptx",
    "layout",
)
# Plain words of a call, without a struct of the contract between binding/ and host/: every layer may see them.
WORDS = {"mega_moe/activation.h", "mega_moe/limits.h", "mega_moe/mode.h"}
TENSOR_CORE = {"device/ptx/wgmma": "device/sm90"}  # a header's prefix, and the other folder that may see it
UNSTABLE = re.compile(
    r"(?:ATen|c10|pybind11)/|Python\.h|torch/(?!csrc/(?:stable|inductor/aoti_torch/c)/|headeronly/)"
)


def folder_of(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "device" else parts[0]


def level_of(folder: str) -> int | None:
    folder = re.sub(r"sm\d+$", "sm", folder)
    return next((level for level, names in enumerate(ORDER) if folder in names.split()), None)


def fault_of(path: str, quote: str, name: str) -> str | None:
    if quote == '"' and "../" in name:
        return "a relative path"
    if quote == "<" and UNSTABLE.match(name):
        return "not of torch's stable ABI"
    own, other = folder_of(path), folder_of(name)
    if own.split("/")[0] not in {"device", "include", "layout"} or name in WORDS:
        return None
    if quote == "<":
        return None if re.fullmatch(r"[a-z_]+", name) else f"{own} may see the standard library alone"
    if own == "include":
        return None if name.startswith("mega_moe/") else f"{own} may not know {other}"
    if (level := level_of(own)) is None:
        return f"{own} has no place in the order {ORDER}"
    below = level_of(other)
    if below is None or below < level or (below == level and other != own):
        return f"{own} may not know {other}"
    for prefix, owner in TENSOR_CORE.items():
        if name.startswith(prefix) and own not in {owner, other}:
            return f"{own} may not know the tensor core of {owner}"
    return None


def check(kernels: Path) -> list[str]:
    """One line per fault below the folder; a folder without sources is one too."""
    files = sorted(
        path for path in kernels.rglob("*.*") if path.suffix in {".h", ".cuh", ".cpp", ".cu", ".inc"}
    )
    graph, faults = {}, [] if files else [f"{kernels}: no sources"]
    for file in files:
        path = file.relative_to(kernels).as_posix()
        found = INCLUDE.findall(file.read_text())
        graph[path.removeprefix("include/")] = [name for quote, name in found if quote == '"']
        faults += [f"{path}: {name}: {why}" for quote, name in found if (why := fault_of(path, quote, name))]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append(f"cycle: {' -> '.join(error.args[1])}")
    return faults


def main(arguments: list[str]) -> int:
    faults = check(Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / "kernels")
    print(*faults, f"check_layers: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
