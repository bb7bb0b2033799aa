"""Which rows of a result were measured with other kernels than those that lie here now.

A row is stale when the code of a kernel that its calls launch has changed: its variant of kernels/variants.toml, as
kernels/hash_kernels.py hashes it. A result without these hashes says nothing of one kernel alone: then any change below
kernels/ counts, for the rows that launch kernels at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from hash_kernels import hash_kernels, hash_variants
from variant_sources import Sources

del sys.path[0]

Kernel = tuple[str, str]
"""Op and precision, as variants.toml has them."""

ANY = "kernels/"
"""Stands for every kernel, where the result says nothing of one alone."""

# Of forward and backward, where they are not the layer's own.
PRECISIONS = {"fp8_bwd": ("bf16", "fp8")}

# What no row of a result launches: `mega_moe.route`, the forms that save gate and up, which the benchmarks do not ask
# for, the forms that trace, and the probe, which is read beside the time and not within it.
UNMEASURED = frozenset(
    {"route", "forward_saving", "backward_saving", "forward_trace", "backward_trace", "clock_probe"}
)


@dataclass(frozen=True)
class Kernels:
    """The kernels that lie here now: hash of everything, of each variant, and the variants of each kernel."""

    sha256: str
    code: Mapping[str, str]
    variants: Mapping[Kernel, tuple[str, ...]]

    @classmethod
    def of(cls, folder: Path) -> Kernels:
        variants: dict[Kernel, tuple[str, ...]] = {}
        for variant in Sources(folder).variants:
            kernel = (variant["op"], variant["precision"])
            variants[kernel] = (*variants.get(kernel, ()), variant["name"])
        return cls(hash_kernels(folder), hash_variants(folder), variants)


def launched(row: Any, on_gpu: bool) -> tuple[Kernel, ...]:
    """The kernels of ours that the calls of a row launch."""
    if row.kind in {"ceiling", "peer"} or not on_gpu:
        return ()
    if row.kind == "stage":
        return (("stage", row.form),)
    forward, backward = PRECISIONS.get(row.precision, (row.precision, row.precision))
    direction = "forward_backward" if row.kind == "step" else row.direction
    if row.backend == "fused":
        # Each direction routes and stages within its one kernel.
        both = {"forward": ("forward", forward), "backward": ("backward", backward)}
        if row.kind == "layer" and row.dw_precision == "fp8":
            both["backward"] = ("backward_gradients", backward)
        kernels = tuple(kernel for name, kernel in both.items() if name in direction)
        # In fp8 a call makes its copies of the weights.
        quantizes = any(precision == "fp8" for _, precision in kernels)
        return (*kernels, ("quantize_weights", "fp8")) if quantizes else kernels
    # The plain backends bring x, ids and weights into the buffer by the staging kernel, other dtypes by torch. Only
    # the forward of fp8 stages codes.
    if row.kind == "layer" and row.dtype != "bfloat16":
        return ()
    forms = {"forward": "fp8" if row.precision == "fp8" else "bf16", "backward": "bf16"}
    return tuple(dict.fromkeys(("stage", form) for name, form in forms.items() if name in direction))


def changed(row: Any, where: Any, kernels: Kernels) -> tuple[str, ...]:
    """Names of what the row, measured in environment `where`, was measured with and is not as it was; empty: the row is
    not stale."""
    wanted = launched(row, where.num_sms is not None)
    if where.code is None:
        return (ANY,) if wanted and where.kernels_sha256 != kernels.sha256 else ()
    gone = sorted(set(where.code) - set(kernels.code))
    found: list[str] = []
    for kernel in wanted:
        names = kernels.variants.get(kernel, ())
        known = [name for name in names if name in where.code]
        if known:
            found += [name for name in known if where.code[name] != kernels.code[name]]
        elif gone:
            found += gone  # one of them may have been it
        elif row.kind == "stage" or row.backend == "fused":
            found += names  # the wheel of the result had none; the plain backends then staged by torch
    return tuple(dict.fromkeys(found))


def footnote(names: Sequence[str], kernels: Kernels) -> str:
    """What a table with stale rows says below it, of all that `changed` named."""
    listed = sorted(set(names) - {ANY})
    if not listed:
        return f"stale: the present `kernels/` is `{kernels.sha256[:12]}`, not what was measured."
    words = ", ".join(f"`{name}`" for name in listed)
    return f"stale: {words} {'have' if len(listed) > 1 else 'has'} changed since the rows so marked were measured."
