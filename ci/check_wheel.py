"""Judges a wheel: tag, files, metadata, label, bill of materials, libraries, symbols, stable ABI, architectures, size.

    python ci/check_wheel.py WHEEL

Prints one line per fault and exits 1 when there is any. Needs the dependency group check-wheel.
"""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import finish_wheel
import wheel_file
from elftools.elf.elffile import ELFFile
from finish_wheel import BUILD, LIBRARY, WHEEL_RECORD
from kernel_code import tool

NAME = re.compile(
    r"mega_moe-(?P<version>[\w.!+]+)-py3-none-manylinux_2_(?P<glibc>\d+)_(?P<machine>x86_64|aarch64)\.whl"
)
MAX_BYTES = 10_000_000
VARIANTS = "mega_moe/_lib/variants.json"
MUST_HOLD = ("mega_moe/__init__.py", "mega_moe/py.typed", LIBRARY, VARIANTS, BUILD, WHEEL_RECORD)
MUST_DESCRIBE = ("licenses/LICENSE", "licenses/NOTICE", finish_wheel.SBOM, "METADATA", "WHEEL", "RECORD")
ALLOWED_FILE = re.compile(
    r"mega_moe/(?!(?:[\w/]+/)?(?:tests?|benchmarks|kernels|__pycache__)/)(?:[\w/]+\.py|py\.typed)"
    r"|mega_moe/_lib/(?:mega_moe_ops\.so|(?:variants|build|wheel)\.json)|mega_moe-[^/]+\.dist-info/.+"
)
BUILD_KEYS = {"version", "cuda", "architectures", "torch_target", "kernels_sha256", "compiler"}


def file_faults(files: dict[str, bytes], info: str) -> Iterator[str]:
    for name in (*MUST_HOLD, *(f"{info}/{name}" for name in MUST_DESCRIBE)):
        if name not in files:
            yield f"{name} is missing"
    for name, content in files.items():
        if not ALLOWED_FILE.fullmatch(name):
            yield f"{name} does not belong into a wheel"
        if name != LIBRARY:
            yield from (f"{name} {fault}" for fault in path_faults(content))


def metadata_faults(metadata: str, wheel: str, build: dict[str, Any], version: str | None) -> Iterator[str]:
    if "Root-Is-Purelib: false" not in wheel:
        yield "WHEEL does not say Root-Is-Purelib: false, but the wheel holds compiled code"
    message = email.message_from_string(metadata)
    floor = f"torch>={build.get('torch_target')}"
    torch = [line for line in message.get_all("Requires-Dist", []) if re.match(r"torch\b(?!-)", line)]
    if torch != [floor]:
        yield f"Requires-Dist for torch is {torch}, must be [{floor!r}], the target of the build and no upper bound"
    if set(build) != BUILD_KEYS:
        yield f"build.json has {sorted(build)}, must have {sorted(BUILD_KEYS)}"
    if link := finish_wheel.RELATIVE_LINK.search(str(message.get_payload())):
        yield f"the description links to {link[2]}, which the package index does not have"
    if version is not None:
        # build.json knows neither a local label such as +cu130 nor the night: the library is of the coming version.
        plain = re.sub(r"(?:\.dev\d+)?(?:\+.*)?$", "", version)
        for place, got, want in (
            ("METADATA", message["Version"], version),
            ("build.json", build.get("version"), plain),
        ):
            if got != want:
                yield f"version in {place} is {got}, in the file name {want}"


def label_faults(
    record: dict[str, Any], bill: dict[str, Any], build: dict[str, Any], version: str
) -> Iterator[str]:
    """Label, wheel.json and bill of materials against what build.json says was compiled."""
    label, told = finish_wheel.label_of(build), version.partition("+")[2]
    if told not in ("", label):
        yield f"label in the file name is +{told}, the library is built with CUDA {build.get('cuda')}"
    if record.get("label") != label:
        yield f"label in wheel.json is {record.get('label')}, must be {label}"
    if not finish_wheel.COMMIT.fullmatch(str(record.get("commit"))):
        yield f"commit in wheel.json is {record.get('commit')}, must be a commit's 40 digits"
    listed = {part["bom-ref"]: part["version"] for part in bill["components"]}
    if listed.get("cuda-runtime") != build.get("cuda") or not listed.get("torch-stable-abi"):
        yield f"the bill of materials lists {listed}, must list the CUDA runtime {build.get('cuda')}"
    if bill["metadata"]["component"]["version"] != version:
        yield f"the bill of materials is of version {bill['metadata']['component']['version']}"


def platform_faults(path: Path, glibc: int, machine: str) -> Iterator[str]:
    """Whether auditwheel grants the platform tag, and without putting another library inside."""
    try:
        oldest, built_for = finish_wheel.granted(path)
    except ValueError as error:
        yield str(error)
    else:
        if oldest > glibc or built_for != machine:
            yield f"tag is for glibc 2.{glibc} on {machine}, auditwheel grants 2.{oldest} on {built_for}"


def architecture_faults(
    cubins: list[str], ptx: list[str], want: set[str], build: dict[str, Any]
) -> Iterator[str]:
    """Cubins by file name as cuobjdump lists them, against both lists of architectures in the wheel."""
    got = {match[1] for name in cubins if (match := re.search(r"\.sm_(\w+)\.cubin$", name))}
    if got != want:
        yield f"cubins are for {sorted(got)}, variants.json lists {sorted(want)}"
    if build.get("architectures") != sorted(want):
        yield f"build.json lists {build.get('architectures')}, variants.json {sorted(want)}"
    yield from (f"holds PTX {name}, which would be compiled on the user's machine" for name in ptx)


def cuobjdump(option: str, library: Path) -> list[str]:
    """File names that `cuobjdump option` lists."""
    # It ends with an error where there is nothing to list.
    run = subprocess.run([tool("cuobjdump"), option, library], capture_output=True, text=True, check=False)
    return re.findall(r"file\s+\d+: (\S+)", run.stdout)


def code_faults(names: list[str], code: object) -> Iterator[str]:
    """Whether wheel.json has the hash of the code of every variant, by which benchmark results are judged."""
    if not isinstance(code, dict) or sorted(code) != sorted(names):
        got = sorted(code) if isinstance(code, dict) else code
        yield f"code in wheel.json is of {got}, variants.json lists {sorted(names)}"
        return
    for name, digest in code.items():
        if not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            yield f"code in wheel.json is {digest!r} for {name}, must be 64 hex digits"


def stable_abi_faults(library: Path, floor: object) -> Iterator[str]:
    """The verdict of torch-abi-audit, which knows in which torch each function of the stable ABI appeared."""
    command = [tool("torch-abi-audit"), str(library), "-v", "--check", "torch"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"Min torch:\s+(\d+)\.(\d+)", run.stdout)
    if run.returncode or match is None:
        yield f"torch-abi-audit: {' '.join((run.stdout + run.stderr).split())}"
    elif (int(match[1]), int(match[2])) > tuple(map(int, str(floor).split("."))):
        yield f"needs torch {match[1]}.{match[2]}, build.json says {floor}"


def library_faults(content: bytes, variants: list[dict[str, Any]], build: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / PurePosixPath(LIBRARY).name
        library.write_bytes(content)
        faults = elf_faults(library)
        faults += stable_abi_faults(library, build.get("torch_target"))
        lists = (cuobjdump(option, library) for option in ("--list-elf", "--list-ptx"))
        faults += architecture_faults(*lists, {variant["architecture"] for variant in variants}, build)
        yield from (f"{library.name} {fault}" for fault in faults)


def check(path: Path) -> list[str]:
    """One line per fault of the wheel at path."""
    match, faults = NAME.fullmatch(path.name), []
    if match is None:
        want = "mega_moe-<version>-py3-none-manylinux_2_<glibc>_<x86_64 or aarch64>.whl"
        faults.append(f"name is {path.name}, must be {want}")
    if path.stat().st_size > MAX_BYTES:
        faults.append(f"size is {path.stat().st_size / 1e6:.1f} MB, must be below {MAX_BYTES / 1e6:.0f} MB")
    files = wheel_file.read(path)
    try:
        info = wheel_file.info_folder(files)
    except ValueError as error:
        return [*faults, str(error)]
    faults += file_faults(files, info)
    if any(fault.endswith(" is missing") for fault in faults):
        return [*faults, "the rest was not judged"]
    build, record, bill, variants = (
        json.loads(files[name]) for name in (BUILD, WHEEL_RECORD, f"{info}/{finish_wheel.SBOM}", VARIANTS)
    )
    metadata, wheel = (files[f"{info}/{name}"].decode() for name in ("METADATA", "WHEEL"))
    faults += wheel_file.record_faults(files)
    faults += metadata_faults(metadata, wheel, build, match["version"] if match else None)
    faults += code_faults([variant["name"] for variant in variants["variants"]], record.get("code"))
    if match:
        faults += label_faults(record, bill, build, match["version"])
        faults += platform_faults(path, int(match["glibc"]), match["machine"])
    return faults + list(library_faults(files[LIBRARY], variants["variants"], build))


# libtorch.so leads to all of torch; the CUDA runtime is inside, and the driver is looked up at run time.
NEEDED = re.compile(
    r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|ld-linux-[a-z0-9-]+\.so\.\d"
)
MUST_NEED = "libtorch.so"
# The C functions of the stable ABI; everything of torch in C++ is mangled and so does not match.
STABLE_SYMBOL = re.compile(r"(?:aoti_torch|torch)_[a-z0-9_]+")
# Null in a torch without CUDA, so they must be weak or the library would not load there.
CUDA_SYMBOL = re.compile(r"(?:aoti_)?torch_\w*(?:cuda|cublas)\w*(?<!device_type_cuda)")
TOOLCHAIN_SYMBOL = re.compile(r"_ITM_\w+|__gmon_start__|__cxa_finalize")
# Folders of the machine that built it.
HOST_PATH = re.compile(rb"/(?:home|root|work|tmp|build|project|Users|opt|usr/local|usr/lib|__w)/[\w.+/-]+")


def needed_faults(needed: list[str]) -> Iterator[str]:
    yield from (
        f"needs {name}, which is not on the list of allowed libraries"
        for name in needed
        if not NEEDED.fullmatch(name)
    )
    if MUST_NEED not in needed:
        yield f"does not need {MUST_NEED}, so its symbols would not be found"


def symbol_faults(name: str, undefined: bool, weak: bool, versioned: bool) -> Iterator[str]:
    if not undefined:
        yield f"exports {name}, must export nothing"
    # Versioned ones belong to the toolchain.
    elif not versioned and not TOOLCHAIN_SYMBOL.fullmatch(name):
        if not STABLE_SYMBOL.fullmatch(name):
            yield f"wants symbol {name}, which is not of torch's stable ABI"
        elif CUDA_SYMBOL.fullmatch(name) and not weak:
            yield f"wants symbol {name} strongly: it would not load in a torch without CUDA"


def path_faults(content: bytes) -> list[str]:
    found = sorted({match.group().decode() for match in HOST_PATH.finditer(content)})
    return [f"holds the path {path} of the machine that built it" for path in found]


def elf_faults(path: Path) -> list[str]:
    """One line per fault of the file at path."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, table = (elf.get_section_by_name(name) for name in (".dynamic", ".dynsym"))
        if dynamic is None or table is None:
            return ["is not a shared library: no dynamic section or symbols"]
        faults = list(needed_faults([tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]))
        for kind in ("DT_RPATH", "DT_RUNPATH"):
            faults += [f"has a {kind}, must have none" for _ in dynamic.iter_tags(kind)]
        versions = elf.get_section_by_name(".gnu.version")
        for number, symbol in enumerate(table.iter_symbols()):
            bind = symbol["st_info"]["bind"]
            if symbol.name and bind != "STB_LOCAL":
                version = versions.get_symbol(number)["ndx"] if versions else ""
                undefined = symbol["st_shndx"] == "SHN_UNDEF"
                faults += symbol_faults(
                    symbol.name, undefined, bind == "STB_WEAK", not isinstance(version, str)
                )
    return faults + path_faults(path.read_bytes())


def main(arguments: list[str]) -> int:
    (path,) = map(Path, arguments)
    faults = check(path)
    print(*faults, f"check_wheel: {path.name}: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
