"""Refuses C++ includes that go up, sideways where they must not, or out to headers that a layer may not know.

    python ci/check_layers.py [KERNELS_FOLDER]

The order, from the top: binding, include (the contract), then host and device side by side, which meet in layout alone.
Within device: kernel, the folder of one architecture, then what every architecture shares. The build gives each layer
only the include folders that it may use, so most of these would not compile; what nobody compiles, relative paths, the
order within device, the headers of the contract that everyone may see, and cycles are caught here alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".inc"}

# What the files of a layer may include of the project.
LAYERS: dict[str, set[str]] = {
    "binding": {"binding", "include"},
    "include": {"include"},
    "host": {"host", "include", "layout"},
    "device": {"device", "layout"},
    "layout": {"layout"},
    "tests": {"tests", "host", "include", "device", "layout"},
    "bench": {"bench", "include", "device", "layout"},
}
# Plain words of a call, without a struct of the contract: every layer may see them.
WORDS = {"mega_moe/activation.h", "mega_moe/limits.h", "mega_moe/mode.h"}
# Order within device/, highest first; those on one line do not know each other.
DEVICE_ORDER: list[set[str]] = [
    {"kernel"},
    {"sm"},  # sm90 and its like: what knows one architecture's tensor core
    {"combine", "dispatch"},
    {"quantize", "schedule"},
    {"route"},
    {"comm"},
    {"common"},
    {"ptx"},
]
ARCHITECTURE = re.compile(r"sm\d+")
# Headers of device/ptx/ that only the folder of an architecture may see, by prefix of the name.
TENSOR_CORE = {"wgmma": "sm90"}
# Headers from outside, by prefix, and the only layers that may see them. The standard library's have no suffix.
FOREIGN: dict[str, set[str]] = {
    "torch/": {"binding"},
    "ATen/": set(),
    "c10/": set(),
    "pybind11/": set(),
    "Python.h": set(),
    "cuda_runtime_api.h": {"host", "tests", "bench"},
    "cuda.h": {"host", "bench"},
    "ucontext.h": {"tests"},
}
# Written by the build, not in the tree.
GENERATED = {"host/variant_table.inc", "host/build_json.inc"}


def sources(kernels: Path) -> list[Path]:
    return sorted(
        path.relative_to(kernels)
        for layer in LAYERS
        for path in (kernels / layer).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )


def include_name(path: Path) -> str:
    """The text by which others include a file: include/mega_moe/x.h is "mega_moe/x.h", tests/cpu/x.h is "cpu/x.h"."""
    return (
        path.relative_to(path.parts[0]).as_posix()
        if path.parts[0] in {"include", "tests"}
        else path.as_posix()
    )


def device_level(path: Path) -> int | None:
    folder = "sm" if ARCHITECTURE.fullmatch(path.parts[1]) else path.parts[1]
    for level, names in enumerate(DEVICE_ORDER):
        if folder in names:
            return level
    return None


def fault_of_foreign(layer: str, name: str) -> str | None:
    for prefix, allowed in FOREIGN.items():
        if name.startswith(prefix):
            return None if layer in allowed else f"only {sorted(allowed) or 'nobody'} may see it"
    return (
        None
        if re.fullmatch(r"[a-z_]+", name)
        else "not a header of the project, the standard library or the list here"
    )


def fault_of_internal(path: Path, target: Path) -> str | None:
    layer, wanted = path.parts[0], target.parts[0]
    if wanted not in LAYERS[layer] and include_name(target) not in WORDS:
        words = f" and of include/ {sorted(WORDS)}" if wanted == "include" else ""
        return f"{layer} may include {sorted(LAYERS[layer])} only{words}"
    if layer == wanted == "device":
        own, other = device_level(path), device_level(target)
        if own is None or other is None:
            return f"a folder of device/ without a place in the order {[sorted(names) for names in DEVICE_ORDER]}"
        if other < own or (other == own and path.parts[1] != target.parts[1]):
            return f"device/{path.parts[1]} may not know device/{target.parts[1]}"
        for prefix, owner in TENSOR_CORE.items():
            if (
                target.name.startswith(prefix)
                and target.parts[1] == "ptx"
                and path.parts[1] not in {owner, "ptx"}
            ):
                return f"device/{path.parts[1]} may not know the tensor core of {owner}"
    return None


def cycles(graph: dict[str, list[str]]) -> list[str]:
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for other in graph.get(name, []):
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def check(kernels: Path) -> list[str]:
    """One line per fault below the folder; a folder without sources is one too."""
    files = sources(kernels)
    if not files:
        return [f"{kernels}: no sources in {sorted(LAYERS)}"]
    by_name = {include_name(path): path for path in files}
    graph: dict[str, list[str]] = {}
    faults: list[str] = []
    for path in files:
        text = (kernels / path).read_text()
        for match in INCLUDE.finditer(text):
            quote, name = match.groups()
            place = f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {name}"
            if quote == "<":
                fault = fault_of_foreign(path.parts[0], name)
            elif name in GENERATED:
                fault = None if path.parts[0] in {"host", "tests"} else "only host may see it"
            elif name in by_name:
                fault = fault_of_internal(path, by_name[name])
                graph.setdefault(include_name(path), []).append(name)
            else:
                fault = "no such file, as seen from kernels/ (include/ and tests/ being roots)"
            if fault:
                faults.append(f"{place}: {fault}")
    return faults + [f"cycle: {cycle}" for cycle in cycles(graph)]


def main(arguments: list[str]) -> int:
    kernels = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / "kernels"
    faults = check(kernels)
    for fault in faults:
        print(f"check_layers: {fault}", file=sys.stderr)
    if not faults:
        print(f"check_layers: {len(sources(kernels))} sources, calls go down only")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
