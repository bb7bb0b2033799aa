"""Which rows of a result were measured with other kernels than those that lie here now.

A row is stale when the machine code of a kernel that its calls launch has changed: the wheel in dist/, or else the
installed one, holds the hash of each variant's code, as ci/kernel_code.py makes it. Another compiler makes other code
of the same sources, so rows are judged only where both are of one version of nvcc. A result without these hashes says
nothing of one kernel alone: then any change below kernels/ counts, for the rows that launch kernels at all.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from hash_kernels import hash_kernels

del sys.path[0]

Kernel = tuple[str, str]
"""Op, with its form where that is not the default, and precision, as variants.toml has them."""

ANY = "kernels/"
"""Stands for every kernel, where the result says nothing of one alone."""

# Of forward and backward, where they are not the layer's own.
PRECISIONS = {"fp8_bwd": ("bf16", "fp8")}

# What no row of a result launches: `mega_moe.route`, the forms that save gate and up, which the benchmarks do not ask
# for, the forms that trace, and the probe, which is read alongside the time and not within it.
UNMEASURED = frozenset(
    {"route", "forward_saving", "backward_saving", "forward_trace", "backward_trace", "clock_probe"}
)


@dataclass(frozen=True)
class Kernels:
    """The kernels that lie here now: hash of the sources, of each variant's code, the variants of each kernel, and the
    version of nvcc."""

    sha256: str
    code: Mapping[str, str]
    variants: Mapping[Kernel, tuple[str, ...]]
    compiler: str

    @classmethod
    def of(cls, root: Path) -> Kernels:
        """Of the project at root; FileNotFoundError without a finished wheel, ValueError for one of other sources."""
        where, build, record = wheel(root)
        sha256 = hash_kernels(root / "kernels")
        if build["kernels_sha256"] != sha256:
            raise ValueError(
                f"{where}: built from kernels/ {build['kernels_sha256'][:12]}, wanted a wheel of the present "
                f"{sha256[:12]}; build it: nox -s wheel"
            )
        return cls(sha256, record["code"], variants(root / "kernels"), build["compiler"])


def wheel(root: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What the wheel in dist/, or else the installed package, is called; its build.json and its wheel.json."""
    made = list((root / "dist").glob("*.whl"))
    spec = importlib.util.find_spec("mega_moe")
    places: list[Any] = [zipfile.Path(path) for path in made]
    if not made and spec is not None and spec.origin is not None:
        places = [Path(spec.origin).parents[1]]
    files = [place / "mega_moe" / "_lib" for place in places]
    if len(files) != 1 or not all((files[0] / name).exists() for name in ("build.json", "wheel.json")):
        raise FileNotFoundError(
            f"got {len(made)} wheels in dist/ and {'none that is finished' if spec else 'none'} installed, wanted one "
            "whose kernels the results can be compared with; build it: nox -s wheel"
        )
    build, record = (json.loads((files[0] / name).read_text()) for name in ("build.json", "wheel.json"))
    return str(places[0]), build, record


def variants(folder: Path) -> dict[Kernel, tuple[str, ...]]:
    """Names of the variants of each kernel, of the sources at folder."""
    found: dict[Kernel, tuple[str, ...]] = {}
    for variant in runpy.run_path(str(folder / "generate.py"))["load_variants"](folder / "variants.toml"):
        if variant.get("trace"):
            form = "_trace"
        elif variant.get("saved") == "gate_up":
            form = "_saving"
        else:
            form = "_fp8_wgrad" if variant.get("wgrad") == "fp8" else ""
        kernel = (variant["op"] + form, variant["precision"])
        found[kernel] = (*found.get(kernel, ()), variant["name"])
    return found


def launched(row: Any, on_gpu: bool) -> tuple[Kernel, ...]:
    """The kernels of ours that the calls of a row launch."""
    if row.kind in {"ceiling", "peer"} or not on_gpu:
        return ()
    forward, backward = PRECISIONS.get(row.precision, (row.precision, row.precision))
    direction = "forward_backward" if row.kind == "step" else row.direction
    # The plain backends launch kernels of torch alone.
    if row.backend not in {"fused", "dispatched"}:
        return ()
    # Each direction routes within its one kernel.
    both = {"forward": ("forward", forward), "backward": ("backward", backward)}
    if row.kind == "layer" and row.dw_precision == "fp8":
        both["backward"] = ("backward_fp8_wgrad", backward)
    kernels = tuple(kernel for name, kernel in both.items() if name in direction)
    # In fp8 a call makes its copies of the weights.
    quantizes = any(precision == "fp8" for _, precision in kernels)
    return (*kernels, ("quantize_weights", "fp8")) if quantizes else kernels


def changed(row: Any, where: Any, kernels: Kernels) -> tuple[str, ...]:
    """Names of what the row, measured in environment `where`, was measured with and is not as it was; empty: the row is
    not stale."""
    wanted = launched(row, where.num_sms is not None)
    if where.code is None:
        return (ANY,) if wanted and where.kernels_sha256 != kernels.sha256 else ()
    if where.compiler != kernels.compiler:
        return ()  # not known; the footnote says so
    gone = sorted(set(where.code) - set(kernels.code))
    found: list[str] = []
    for kernel in wanted:
        names = kernels.variants.get(kernel, ())
        known = [name for name in names if name in where.code]
        if known:
            found += [name for name in known if where.code[name] != kernels.code[name]]
        elif gone:
            found += gone  # one of them may have been it
        else:
            found += names  # the wheel of the result had none
    return tuple(dict.fromkeys(found))


def footnote(names: Sequence[str], where: Any, kernels: Kernels) -> list[str]:
    """Lines below a table of rows measured in environment `where`: of all that `changed` named, or why it could not."""
    if where.code and where.compiler != kernels.compiler:
        ours, theirs = kernels.compiler, where.compiler
        return [
            "",
            f"Not judged whether stale: measured with code of nvcc {theirs}, the wheel here is of {ours}.",
        ]
    listed = sorted(set(names) - {ANY})
    if not names:
        return []
    if not listed:
        return ["", f"stale: the present `kernels/` is `{kernels.sha256[:12]}`, not what was measured."]
    words = ", ".join(f"`{name}`" for name in listed)
    verb = "have" if len(listed) > 1 else "has"
    return ["", f"stale: {words} {verb} changed since the rows so marked were measured."]
