"""Turns variants.toml into one source per compiled kernel, the table that the launcher selects from, and variants.json.

    python generate.py variants.toml OUT_DIR

Writes OUT_DIR/<architecture>/<name>.cu, OUT_DIR/table/host/variant_table.inc and OUT_DIR/variants.json, touching only
what changed, and prints `<architecture>;<source>` per kernel for CMake.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Variant = dict[str, Any]

COMMON_KEYS = {"name": str, "op": str, "architecture": str, "precision": str, "spill_bytes": int}
LAYER_KEYS = {
    "saved": str,
    "trace": bool,
    "block_m": int,
    "block_n": int,
    "stages": int,
    "threads": int,
}
OP_KEYS = {
    "quantize_weights": {"hidden_multiple": int, "threads": int, "blocks_per_sm": int},
    "route": {"threads": int},
    "forward": LAYER_KEYS,
    "backward": {"wgrad": str} | LAYER_KEYS,
    "clock_probe": {"threads": int},
}
LAYER_OPS = ("forward", "backward")
# What a key may say, and how C++ spells it.
WORDS = {
    "op": {
        "quantize_weights": "Op::kQuantizeWeights",
        "route": "Op::kRoute",
        "forward": "Op::kForward",
        "backward": "Op::kBackward",
        "clock_probe": "Op::kClockProbe",
    },
    "precision": {"bf16": "Precision::kBf16", "fp8": "Precision::kFp8", "none": "Precision::kNone"},
    "wgrad": {"bf16": "Precision::kBf16", "fp8": "Precision::kFp8"},
    "saved": {"nothing": "Saved::kNothing", "gate_up": "Saved::kGateUp"},
}

INSTANCE = """\
// Generated from variants.toml.
#include "device/kernel/{header}"
#include "layout/kernel_facts.h"

namespace mega_moe {{
layout::KernelFacts facts_{name}() {{
    return {{reinterpret_cast<const void*>(&device::{kernel}), {threads}}};
}}
}}  // namespace mega_moe
"""
LAYER_INSTANCE = """\
// Generated from variants.toml.
#include "device/kernel/{kernel}.cuh"
#include "layout/kernel_facts.h"

namespace mega_moe {{
using Config = device::{config};
static_assert(Config::kHiddenMultiple == {hidden} && Config::kIntermediateMultiple == {intermediate},
              "generate.py: multiples of hidden and intermediate are {hidden} and {intermediate}, the kernel's differ");
layout::KernelFacts facts_{name}() {{
    return {{reinterpret_cast<const void*>(&device::{kernel}<Config>), Config::kThreads, Config::kClusterSize,
            Config::kSharedBytes, Config::kRouteBytes, Config::kBlockM, Config::kBlockN}};
}}
}}  // namespace mega_moe
"""


def kernel_prefix(variant: Variant) -> str:
    """sm90 of 90a."""
    return f"sm{variant['architecture'][:-1]}"


def quantize_weights_instance(variant: Variant) -> str:
    return INSTANCE.format(
        header="sm90_quantize_weights.cuh",
        name=variant["name"],
        kernel=f"sm90_quantize_weights<{variant['threads']}, {variant['blocks_per_sm']}>",
        threads=variant["threads"],
    )


def route_instance(variant: Variant) -> str:
    return INSTANCE.format(
        header="sm90_route.cuh",
        name=variant["name"],
        kernel=f"sm90_route<{variant['threads']}>",
        threads=variant["threads"],
    )


def layer_instance(variant: Variant) -> str:
    precision, op = variant["precision"], variant["op"]
    tile = ", ".join(str(variant[key]) for key in ("block_m", "block_n", "stages", "threads"))
    wgrad = WORDS["wgrad"][variant["wgrad"]] if op == "backward" else "Precision::kNone"
    mode = f"{wgrad}, {WORDS['saved'][variant['saved']]}, {str(variant['trace']).lower()}"
    config = f"{kernel_prefix(variant).capitalize()}{precision.capitalize()}{op.capitalize()}Config"
    hidden, intermediate = multiples(variant)
    return LAYER_INSTANCE.format(
        name=variant["name"],
        kernel=f"{kernel_prefix(variant)}_{precision}_moe_{op}",
        config=f"{config}<device::Tile<{tile}>, {mode}>",
        hidden=hidden,
        intermediate=intermediate,
    )


def clock_probe_instance(variant: Variant) -> str:
    return INSTANCE.format(
        header="clock_probe.cuh",
        name=variant["name"],
        kernel=f"clock_probe<{variant['threads']}>",
        threads=variant["threads"],
    )


INSTANCES: dict[str, Callable[[Variant], str]] = {
    "quantize_weights": quantize_weights_instance,
    "route": route_instance,
    "forward": layer_instance,
    "backward": layer_instance,
    "clock_probe": clock_probe_instance,
}


def multiples(variant: Variant) -> tuple[int, int]:
    """What hidden and intermediate must be multiples of; 1 where an extent has no say.

    hidden: whole tiles of columns, 256 columns a step of combine, whole k-blocks of 128 bytes; scale factors of a row
    that travels as e4m3 are whole vectors of 16 bytes, 512 columns. intermediate: whole tiles of h, whole k-blocks of
    e4m3 or pairs of bf16.
    """
    if variant["op"] not in LAYER_OPS:
        return variant.get("hidden_multiple", 1), 1
    fp8 = variant["precision"] == "fp8"
    k_block = 128 if fp8 else 64
    dispatched = 512 if fp8 and variant["op"] == "forward" else k_block
    return math.lcm(variant["block_n"], 256, dispatched), math.lcm(variant["block_n"] // 2, 128)


def load_variants(path: Path) -> list[Variant]:
    """The entries of variants.toml; ValueError names the variant and its missing, unknown or wrong key."""
    variants: list[Variant] = tomllib.loads(path.read_text())["variant"]
    names = [variant.get("name") for variant in variants]
    for variant in variants:
        name = variant.get("name")
        if names.count(name) != 1:
            raise ValueError(f"{path.name}: name {name!r} occurs {names.count(name)} times, must be unique")
        if variant.get("op") not in OP_KEYS:
            raise ValueError(
                f"{path.name}: {name}: op is {variant.get('op')!r}, must be one of {sorted(OP_KEYS)}"
            )
        keys = COMMON_KEYS | OP_KEYS[variant["op"]]
        if set(variant) != set(keys):
            raise ValueError(f"{path.name}: {name}: keys are {sorted(variant)}, must be {sorted(keys)}")
        for key, kind in keys.items():
            if type(variant[key]) is not kind:
                raise ValueError(
                    f"{path.name}: {name}: {key} is {variant[key]!r}, must be of type {kind.__name__}"
                )
            if key in WORDS and variant[key] not in WORDS[key]:
                raise ValueError(
                    f"{path.name}: {name}: {key} is {variant[key]!r}, must be one of {sorted(WORDS[key])}"
                )
        # Family targets (100f) run on several compute capabilities; the selector compares exactly.
        if not re.fullmatch(r"\d{2,3}a", variant["architecture"]):
            raise ValueError(
                f"{path.name}: {name}: architecture is {variant['architecture']!r}, must be like '90a'"
            )
    return variants


def key_of(variant: Variant) -> str:
    """The variant's VariantKey in C++."""
    fields = [WORDS["op"][variant["op"]], WORDS["precision"][variant["precision"]]]
    if variant["op"] in LAYER_OPS:
        fields += [
            WORDS["wgrad"][variant["wgrad"]] if "wgrad" in variant else "Precision::kNone",
            WORDS["saved"][variant["saved"]],
            str(variant["trace"]).lower(),
        ]
    return "{" + ", ".join(fields) + "}"


def table(variants: list[Variant]) -> str:
    """C++ declarations of what the kernels say of themselves and the constexpr array of `Variant` over them."""
    lines = ["// Generated from variants.toml."]
    lines += [f"layout::KernelFacts facts_{variant['name']}();" for variant in variants]
    lines += ["inline constexpr Variant kVariants[] = {"]
    for variant in variants:
        digits = variant["architecture"][:-1]
        hidden, intermediate = multiples(variant)
        fields = [
            f'"{variant["name"]}"',
            key_of(variant),
            f'"{variant["architecture"]}"',
            f"{int(digits[:-1]) * 10 + int(digits[-1])}",
            str(hidden),
            str(intermediate),
            f"&facts_{variant['name']}",
        ]
        lines.append("    {" + ", ".join(fields) + "},")
    return "\n".join([*lines, "};", ""])


def listed(variants: list[Variant]) -> str:
    """variants.json: the entries of variants.toml with the multiples that follow from them."""
    entries = []
    for variant in variants:
        hidden, intermediate = multiples(variant)
        entries.append(variant | {"hidden_multiple": hidden, "intermediate_multiple": intermediate})
    return json.dumps({"variants": entries}, indent=1) + "\n"


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(path: Path, out: Path) -> None:
    variants = load_variants(path)
    for variant in variants:
        source = out / variant["architecture"] / f"{variant['name']}.cu"
        write_if_changed(source, INSTANCES[variant["op"]](variant))
        print(f"{variant['architecture']};{source}")
    write_if_changed(out / "table" / "host" / "variant_table.inc", table(variants))
    write_if_changed(out / "variants.json", listed(variants))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
