"""Turns variants.toml into one source per compiled kernel and the table that the launcher selects from.

    python generate.py variants.toml OUT_DIR

Writes OUT_DIR/<architecture>/<name>.cu and OUT_DIR/table/host/variant_table.inc, touching only what changed, and prints
`<architecture>;<source>` per kernel for CMake.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kernel = dict[str, Any]

COMMON_KEYS = {"name": str, "op": str, "architecture": str, "precision": str, "spill_bytes": int}
OP_KEYS = {
    "stage": {"hidden_multiple": int, "threads": int, "vectors_per_thread": int, "blocks_per_sm": int},
    "clock_probe": {"threads": int},
}
PRECISIONS = {"bf16": "kBf16", "fp8": "kFp8", "none": "kNone"}
OPS = {"stage": "kStage", "clock_probe": "kClockProbe"}

INSTANCE = """\
// Generated from variants.toml.
#include "device/kernel/{header}"

namespace mega_moe {{
const void* kernel_{name}() {{ return reinterpret_cast<const void*>(&device::{kernel}); }}
}}  // namespace mega_moe
"""


def stage_instance(kernel: Kernel) -> str:
    quantise = "true" if kernel["precision"] == "fp8" else "false"
    config = f"{quantise}, {kernel['threads']}, {kernel['vectors_per_thread']}, {kernel['blocks_per_sm']}"
    return INSTANCE.format(
        header="sm90_stage.cuh", name=kernel["name"], kernel=f"sm90_stage<device::StageConfig<{config}>>"
    )


def clock_probe_instance(kernel: Kernel) -> str:
    return INSTANCE.format(header="clock_probe.cuh", name=kernel["name"], kernel="clock_probe")


INSTANCES: dict[str, Callable[[Kernel], str]] = {"stage": stage_instance, "clock_probe": clock_probe_instance}


def load_kernels(path: Path) -> list[Kernel]:
    """The kernels of variants.toml; ValueError names the kernel and key that is missing, unknown or of a wrong type."""
    kernels: list[Kernel] = tomllib.loads(path.read_text())["variant"]
    names = [kernel.get("name") for kernel in kernels]
    for kernel in kernels:
        name = kernel.get("name")
        if names.count(name) != 1:
            raise ValueError(f"{path.name}: name {name!r} occurs {names.count(name)} times, must be unique")
        if kernel.get("op") not in OP_KEYS:
            raise ValueError(
                f"{path.name}: {name}: op is {kernel.get('op')!r}, must be one of {sorted(OP_KEYS)}"
            )
        keys = COMMON_KEYS | OP_KEYS[kernel["op"]]
        if set(kernel) != set(keys):
            raise ValueError(f"{path.name}: {name}: keys are {sorted(kernel)}, must be {sorted(keys)}")
        for key, kind in keys.items():
            if type(kernel[key]) is not kind:
                raise ValueError(
                    f"{path.name}: {name}: {key} is {kernel[key]!r}, must be of type {kind.__name__}"
                )
        if kernel["precision"] not in PRECISIONS:
            raise ValueError(
                f"{path.name}: {name}: precision is {kernel['precision']!r}, must be one of {sorted(PRECISIONS)}"
            )
        # Family targets (100f) run on several compute capabilities; the selector compares exactly.
        if not re.fullmatch(r"\d{2,3}a", kernel["architecture"]):
            raise ValueError(
                f"{path.name}: {name}: architecture is {kernel['architecture']!r}, must be like '90a'"
            )
    return kernels


def table(kernels: list[Kernel]) -> str:
    """C++ declarations of the kernels and the constexpr array of `Variant` over them."""
    lines = ["// Generated from variants.toml."]
    lines += [f"const void* kernel_{kernel['name']}();" for kernel in kernels]
    lines += ["inline constexpr Variant kVariants[] = {"]
    for kernel in kernels:
        digits = kernel["architecture"][:-1]
        fields = [
            f'"{kernel["name"]}"',
            f"Op::{OPS[kernel['op']]}",
            f"Precision::{PRECISIONS[kernel['precision']]}",
            f'"{kernel["architecture"]}"',
            f"{int(digits[:-1]) * 10 + int(digits[-1])}",
            str(kernel["threads"]),
            str(kernel.get("vectors_per_thread", 0)),
            f"&kernel_{kernel['name']}",
        ]
        lines.append("    {" + ", ".join(fields) + "},")
    return "\n".join([*lines, "};", ""])


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(variants: Path, out: Path) -> None:
    kernels = load_kernels(variants)
    for kernel in kernels:
        source = out / kernel["architecture"] / f"{kernel['name']}.cu"
        write_if_changed(source, INSTANCES[kernel["op"]](kernel))
        print(f"{kernel['architecture']};{source}")
    write_if_changed(out / "table" / "host" / "variant_table.inc", table(kernels))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
