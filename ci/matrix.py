"""Reads ci/matrix.toml, the one list of published wheels, and refuses files that say otherwise.

    python ci/matrix.py wheels [LABEL PLATFORM]   one wheel per image
    python ci/matrix.py torch                     versions of torch that the GPU runners test
    python ci/matrix.py pythons                   versions of Python that the wheel is tested with
    python ci/matrix.py check                     every file that repeats a fact of the matrix agrees with it
    python ci/matrix.py write                     writes the table of docs/installing.md anew

Lists are printed as JSON on one line, as a workflow's outputs want them.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import document_tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# What each file repeats: file, pattern whose groups hold the fact, and the fact's name below.
REPEATED = (
    ("pyproject.toml", r'requires-python = ">=([\d.]+)"', "python"),
    ("pyproject.toml", r'\n  "torch>=([\d.]+)",', "torch"),
    ("kernels/cmake/generated.cmake", r'MEGA_MOE_TORCH_TARGET "([\d.]+)"', "torch"),
    ("kernels/cmake/torch_stable.cmake", r"TORCH_TARGET_VERSION=(0x[0-9a-f]{16})", "torch_hex"),
    ("kernels/CMakeLists.txt", r"find_package\(CUDAToolkit ([\d.]+)", "cuda"),
    ("python/mega_moe/_ops/library.py", r"TORCH_FLOOR = \((\d+), (\d+)\)", "torch"),
    ("ci/find_cuda.py", r"MINIMUM = \((\d+), (\d+)\)", "cuda"),
)


def need(fine: object, what: str, got: object, want: str) -> None:
    if not fine:
        raise ValueError(f"matrix.toml: {what} is {got!r}, must be {want}")


@dataclass(frozen=True)
class Flavour:
    """Wheels of one CUDA version."""

    label: str
    version: str
    driver: int
    architectures: list[str]
    images: dict[str, dict[str, str]]  # platform: name and digest

    def __post_init__(self) -> None:
        label = f"cu{self.version.replace('.', '')}"
        need(self.label == label, f"label of CUDA {self.version}", self.label, label)
        need(isinstance(self.driver, int), f"{label}: driver", self.driver, "a whole number")
        need(self.architectures, f"{label}: architectures", self.architectures, "one at least")
        for platform, image in self.images.items():
            fine = re.fullmatch(r"sha256:[0-9a-f]{64}", image["digest"])
            need(fine, f"{label} {platform}: digest", image["digest"], "sha256:<64 digits>")


@dataclass(frozen=True)
class Matrix:
    policy: str
    torch_floor: str
    cuda_floor: str
    pythons: list[str]
    torch_tested: list[str]
    default: str
    runners: dict[str, dict[str, Any]]
    flavours: list[Flavour]

    def __post_init__(self) -> None:
        need(re.fullmatch(r"manylinux_2_\d+", self.policy), "policy", self.policy, "like 'manylinux_2_28'")
        for key in ("pythons", "torch_tested"):
            values = getattr(self, key)
            need(values == sorted(set(values), key=parsed), key, values, "rising")
        floor = f"one that begins with the floor {self.torch_floor}"
        need(self.torch_tested[0] == self.torch_floor, "torch_tested", self.torch_tested, floor)
        labels = [flavour.label for flavour in self.flavours]
        fine = len(set(labels)) == len(labels) and self.default in labels
        need(fine, "labels", labels, f"different ones with the default {self.default}")
        for platform, runner in self.runners.items():
            need(set(runner) == {"build", "gpu"}, f"runners {platform}", sorted(runner), "build and gpu")
        for flavour in self.flavours:
            known = set(flavour.images) <= set(self.runners)
            need(
                known, f"{flavour.label}: images", sorted(flavour.images), f"for runners {list(self.runners)}"
            )

    def wheels(self) -> list[dict[str, Any]]:
        """Every wheel of a release; ``runner`` builds it, ``gpu`` are the labels of a machine that tests it."""
        return [
            {
                "label": flavour.label,
                "cuda": flavour.version,
                "platform": platform,
                "runner": self.runners[platform]["build"],
                "gpu": self.runners[platform]["gpu"],
                "image": f"{image['name']}@{image['digest']}",
            }
            for flavour in self.flavours
            for platform, image in flavour.images.items()
        ]


def parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def built(kind: type, where: str, table: dict[str, Any]) -> Any:
    want = sorted(field.name for field in fields(kind))
    need(sorted(table) == want, f"keys of {where}", sorted(table), str(want))
    return kind(**table)


def load(path: Path = ROOT / "ci" / "matrix.toml") -> Matrix:
    """The matrix; ValueError names the key that is missing, unknown or wrong."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    need(set(data) == {"wheel", "runners", "cuda"}, "tables", sorted(data), "cuda, runners and wheel")
    flavours = [built(Flavour, f"cuda {entry.get('label')}", entry) for entry in data["cuda"]]
    return built(Matrix, "wheel", {**data["wheel"], "runners": data["runners"], "flavours": flavours})


def table(matrix: Matrix) -> str:
    """What a user chooses from, as Markdown."""
    glibc = matrix.policy.removeprefix("manylinux_").replace("_", ".")
    rows = [
        [
            f"`{flavour.label}`" + (" (default)" if flavour.label == matrix.default else ""),
            flavour.version,
            f"{flavour.driver} or newer",
            ", ".join(f"sm_{name}" for name in flavour.architectures),
            ", ".join(flavour.images),
            f"{glibc} or newer",
        ]
        for flavour in matrix.flavours
    ]
    head = ["label", "CUDA", "driver", "GPU architectures", "platforms", "glibc"]
    return (
        f"{document_tables.markdown(head, rows)}\n"
        f"Python {matrix.pythons[0]} or newer, torch {matrix.torch_floor} or newer, no upper limit.\n"
        f"Before a wheel is published, its CPU tests run on Python {', '.join(matrix.pythons)}, "
        f"and its GPU tests with torch {', '.join(matrix.torch_tested)}.\n"
    )


def faults(matrix: Matrix, root: Path = ROOT) -> list[str]:
    """One line per file that repeats a fact of the matrix in another way."""
    major, minor = parsed(matrix.torch_floor)
    facts = {
        "python": matrix.pythons[0],
        "torch": matrix.torch_floor,
        "torch_hex": f"0x{major:02x}{minor:02x}{0:012x}",
        "cuda": matrix.cuda_floor,
    }
    found = []
    for name, pattern, fact in REPEATED:
        matches = re.findall(pattern, (root / name).read_text(encoding="utf-8"))
        said = {".".join(match) if isinstance(match, tuple) else match for match in matches}
        if said != {facts[fact]}:
            found.append(f"{name}: says {sorted(said)} where matrix.toml says {facts[fact]}")
    variants = tomllib.loads((root / "kernels/variants.toml").read_text(encoding="utf-8"))["variant"]
    compiled = sorted({variant["architecture"] for variant in variants})
    for flavour in matrix.flavours:
        if sorted(flavour.architectures) != compiled:
            listed = f"{flavour.architectures} for {flavour.label}"
            found.append(f"kernels/variants.toml: compiles for {compiled}, matrix.toml lists {listed}")
    return found + document_tables.sync(root, "matrix", table(matrix))


def main(arguments: list[str]) -> int:
    matrix = load()
    match arguments:
        case ["wheels", *chosen]:
            wheels = matrix.wheels()
            print(json.dumps([w for w in wheels if not chosen or [w["label"], w["platform"]] == chosen]))
        case ["torch"]:
            print(json.dumps(matrix.torch_tested))
        case ["pythons"]:
            print(json.dumps(matrix.pythons))
        case ["write"]:
            document_tables.sync(ROOT, "matrix", table(matrix), write=True)
        case ["check"]:
            wrong = faults(matrix)
            print(*wrong, f"matrix: {len(matrix.wheels())} wheels, {len(wrong)} faults", sep="\n")
            return 1 if wrong else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
