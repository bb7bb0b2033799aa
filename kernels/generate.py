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

Variant = dict[str, Any]

COMMON_KEYS = {"name": str, "op": str, "architecture": str, "precision": str, "spill_bytes": int}
OP_KEYS = {
    "stage": {"hidden_multiple": int, "threads": int, "vectors_per_thread": int, "blocks_per_sm": int},
    "quantize_weights": {"hidden_multiple": int, "threads": int, "blocks_per_sm": int},
    "route": {"threads": int},
    "clock_probe": {"threads": int},
} | {
    f"{direction}{form}": {
        "hidden_multiple": int,
        "intermediate_multiple": int,
        "threads": int,
        "stages": int,
    }
    for direction in ("forward", "backward")
    for form in ("", "_saving", "_trace", *(["_gradients"] if direction == "backward" else []))
}
PRECISIONS = {"bf16": "kBf16", "fp8": "kFp8", "none": "kNone"}
OPS = {
    "stage": "kStage",
    "quantize_weights": "kQuantizeWeights",
    "route": "kRoute",
    "forward": "kForward",
    "forward_saving": "kForwardSaving",
    "forward_trace": "kForwardTrace",
    "backward": "kBackward",
    "backward_saving": "kBackwardSaving",
    "backward_trace": "kBackwardTrace",
    "backward_gradients": "kBackwardGradients",
    "clock_probe": "kClockProbe",
}

INSTANCE = """\
// Generated from variants.toml.
#include "device/kernel/{header}"

namespace mega_moe {{
const void* kernel_{name}() {{ return reinterpret_cast<const void*>(&device::{kernel}); }}
}}  // namespace mega_moe
"""


def stage_instance(variant: Variant) -> str:
    quantize = "true" if variant["precision"] == "fp8" else "false"
    config = f"{quantize}, {variant['threads']}, {variant['vectors_per_thread']}, {variant['blocks_per_sm']}"
    return INSTANCE.format(
        header="sm90_stage.cuh", name=variant["name"], kernel=f"sm90_stage<device::StageConfig<{config}>>"
    )


def quantize_weights_instance(variant: Variant) -> str:
    config = f"{variant['threads']}, {variant['blocks_per_sm']}"
    return INSTANCE.format(
        header="sm90_quantize_weights.cuh", name=variant["name"], kernel=f"sm90_quantize_weights<{config}>"
    )


def route_instance(variant: Variant) -> str:
    return INSTANCE.format(
        header="sm90_route.cuh", name=variant["name"], kernel=f"sm90_route<{variant['threads']}>"
    )


def layer_instance(variant: Variant) -> str:
    direction, _, form = variant["op"].partition("_")
    # The form that traces can save too, so that either can be looked at.
    trace, saves = ("true" if form in forms else "false" for forms in (("trace",), ("trace", "saving")))
    precision = variant["precision"]
    if form == "gradients":
        config = f"QuantizedGradientsConfig<{variant['stages']}, {trace}>"
    elif precision == "fp8":
        config = f"Quantized{direction.capitalize()}Config<{variant['stages']}, {trace}>"
    else:
        config = f"{direction.capitalize()}Config<{variant['stages']}, {trace}, {saves}>"
    return INSTANCE.format(
        header=f"sm90_{precision}_moe_{direction}.cuh",
        name=variant["name"],
        kernel=f"sm90_{precision}_moe_{direction}<device::{config}>",
    )


def clock_probe_instance(variant: Variant) -> str:
    return INSTANCE.format(header="clock_probe.cuh", name=variant["name"], kernel="clock_probe")


INSTANCES: dict[str, Callable[[Variant], str]] = {
    "stage": stage_instance,
    "quantize_weights": quantize_weights_instance,
    "route": route_instance,
    "forward": layer_instance,
    "forward_saving": layer_instance,
    "forward_trace": layer_instance,
    "backward": layer_instance,
    "backward_saving": layer_instance,
    "backward_trace": layer_instance,
    "backward_gradients": layer_instance,
    "clock_probe": clock_probe_instance,
}


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
        if variant["precision"] not in PRECISIONS:
            raise ValueError(
                f"{path.name}: {name}: precision is {variant['precision']!r}, must be one of {sorted(PRECISIONS)}"
            )
        # Family targets (100f) run on several compute capabilities; the selector compares exactly.
        if not re.fullmatch(r"\d{2,3}a", variant["architecture"]):
            raise ValueError(
                f"{path.name}: {name}: architecture is {variant['architecture']!r}, must be like '90a'"
            )
    return variants


def table(variants: list[Variant]) -> str:
    """C++ declarations of the kernels and the constexpr array of `Variant` over them."""
    lines = ["// Generated from variants.toml."]
    lines += [f"const void* kernel_{variant['name']}();" for variant in variants]
    lines += ["inline constexpr Variant kVariants[] = {"]
    for variant in variants:
        digits = variant["architecture"][:-1]
        fields = [
            f'"{variant["name"]}"',
            f"Op::{OPS[variant['op']]}",
            f"Precision::{PRECISIONS[variant['precision']]}",
            f'"{variant["architecture"]}"',
            f"{int(digits[:-1]) * 10 + int(digits[-1])}",
            str(variant["threads"]),
            str(variant.get("vectors_per_thread", 0)),
            str(variant.get("stages", 0)),
            f"&kernel_{variant['name']}",
        ]
        lines.append("    {" + ", ".join(fields) + "},")
    return "\n".join([*lines, "};", ""])


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
