"""Turns variants.toml into one CUDA source per compiled GEMM and the table that the benchmark walks.

    python gemm_variants.py variants.toml OUT_DIR

Writes OUT_DIR/<name>.cu and OUT_DIR/variant_table.cpp, touching only what changed, and prints the path of each source.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Variant = dict[str, Any]

KEYS = {
    "name": str,
    "element": str,
    "block": list,
    "instruction_n": int,
    "schedule": str,
    "multicast": bool,
    "majors": list,
    "promotion": str,
    "stages": int,
    "store_buffers": int,
    "spill_bytes": int,
}
ELEMENTS = {"bf16": "kBf16", "e4m3": "kE4m3"}
SCHEDULES = {"cooperative": "kCooperative", "ping_pong": "kPingPong"}
PROMOTIONS = {
    "none": "kNone",
    "halves": "kHalves",
    "quarters": "kQuarters",
    "quarters_of_two": "kQuartersOfTwo",
}
MAJORS = {"k": "kK", "mn": "kMn"}


def load_variants(path: Path) -> list[Variant]:
    """Every variant with its defaults filled in; ValueError names the variant and the key that is wrong."""
    document = tomllib.loads(path.read_text())
    variants: list[Variant] = [document["defaults"] | variant for variant in document["variant"]]
    names = [variant.get("name") for variant in variants]
    for variant in variants:
        name = variant.get("name")
        if names.count(name) != 1:
            raise ValueError(f"{path.name}: name {name!r} occurs {names.count(name)} times, must be unique")
        if set(variant) != set(KEYS):
            raise ValueError(f"{path.name}: {name}: keys are {sorted(variant)}, must be {sorted(KEYS)}")
        for key, kind in KEYS.items():
            if type(variant[key]) is not kind:
                raise ValueError(
                    f"{path.name}: {name}: {key} is {variant[key]!r}, must be of type {kind.__name__}"
                )
        choices = (
            (variant["element"], ELEMENTS),
            (variant["schedule"], SCHEDULES),
            (variant["promotion"], PROMOTIONS),
        )
        for value, allowed in (*choices, *((major, MAJORS) for major in variant["majors"])):
            if value not in allowed:
                raise ValueError(f"{path.name}: {name}: got {value!r}, must be one of {sorted(allowed)}")
    return variants


def source(variant: Variant) -> str:
    major_a, major_b = (f"device::sm90::Major::{MAJORS[major]}" for major in variant["majors"])
    arguments = ", ".join(
        [
            f"Element::{ELEMENTS[variant['element']]}",
            *map(str, variant["block"]),
            str(variant["instruction_n"]),
            f"Schedule::{SCHEDULES[variant['schedule']]}",
            f"Cluster::{'kMulticastB' if variant['multicast'] else 'kNone'}",
            major_a,
            major_b,
            f"Promotion::{PROMOTIONS[variant['promotion']]}",
            str(variant["stages"]),
            str(variant["store_buffers"]),
        ]
    )
    return f"""\
// Generated from variants.toml.
#include "bench/gemm/instance.cuh"

namespace mega_moe::bench {{
GemmVariant variant_{variant["name"]}() {{
    return describe<GemmConfig<{arguments}>>("{variant["name"]}");
}}
}}  // namespace mega_moe::bench
"""


def table(variants: list[Variant]) -> str:
    names = [variant["name"] for variant in variants]
    return "\n".join(
        [
            "// Generated from variants.toml.",
            '#include "bench/gemm/variant.h"',
            "",
            "namespace mega_moe::bench {",
            *(f"GemmVariant variant_{name}();" for name in names),
            "",
            "std::vector<GemmVariant> gemm_variants() {",
            "    return {" + ", ".join(f"variant_{name}()" for name in names) + "};",
            "}",
            "}  // namespace mega_moe::bench",
            "",
        ]
    )


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(variants_path: Path, out: Path) -> None:
    variants = load_variants(variants_path)
    write_if_changed(out / "variant_table.cpp", table(variants))
    for variant in variants:
        path = out / f"{variant['name']}.cu"
        write_if_changed(path, source(variant))
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
