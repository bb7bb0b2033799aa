"""Refuses C++ includes that go up, sideways where they must not, or out to headers that a layer may not know.

    python ci/check_layers.py [KERNELS_FOLDER]

The order, from the top: binding, include (the contract), then host and device side by side, which meet in layout alone.
The build gives each layer only the include folders that it may use; what compiles all the same is refused here: headers
that nothing compiles, relative paths, the order within device, torch's unstable headers, and cycles.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
# What the files of a layer may include of the project, and of headers from outside besides the standard library's.
LAYERS = {
    "binding": ({"binding", "include"}, r"torch/.*"),
    "include": ({"include"}, ""),
    "host": ({"host", "include", "layout"}, r"cuda_runtime_api\.h|cuda\.h"),
    "device": ({"device", "layout"}, ""),
    "layout": ({"layout"}, ""),
    "tests": ({"tests", "host", "include", "device", "layout"}, r"cuda_runtime_api\.h|ucontext\.h"),
    "bench": ({"bench", "include", "device", "layout"}, r"cuda_runtime_api\.h|cuda\.h"),
}
# Plain words of a call, without a struct of the contract: every layer may see them.
WORDS = {"mega_moe/activation.h", "mega_moe/limits.h", "mega_moe/mode.h"}
# Order within device/, highest first; those of one level do not know each other. sm: sm90 and its like.
DEVICE = ("kernel", "sm", "combine dispatch", "quantize schedule", "route", "comm", "common", "ptx")
# Headers of device/ptx/ that only the folder of an architecture may see, by prefix of the name.
TENSOR_CORE = {"wgmma": "sm90"}
GENERATED = {"host/variant_table.inc", "host/build_json.inc"}


def include_name(path: Path) -> str:
    """The text by which others include a file: include/mega_moe/x.h is "mega_moe/x.h", tests/cpu/x.h is "cpu/x.h"."""
    return Path(*path.parts[path.parts[0] in {"include", "tests"} :]).as_posix()


def device_level(path: Path) -> int:
    """Place in the order of DEVICE; ValueError where the folder has none."""
    name = re.sub(r"^sm\d+$", "sm", path.parts[1])
    levels = [level for level, names in enumerate(DEVICE) if name in names.split()]
    if not levels:
        raise ValueError(f"device/{path.parts[1]} has no place in the order {DEVICE}")
    return levels[0]


def fault_within_device(path: Path, target: Path) -> str | None:
    own, other = path.parts[1], target.parts[1]
    try:
        down = device_level(target) - device_level(path)
    except ValueError as error:
        return str(error)
    if down < 0 or (down == 0 and own != other):
        return f"device/{own} may not know device/{other}"
    for prefix, owner in TENSOR_CORE.items():
        if other == "ptx" and target.name.startswith(prefix) and own not in {owner, "ptx"}:
            return f"device/{own} may not know the tensor core of {owner}"
    return None


def fault_of(path: Path, quote: str, name: str, by_name: dict[str, Path]) -> str | None:
    layer = path.parts[0]
    known, foreign = LAYERS[layer]
    if quote == "<":
        fine = re.fullmatch(rf"[a-z_]+|{foreign}" if foreign else "[a-z_]+", name)
        return None if fine else f"{layer} may not see it"
    if name in GENERATED:
        return None if layer in {"host", "tests"} else "only host may see it"
    if name not in by_name:
        return "no such file, as seen from kernels/ (include/ and tests/ being roots)"
    target = by_name[name]
    if target.parts[0] not in known and name not in WORDS:
        return f"{layer} may include {sorted(known)} only, and {sorted(WORDS)}"
    return fault_within_device(path, target) if layer == target.parts[0] == "device" else None


def check(kernels: Path) -> list[str]:
    """One line per fault below the folder; a folder without sources is one too."""
    files = [
        path.relative_to(kernels)
        for layer in LAYERS
        for path in sorted((kernels / layer).rglob("*"))
        if path.suffix in {".h", ".cuh", ".cpp", ".cu", ".inc"}
    ]
    by_name = {include_name(path): path for path in files}
    graph, faults = {}, [] if files else [f"{kernels}: no sources"]
    for path in files:
        found = INCLUDE.findall((kernels / path).read_text())
        graph[include_name(path)] = [name for quote, name in found if quote == '"']
        for quote, name in found:
            if fault := fault_of(path, quote, name, by_name):
                faults.append(f"{path}: {name}: {fault}")
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
