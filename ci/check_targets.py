"""Compile checks of the flavours that this machine cannot build whole: CUDA 12.9, and aarch64.

    python ci/check_targets.py cu129 BUILD_FOLDER             every kernel and every host file against CUDA 12.9
    python ci/check_targets.py aarch64 BUILD_FOLDER RUNTIME   every file with a cross compiler, linked and judged

BUILD_FOLDER is configured by CMake: its compile_commands.json says what is compiled and how. The packages of CUDA 12.9
have no nvcc; its NVRTC compiles the kernels to machine code within their budgets of spills. RUNTIME is the package of
the CUDA runtime for aarch64, whose static library is linked in. No wheel comes out of this and nothing of it runs: the
published wheels are built in their containers. Prints one line per fault and exits 1 when there is any.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check_ptxas
import elf_rules
import nvrtc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
AARCH64 = b"\xb7\x00"  # the machine in an ELF header
INSTANCE = re.compile(
    r"(?P<before>.*)layout::KernelFacts \w+\(\) \{.*?&(?P<kernel>device::[^)]*)\)", re.DOTALL
)


def commands(build: Path) -> list[dict[str, str]]:
    """Compile commands of the library: its instances, host/ and binding/."""
    listed: list[dict[str, str]] = json.loads((build / "compile_commands.json").read_text())
    wanted = [KERNELS / "host", KERNELS / "binding", build / "generated"]
    return [entry for entry in listed if any(folder in Path(entry["file"]).parents for folder in wanted)]


def host_command(entry: dict[str, str], compiler: str, replace: Callable[[str], str]) -> list[str]:
    """The build's own command for a C++ file with another compiler, without its output."""
    words = shlex.split(entry["command"])
    cut = words.index("-o")
    return [compiler, *map(replace, words[1:cut]), *(replace(word) for word in words[cut + 2 :])]


def toolkit_include(entries: list[dict[str, str]]) -> str:
    """The folder that the build takes the CUDA headers from."""
    for entry in entries:
        words = shlex.split(entry["command"])
        for place, word in enumerate(words[:-1]):
            if word == "-isystem" and (Path(words[place + 1]) / "cuda_runtime_api.h").is_file():
                return words[place + 1]
    raise ValueError("no command of the build names a folder with cuda_runtime_api.h")


def run(command: list[str], folder: str) -> list[str]:
    """First errors of a compiler; empty when it succeeds."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    lines = [line for line in done.stderr.splitlines() if "error" in line or "fatal" in line]
    return lines[:3] or [done.stderr.strip()[-300:] or "failed without a word"]


def kernel_faults(
    entries: list[dict[str, str]], budgets: dict[str, int], options: list[str]
) -> Iterator[str]:
    """Each instance by NVRTC, and its spills against its budget."""
    compiler = nvrtc.library()

    def judge(entry: dict[str, str]) -> list[str]:
        path = Path(entry["file"])
        match = INSTANCE.search(path.read_text())
        if match is None:
            return [f"{path.name}: not an instance as generate.py writes it"]
        # A variable that holds its address makes the compiler build the instance, as the launcher's table does.
        source = f"{match['before']}__device__ auto* entry = &{match['kernel']};\n}}\n"
        target = f"--gpu-architecture=sm_{path.parent.name}"
        fine, log = nvrtc.compile_kernel(compiler, source, [target, *options])
        if not fine:
            return [f"{path.name}: {line}" for line in log.splitlines() if "error" in line][:3] or [
                f"{path.name}: {log.strip()[-300:]}"
            ]
        return check_ptxas.problems(path.stem, budgets[path.stem], log)

    with ThreadPoolExecutor(2) as workers:
        for found in workers.map(judge, entries):
            yield from found


def check_cu129(build: Path) -> tuple[list[str], str]:
    entries = commands(build)
    kernels = [entry for entry in entries if entry["file"].endswith(".cu")]
    files = [entry for entry in entries if entry["file"].endswith(".cpp")]
    include = nvrtc.packages() / "cuda_runtime/include"
    if not (include / "cuda_runtime_api.h").is_file():
        raise FileNotFoundError(f"{include}: no headers; they come with the dependency group targets")
    variants = tomllib.loads((KERNELS / "variants.toml").read_text())["variant"]
    budgets = {variant["name"]: variant["spill_bytes"] for variant in variants}
    includes = [include, *(nvrtc.packages() / name / "include" for name in ("cuda_nvcc", "cuda_cccl"))]
    options = [
        "-std=c++17",
        "-default-device",
        "--ptxas-options=-v",
        *(f"-I{path}" for path in [KERNELS, KERNELS / "include", *includes]),
    ]
    faults = list(kernel_faults(kernels, budgets, options))
    current = toolkit_include(files)
    for entry in files:
        command = host_command(entry, "g++", lambda word: word.replace(current, str(include)))
        command += [f"-isystem{path}" for path in includes]
        faults += [
            f"{Path(entry['file']).name}: {line}"
            for line in run([*command, "-fsyntax-only"], entry["directory"])
        ]
    if not kernels or not files:
        faults.append(f"got {len(kernels)} kernels and {len(files)} host files, want some of both")
    return (
        faults,
        f"{len(kernels)} kernels and {len(files)} host files with CUDA {nvrtc.version(nvrtc.library())}",
    )


def cross_command(entry: dict[str, str], include: str) -> list[str]:
    """The build's own command for a file with the cross compiler: nvcc hands the host's part of a kernel to it."""
    words = host_command(entry, CROSS_COMPILER, lambda word: word)
    if not entry["file"].endswith(".cu"):
        return words
    return [shlex.split(entry["command"])[0], f"-ccbin={CROSS_COMPILER}", f"-I{include}", *words[1:]]


def link_aarch64(folder: Path, objects: list[str], runtime: Path) -> list[str]:
    """Faults of the whole library: linked as the build does it, judged as that of a wheel."""
    with zipfile.ZipFile(runtime) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/libcudart_static.a"))
        cudart, torch = folder / "libcudart_static.a", folder / "libtorch.so"
        cudart.write_bytes(archive.read(name))
    (folder / "empty.cpp").write_text("")
    # Of torch only the name is linked; its functions are found when it is loaded.
    faults = run(
        [CROSS_COMPILER, "-shared", "-Wl,-soname,libtorch.so", "-o", str(torch), "empty.cpp"], str(folder)
    )
    library = folder / "mega_moe_ops.so"
    script = f"-Wl,--version-script={KERNELS / 'binding/exports.map'}"
    options = ["-shared", script, "-Wl,--gc-sections", "-o", str(library), *objects, str(cudart)]
    torch_link = ["-Wl,--no-as-needed", str(torch), "-Wl,--as-needed", "-ldl", "-lrt", "-lpthread"]
    faults += run([CROSS_COMPILER, *options, *torch_link], str(folder))
    if faults:
        return faults
    if library.read_bytes()[18:20] != AARCH64:
        faults.append("the library is not one for aarch64")
    return faults + [f"the library {fault}" for fault in elf_rules.library_faults(library)]


def check_aarch64(build: Path, runtime: Path) -> tuple[list[str], str]:
    if shutil.which(CROSS_COMPILER) is None:
        raise FileNotFoundError(
            f"{CROSS_COMPILER}: not on the path; Debian's package is g++-aarch64-linux-gnu"
        )
    if not runtime.is_file():
        raise FileNotFoundError(f"{runtime}: no package of the CUDA runtime for aarch64")
    entries = commands(build)
    if not entries:
        return ["got no files, want some"], ""
    include = toolkit_include(entries)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as workers:
        objects = [str(Path(folder) / f"{number}.o") for number in range(len(entries))]

        def compile_one(entry: dict[str, str], out: str) -> list[str]:
            found = run([*cross_command(entry, include), "-o", out], entry["directory"])
            return [f"{Path(entry['file']).name}: {line}" for line in found]

        faults = [fault for found in workers.map(compile_one, entries, objects) for fault in found]
        faults = faults or link_aarch64(Path(folder), objects, runtime)
    return faults, f"{len(entries)} files with {CROSS_COMPILER}, linked and judged"


def main(arguments: list[str]) -> int:
    checks: dict[tuple[str, int], Callable[..., tuple[list[str], str]]] = {
        ("cu129", 1): check_cu129,
        ("aarch64", 2): check_aarch64,
    }
    target, *paths = arguments or [""]
    if (target, len(paths)) not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        faults, what = checks[target, len(paths)](*(Path(path).resolve() for path in paths))
    except (FileNotFoundError, ValueError) as error:
        print(f"check_targets: {error}", file=sys.stderr)
        return 2
    for fault in faults:
        print(f"check_targets: {target}: {fault}", file=sys.stderr)
    if not faults:
        print(f"check_targets: {target}: {what}: compiles")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
