"""Makes the wheel that is published out of the one that the build wrote.

    python ci/finish_wheel.py WHEEL FOLDER --commit COMMIT [--nightly YYYYMMDD]
    python ci/finish_wheel.py LABELLED_WHEEL FOLDER --strip-label

1. auditwheel gives the platform tag that the binary's symbols allow. It may graft nothing: torch is the user's, and
   nothing else is needed.
2. The version gets the local label of the CUDA version, such as 0.1.0+cu130. The package index refuses labels:
   --strip-label makes the same wheel without one. --nightly, or MEGA_MOE_NIGHTLY, makes it 0.1.0.devYYYYMMDD+cu130.
3. Links of the README into the repository lead nowhere on the package index: they become absolute where the project
   has an address (project.urls, Source), else the words that they stand on.
4. mega_moe/_lib/wheel.json says label, commit and the other flavours, so that errors can name what to install. It
   holds the hash of each kernel's machine code too, by which benchmark results are judged: see kernel_code.py.
5. A bill of materials in dist-info/sboms lists what was linked in.
The same input gives the same bytes. Needs the dependency group `repair`; prints the path of the new wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import kernel_code
import matrix
import wheel_file

LIBRARY = "mega_moe/_lib/mega_moe_ops.so"
BUILD = "mega_moe/_lib/build.json"
# The build's list of the mangled names of each variant's kernels; the published wheel has their hashes instead.
KERNELS = "mega_moe/_lib/kernels.json"
WHEEL_RECORD = "mega_moe/_lib/wheel.json"
SBOM = "sboms/mega-moe.cdx.json"
RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)]*)\)")
COMMIT = re.compile(r"[0-9a-f]{40}(?:\+changes)?|unknown")


def audited(wheel: Path, folder: Path, *options: str) -> Path:
    """What auditwheel makes of the wheel; ValueError where it refuses, or would put another library inside."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch.so", "-w", str(folder)]
    run = subprocess.run([*command, *options, str(wheel)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"auditwheel: {' '.join((run.stderr or run.stdout).strip().splitlines()[-3:])}")
    (repaired,) = folder.glob("*.whl")
    grafted = [name for name in wheel_file.read(repaired) if re.search(r"(?:^|/)[\w.-]+\.libs/", name)]
    if grafted:
        raise ValueError(f"auditwheel grafted {grafted} into the wheel, must be nothing")
    return repaired


def without_platform(wheel: Path, folder: Path) -> Path:
    """A copy that claims no manylinux tag: auditwheel leaves the claims that it finds."""
    head, _, tag = wheel.stem.rpartition("-")
    machine = "aarch64" if tag.endswith("aarch64") else "x86_64"
    files = wheel_file.read(wheel)
    name = f"{wheel_file.info_folder(files)}/WHEEL"
    kept = [line for line in files[name].decode().splitlines() if line and not line.startswith("Tag: ")]
    files[name] = "\n".join([*kept, f"Tag: py3-none-linux_{machine}", ""]).encode()
    path = folder / f"{head}-linux_{machine}.whl"
    wheel_file.write(path, files)
    return path


def granted(wheel: Path) -> tuple[int, str]:
    """The oldest glibc, 2.x as x, and the machine that the symbols of the wheel's library allow, on any machine."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        name = audited(without_platform(wheel, folder / "plain"), folder / "audited").name
    tags = re.findall(r"manylinux_2_(\d+)_([a-z0-9_]+)", name)
    if not tags:
        raise ValueError(f"auditwheel grants no manylinux tag, only {name.split('-', 2)[2]}")
    return min(int(glibc) for glibc, _ in tags), tags[0][1]


def repair(wheel: Path, folder: Path) -> Path:
    """The wheel with one platform tag: that of the matrix, or a later one where the binary needs it."""
    glibc, machine = granted(wheel)
    wanted = max(glibc, int(matrix.load().policy.rpartition("_")[2]))
    return audited(wheel, folder, "--only-plat", "--plat", f"manylinux_2_{wanted}_{machine}")


def label_of(build: dict[str, Any]) -> str:
    return "cu" + str(build["cuda"]).replace(".", "")


def code_of(files: dict[str, bytes]) -> dict[str, str]:
    """sha256 of the machine code of each variant in the wheel that the build wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "mega_moe_ops.so"
        library.write_bytes(files[LIBRARY])
        return kernel_code.of_library(library, json.loads(files[KERNELS]))


def wheel_record(build: dict[str, Any], commit: str, code: dict[str, str]) -> dict[str, Any]:
    flavours = [
        {"label": f.label, "cuda": f.version, "driver": f.driver, "architectures": f.architectures}
        for f in matrix.load().flavours
    ]
    return {"label": label_of(build), "commit": commit, "flavours": flavours, "code": code}


def part(ref: str, name: str, version: str, licence: dict[str, str], **more: Any) -> dict[str, Any]:
    """One component of a CycloneDX bill of materials."""
    named = {"type": "library", "bom-ref": ref, "name": name, "version": version}
    return {**named, "licenses": [{"license": licence}], **more}


def sbom(version: str, build: dict[str, Any], torch: str) -> dict[str, Any]:
    """CycloneDX: this package and what its binary contains of others."""
    package, torch_package = (f"pkg:pypi/mega-moe@{version}", f"pkg:pypi/torch@{torch.partition('+')[0]}")
    # Derived, so that the same wheel has the same number.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{package}?kernels={build['kernels_sha256']}")
    cuda, nvidia = {"name": "CUDA Toolkit End User License Agreement"}, {"name": "NVIDIA Corporation"}
    runtime, stable = "NVIDIA CUDA Runtime (libcudart_static.a)", "PyTorch stable ABI (header files)"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": part(package, "mega-moe", version, {"id": "Apache-2.0"}, purl=package)},
        "components": [
            part("cuda-runtime", runtime, build["cuda"], cuda, supplier=nvidia),
            part("torch-stable-abi", stable, torch, {"id": "BSD-3-Clause"}, purl=torch_package),
        ],
        "dependencies": [{"ref": package, "dependsOn": ["cuda-runtime", "torch-stable-abi"]}],
    }


def as_json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def with_version(files: dict[str, bytes], version: str) -> dict[str, bytes]:
    """The files under another version: its folder's name, its metadata, its bill of materials."""
    info = wheel_file.info_folder(files)
    new = f"mega_moe-{version}.dist-info"
    moved = {re.sub(f"^{re.escape(info)}/", f"{new}/", name): content for name, content in files.items()}
    moved[f"{new}/METADATA"] = re.sub(
        rb"(?m)^Version: .*$", f"Version: {version}".encode(), moved[f"{new}/METADATA"], count=1
    )
    return moved


def with_absolute_links(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with a description whose every link leads somewhere, or is none."""
    name = f"{wheel_file.info_folder(files)}/METADATA"
    head, _, description = files[name].decode().partition("\n\n")
    source = re.search(r"^Project-URL: Source, (\S+)$", head, re.MULTILINE)
    plain = version_of(files).partition("+")[0]
    to = rf"[\1]({source[1]}/blob/v{plain}/\2)" if source else r"\1"
    return {**files, name: f"{head}\n\n{RELATIVE_LINK.sub(to, description)}".encode()}


def version_of(files: dict[str, bytes]) -> str:
    return wheel_file.info_folder(files).removeprefix("mega_moe-").removesuffix(".dist-info")


def save(folder: Path, tags: str, files: dict[str, bytes], torch: str) -> Path:
    version, build = version_of(files), json.loads(files[BUILD])
    files[f"{wheel_file.info_folder(files)}/{SBOM}"] = as_json(sbom(version, build, torch))
    path = folder / f"mega_moe-{version}-{tags}"
    wheel_file.write(path, files)
    return path


def finish(wheel: Path, folder: Path, commit: str, torch: str, nightly: str = "") -> Path:
    """Path of the published form of `wheel` in `folder`; ValueError says what is wrong with the input."""
    if not re.fullmatch(r"(?:\d{8})?", nightly):
        raise ValueError(f"nightly: got {nightly!r}, want a date as YYYYMMDD")
    if not COMMIT.fullmatch(commit):
        raise ValueError(f"commit: got {commit!r}, want 40 digits, with '+changes' where the tree differs")
    with tempfile.TemporaryDirectory() as scratch:
        repaired = repair(wheel, Path(scratch))
        tags = repaired.name.split("-", 2)[2]
        files = wheel_file.read(repaired)
    plain = version_of(files)
    if "+" in plain:
        raise ValueError(f"{wheel.name}: version {plain} has a label already")
    build = json.loads(files[BUILD])
    files[WHEEL_RECORD] = as_json(wheel_record(build, commit, code_of(files)))
    del files[KERNELS]
    version = f"{plain}{f'.dev{nightly}' if nightly else ''}+{label_of(build)}"
    return save(folder, tags, with_absolute_links(with_version(files, version)), torch)


def strip_label(wheel: Path, folder: Path) -> Path:
    """Path of the same wheel without the label, for the package index, which refuses labels."""
    files = wheel_file.read(wheel)
    plain, _, label = version_of(files).partition("+")
    if not label:
        raise ValueError(f"{wheel.name}: version {plain} has no label")
    bill = json.loads(files[f"{wheel_file.info_folder(files)}/{SBOM}"])
    (torch,) = (one["version"] for one in bill["components"] if one["bom-ref"] == "torch-stable-abi")
    return save(folder, wheel.name.split("-", 2)[2], with_version(files, plain), torch)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="finish_wheel", description="Repair, label and describe a wheel.")
    parser.add_argument("wheel", type=Path, help="as the build wrote it, or a labelled one")
    parser.add_argument("folder", type=Path, help="where the new one goes")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--commit", help="what it was built from")
    what.add_argument("--strip-label", action="store_true", help="only take the label off a finished wheel")
    dated = os.environ.get("MEGA_MOE_NIGHTLY", "")
    parser.add_argument("--nightly", metavar="YYYYMMDD", default=dated, help="a version with this date")
    given = parser.parse_args(arguments)
    if given.strip_label:
        print(strip_label(given.wheel, given.folder))
    else:
        print(finish(given.wheel, given.folder, given.commit, metadata.version("torch"), given.nightly))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
