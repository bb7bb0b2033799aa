"""Compile checks of the flavours that this machine cannot build whole: CUDA 12.9, and aarch64.

    python ci/check_targets.py cu129 BUILD_FOLDER      every kernel and every host file against CUDA 12.9
    python ci/check_targets.py aarch64 BUILD_FOLDER    every file with a cross compiler

BUILD_FOLDER is configured by CMake: its compile_commands.json says what is compiled and how. The packages of CUDA 12.9
have no nvcc; its NVRTC compiles the kernels to machine code within their budgets of spills. No wheel comes out of this
and nothing of it runs: the published wheels are built in their containers. Prints one line per fault and exits 1 when
there is any.
"""

from __future__ import annotations

import ctypes
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import check_ptxas
from matrix import tomllib

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
INSTANCE = re.compile(
    r"(?P<before>.*)layout::KernelFacts \w+\(\) \{.*?&(?P<kernel>device::[^)]*)\)", re.DOTALL
)


class Command:
    """How the build compiles one file of the library."""

    def __init__(self, entry: dict[str, str]) -> None:
        self.file, self.folder = Path(entry["file"]), entry["directory"]
        self.compiler, *words = shlex.split(entry["command"])
        cut = words.index("-o")
        self.words = [*words[:cut], *words[cut + 2 :]]

    def faults(self, *command: str) -> list[str]:
        """First errors of a compiler; empty when it succeeds."""
        run = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        return [] if run.returncode == 0 else self.told(run.stderr)

    def told(self, log: str) -> list[str]:
        lines = [line for line in log.splitlines() if "error" in line or "fatal" in line]
        return [f"{self.file.name}: {line}" for line in lines[:3] or [log.strip()[-300:] or "failed"]]


def commands(build: Path) -> list[Command]:
    """The files of the library: its instances, host/ and binding/; ValueError where the build lists none."""
    listed = json.loads((build / "compile_commands.json").read_text())
    wanted = {KERNELS / "host", KERNELS / "binding", build / "generated"}
    found = [Command(entry) for entry in listed if wanted & set(Path(entry["file"]).parents)]
    if {".cu", ".cpp"} - {command.file.suffix for command in found}:
        raise ValueError(f"{build}: the build lists {len(found)} files, want kernels and host files")
    return found


def toolkit_include(listed: list[Command]) -> str:
    """The folder that the build takes the CUDA headers from."""
    for command in listed:
        for option, folder in zip(command.words, command.words[1:]):
            if option == "-isystem" and (Path(folder) / "cuda_runtime_api.h").is_file():
                return folder
    raise ValueError("no command of the build names a folder with cuda_runtime_api.h")


def kernel_faults(command: Command, budgets: dict[str, int], options: list[str]) -> list[str]:
    """One instance by NVRTC, and its spills against its budget."""
    match = INSTANCE.search(command.file.read_text())
    if match is None:
        return [f"{command.file.name}: not an instance as generate.py writes it"]
    # A variable that holds its address makes the compiler build the instance, as the launcher's table does.
    source = f"{match['before']}__device__ auto* entry = &{match['kernel']};\n}}\n"
    target = f"--gpu-architecture=sm_{command.file.parent.name}"
    fine, log = compile_kernel(source, [target, *options])
    name = command.file.stem
    return check_ptxas.problems(name, budgets[name], log) if fine else command.told(log)


def check_cu129(build: Path) -> Iterator[str]:
    listed = commands(build)
    includes = [cuda_12() / name / "include" for name in ("cuda_runtime", "cuda_nvcc", "cuda_cccl")]
    variants = tomllib.loads((KERNELS / "variants.toml").read_text())["variant"]
    budgets = {variant["name"]: variant["spill_bytes"] for variant in variants}
    options = ["-std=c++17", "-default-device", "--ptxas-options=-v"]
    options += [f"-I{path}" for path in (KERNELS, KERNELS / "include", *includes)]
    current = toolkit_include(listed)

    def judge(command: Command) -> list[str]:
        if command.file.suffix == ".cu":
            return kernel_faults(command, budgets, options)
        words = [word.replace(current, str(includes[0])) for word in command.words]
        return command.faults("g++", *words, *(f"-isystem{path}" for path in includes), "-fsyntax-only")

    with ThreadPoolExecutor(2) as workers:
        for found in workers.map(judge, listed):
            yield from found


def check_aarch64(build: Path) -> Iterator[str]:
    listed = commands(build)
    include = toolkit_include(listed)

    def judge(command: Command) -> list[str]:
        if command.file.suffix == ".cpp":
            return command.faults(CROSS_COMPILER, *command.words, "-o", "/dev/null")
        # nvcc hands the host's part of a kernel to the cross compiler.
        options = (f"-ccbin={CROSS_COMPILER}", f"-I{include}", "-o", "/dev/null")
        return command.faults(command.compiler, *options, *command.words)

    with ThreadPoolExecutor(2) as workers:
        for found in workers.map(judge, listed):
            yield from found


# Headers of the standard library that device code may include. NVRTC brings none; those of CUDA's own library are for
# devices and stand in another namespace.
STANDARD = ("array", "bit", "cmath", "cstddef", "cstdint", "limits", "tuple", "type_traits", "utility")
SHIMS = {
    name: f"#pragma once\n#include <cuda/std/cstddef>\n#include <cuda/std/{name}>\n"
    "namespace std { using namespace cuda::std; }\n"
    for name in STANDARD
} | {"cstring": "#pragma once\n"}  # its functions are built in


def cuda_12() -> Path:
    """Where the cuda_12 of CUDA 12 lie."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


@cache
def nvrtc_library() -> ctypes.CDLL:
    """NVRTC of CUDA 12; FileNotFoundError names the cuda_12."""
    path = cuda_12() / "cuda_nvrtc/lib/libnvrtc.so.12"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; it comes with the dependency group targets")
    return ctypes.CDLL(str(path))


def compile_kernel(source: str, options: list[str]) -> tuple[bool, str]:
    """Whether the kernels of `source` become machine code; and what the compilers said."""
    nvrtc, program, size = nvrtc_library(), ctypes.c_void_p(), ctypes.c_size_t()
    headers, names, words = (
        (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        for texts in (SHIMS.values(), SHIMS, options)
    )
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(SHIMS), headers, names)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # ptxas as a library continues its lines in a way that ptxas as a program does not.
    told = re.sub(r"^ptxas +\. ", "", log.value.decode(errors="replace"), flags=re.MULTILINE)
    return not failed and size.value > 0, told


def main(arguments: list[str]) -> int:
    target, build = arguments
    faults = list({"cu129": check_cu129, "aarch64": check_aarch64}[target](Path(build).resolve()))
    print(*faults, f"check_targets: {target}: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
