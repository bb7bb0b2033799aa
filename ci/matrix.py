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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- matrix:begin -->\n).*?(<!-- matrix:end -->)", re.DOTALL)
TABLE_FILE = "docs/installing.md"

# Keys, with the type of their values; nothing else may stand there.
WHEEL_KEYS = {
    "policy": str, "torch_floor": str, "cuda_floor": str, "pythons": list, "torch_tested": list, "default": str,
}  # fmt: skip
CUDA_KEYS = {"label": str, "version": str, "driver": int, "architectures": list, "images": dict}
RUNNER_KEYS = {"build": str, "gpu": list}
# What each file repeats: file, pattern whose groups hold the fact, and the fact as the matrix says it.
REPEATED: tuple[tuple[str, str, str], ...] = (
    ("pyproject.toml", r'requires-python = ">=([\d.]+)"', "{python}"),
    ("pyproject.toml", r'\n  "torch>=([\d.]+)",', "{torch}"),
    ("kernels/cmake/generated.cmake", r'MEGA_MOE_TORCH_TARGET "([\d.]+)"', "{torch}"),
    ("kernels/cmake/torch_stable.cmake", r"TORCH_TARGET_VERSION=(0x[0-9a-f]{16})", "{torch_hex}"),
    ("kernels/CMakeLists.txt", r"find_package\(CUDAToolkit ([\d.]+)", "{cuda}"),
    ("python/mega_moe/_ops/library.py", r"TORCH_FLOOR = \((\d+), (\d+)\)", "{torch}"),
    ("ci/find_cuda.py", r"MINIMUM = \((\d+), (\d+)\)", "{cuda}"),
)


@dataclass(frozen=True)
class Flavour:
    """Wheels of one CUDA version."""

    label: str
    version: str
    driver: int
    architectures: tuple[str, ...]
    images: dict[str, tuple[str, str]]  # platform: name and digest


@dataclass(frozen=True)
class Matrix:
    policy: str
    torch_floor: str
    cuda_floor: str
    pythons: tuple[str, ...]
    torch_tested: tuple[str, ...]
    default: str
    runners: dict[str, dict[str, Any]]
    flavours: tuple[Flavour, ...]

    def flavour(self, label: str) -> Flavour:
        for flavour in self.flavours:
            if flavour.label == label:
                return flavour
        raise ValueError(f"flavour: got {label!r}, want one of {[f.label for f in self.flavours]}")

    def wheels(self) -> list[dict[str, Any]]:
        """Every wheel of a release; ``runner`` builds it, ``gpu`` are the labels of a machine that tests it."""
        return [
            {
                "label": flavour.label,
                "cuda": flavour.version,
                "platform": platform,
                "runner": self.runners[platform]["build"],
                "gpu": self.runners[platform]["gpu"],
                "image": "@".join(image),
            }
            for flavour in self.flavours
            for platform, image in flavour.images.items()
        ]


def parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def load(path: Path = ROOT / "ci" / "matrix.toml") -> Matrix:
    """The matrix; ValueError names the key that is missing, unknown or wrong."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(data) != {"wheel", "runners", "cuda"}:
        raise ValueError(f"matrix.toml: tables are {sorted(data)}, must be cuda, runners and wheel")
    wheel, runners = data["wheel"], data["runners"]
    _check_keys("wheel", wheel, WHEEL_KEYS)
    for platform, labels in runners.items():
        _check_keys(f"runners {platform}", labels, RUNNER_KEYS)
    if not re.fullmatch(r"manylinux_2_\d+", wheel["policy"]):
        raise ValueError(f"matrix.toml: policy is {wheel['policy']!r}, must be like 'manylinux_2_28'")
    for key in ("pythons", "torch_tested"):
        if wheel[key] != sorted(set(wheel[key]), key=parsed):
            raise ValueError(f"matrix.toml: {key} is {wheel[key]}, must rise")
    if wheel["torch_tested"][0] != wheel["torch_floor"]:
        raise ValueError(f"matrix.toml: torch_tested must begin with the floor {wheel['torch_floor']}")
    flavours = tuple(_flavour(entry, sorted(runners)) for entry in data["cuda"])
    labels = [flavour.label for flavour in flavours]
    if len(set(labels)) != len(labels) or wheel["default"] not in labels:
        raise ValueError(
            f"matrix.toml: labels are {labels}, must differ and hold the default {wheel['default']}"
        )
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in wheel.items()}
    return Matrix(**tuples, runners=runners, flavours=flavours)


def _check_keys(where: str, table: dict[str, Any], keys: dict[str, type]) -> None:
    if set(table) != set(keys):
        raise ValueError(f"matrix.toml: {where}: keys are {sorted(table)}, must be {sorted(keys)}")
    for key, kind in keys.items():
        if type(table[key]) is not kind or not table[key]:
            raise ValueError(f"matrix.toml: {where}: {key} is {table[key]!r}, must be a {kind.__name__}")


def _flavour(entry: dict[str, Any], known: list[str]) -> Flavour:
    _check_keys(f"cuda {entry.get('label')}", entry, CUDA_KEYS)
    label = f"cu{entry['version'].replace('.', '')}"
    if entry["label"] != label:
        raise ValueError(
            f"matrix.toml: label of CUDA {entry['version']} is {entry['label']}, must be {label}"
        )
    if not set(entry["images"]) <= set(known):
        raise ValueError(
            f"matrix.toml: {label}: images are for {sorted(entry['images'])}, runners for {known}"
        )
    for platform, image in entry["images"].items():
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", image["digest"]):
            raise ValueError(
                f"matrix.toml: {label} {platform}: digest is {image['digest']!r}, must be sha256:<64 digits>"
            )
    images = {platform: (image["name"], image["digest"]) for platform, image in entry["images"].items()}
    return Flavour(label, entry["version"], entry["driver"], tuple(sorted(entry["architectures"])), images)


def table(matrix: Matrix) -> str:
    """What a user chooses from, as Markdown."""
    lines = [
        "| label | CUDA | driver | GPU architectures | platforms | glibc |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for flavour in matrix.flavours:
        glibc = matrix.policy.removeprefix("manylinux_").replace("_", ".")
        cells = (
            f"`{flavour.label}`" + (" (default)" if flavour.label == matrix.default else ""),
            flavour.version,
            f"{flavour.driver} or newer",
            ", ".join(f"sm_{name}" for name in flavour.architectures),
            ", ".join(flavour.images),
            f"{glibc} or newer",
        )
        lines.append(f"| {' | '.join(cells)} |")
    python = f"Python {matrix.pythons[0]} or newer, torch {matrix.torch_floor} or newer, no upper limit."
    tested = (
        f"Before a wheel is published, its CPU tests run on Python {', '.join(matrix.pythons)}, "
        f"and its GPU tests with torch {', '.join(matrix.torch_tested)}."
    )
    return "\n".join([*lines, "", python, tested, ""])


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
    for name, pattern, want in REPEATED:
        matches = re.findall(pattern, (root / name).read_text(encoding="utf-8"))
        said = {".".join(match) if isinstance(match, tuple) else match for match in matches}
        if said != {want.format(**facts)}:
            found.append(f"{name}: says {sorted(said)} where matrix.toml says {want.format(**facts)}")
    variants = tomllib.loads((root / "kernels/variants.toml").read_text(encoding="utf-8"))["variant"]
    compiled = tuple(sorted({variant["architecture"] for variant in variants}))
    found += [
        f"kernels/variants.toml: compiles for {compiled}, matrix.toml lists {flavour.architectures} for {flavour.label}"
        for flavour in matrix.flavours
        if flavour.architectures != compiled
    ]
    text = (root / TABLE_FILE).read_text(encoding="utf-8")
    if not TABLE.search(text):
        found.append(f"{TABLE_FILE}: no place for the table between <!-- matrix:begin --> and its end")
    elif with_table(text, matrix) != text:
        found.append(f"{TABLE_FILE}: the table is not that of matrix.toml: python ci/matrix.py write")
    return found


def with_table(text: str, matrix: Matrix) -> str:
    return TABLE.sub(lambda match: match[1] + table(matrix) + match[2], text)


def main(arguments: list[str]) -> int:
    try:
        matrix = load()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    match arguments:
        case ["wheels", *chosen]:
            wheels = matrix.wheels()
            print(json.dumps([w for w in wheels if not chosen or [w["label"], w["platform"]] == chosen]))
        case ["torch"]:
            print(json.dumps(matrix.torch_tested))
        case ["pythons"]:
            print(json.dumps(matrix.pythons))
        case ["write"]:
            path = ROOT / TABLE_FILE
            path.write_text(with_table(path.read_text(encoding="utf-8"), matrix), encoding="utf-8")
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
