"""A forbidden include does not compile, or is refused by check_layers: each kind is planted once."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import check_layers
import find_cuda
import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# File, header planted in it, and what the gate says. A name in <> is a header from outside.
PLANTED = """
binding/check.cpp               <ATen/ATen.h>                   not of torch's stable ABI
binding/check.cpp               <Python.h>                      not of torch's stable ABI
binding/check.cpp               <torch/csrc/autograd/edge.h>    not of torch's stable ABI
host/select.cpp                 ../device/common/macros.cuh     a relative path
include/mega_moe/route.h        layout/tiles.h                  include may not know layout
include/mega_moe/route.h        <cuda_runtime_api.h>            include may see the standard library alone
layout/tiles.h                  <cuda.h>                        layout may see the standard library alone
device/comm/wait.cuh            <cutlass/cutlass.h>             may see the standard library alone
device/dispatch/source.cuh      mega_moe/status.h               may not know mega_moe
device/dispatch/source.cuh      host/variant.h                  may not know host
device/dispatch/source.cuh      device/kernel/sm90_route.cuh    may not know device/kernel
device/dispatch/source.cuh      device/sm90/smem.cuh            may not know device/sm90
device/dispatch/source.cuh      device/combine/combine.cuh      may not know device/combine
device/combine/sum_rows.cuh     device/dispatch/pull.cuh        may not know device/dispatch
device/schedule/record.cuh      device/quantize/weights.cuh     may not know device/quantize
device/quantize/weights.cuh     device/dispatch/source.cuh      may not know device/dispatch
device/route/ids.cuh            device/schedule/record.cuh      may not know device/schedule
device/comm/wait.cuh            device/route/ids.cuh            may not know device/route
device/common/macros.cuh        device/comm/wait.cuh            may not know device/comm
device/ptx/e4m3.cuh             device/common/macros.cuh        may not know device/common
device/schedule/record.cuh      device/ptx/wgmma.cuh            the tensor core of device/sm90
device/sm100/new.cuh            device/ptx/wgmma.cuh            the tensor core of device/sm90
device/sm100/new.cuh            device/sm90/smem.cuh            may not know device/sm90
device/extra/new.cuh            device/ptx/e4m3.cuh             has no place in the order
layout/tiles.h                  device/common/macros.cuh        layout may not know device/common
layout/tiles.h                  mega_moe/route.h                layout may not know mega_moe
"""
ROWS = [line.split(maxsplit=2) for line in PLANTED.strip().splitlines()]


@pytest.mark.parametrize(("file", "header", "reason"), ROWS)
def test_refuses(file: str, header: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"  #  include {header}\n" if "<" in header else f'#include "{header}"\n')
    (fault,) = check_layers.check(tmp_path)
    assert fault.startswith(f"{file}: {header.strip('<>')}: ")
    assert reason in fault


def test_the_sources_pass_and_every_layer_may_know_the_words_of_a_call() -> None:
    assert check_layers.check(KERNELS) == []
    for file in ("layout/tiles.h", "device/ptx/e4m3.cuh", "host/select.cpp"):
        for name in check_layers.WORDS:
            assert check_layers.fault_of(file, '"', name) is None


def test_refuses_cycles_and_an_empty_folder(tmp_path: Path) -> None:
    assert check_layers.main([str(tmp_path)]) == 1
    (tmp_path / "layout").mkdir()
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"layout/{name}.h").write_text(f'#include "layout/{other}.h"\n')
    (fault,) = check_layers.check(tmp_path)
    assert fault.startswith("cycle: layout/")


FORBIDDEN = [
    ("binding/route.cpp", "device/ptx/fence.cuh"),
    ("binding/route.cpp", "host/select.h"),
    ("binding/route.cpp", "layout/tiles.h"),
    ("binding/route.cpp", "cuda_runtime_api.h"),
    ("host/route.cpp", "torch/csrc/stable/tensor.h"),
    ("host/route.cpp", "binding/ops.h"),
    ("host/route.cpp", "device/ptx/fence.cuh"),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    """How the build compiles each C++ source of the tree: command and folder."""
    cmake, (nvcc, _) = shutil.which("cmake"), find_cuda.find()
    if cmake is None or shutil.which("ninja") is None or nvcc is None:
        pytest.skip("needs cmake, ninja and a CUDA compiler")
    build = tmp_path_factory.mktemp("build")
    options = (f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DPython_EXECUTABLE={sys.executable}")
    command = [cmake, "-S", KERNELS, "-B", build, "-G", "Ninja", *options]
    subprocess.run(command, check=True, capture_output=True)
    entries = json.loads((build / "compile_commands.json").read_text())
    names = {entry["file"].removeprefix(f"{KERNELS}/"): entry for entry in entries}
    return {name: (shlex.split(entry["command"]), entry["directory"]) for name, entry in names.items()}


def compile_with(command: list[str], folder: str, source: Path) -> subprocess.CompletedProcess[str]:
    """The build's own command, for a changed source, without output."""
    flags = [word for word in command[1 : command.index("-o")] if not word.startswith("-M")]
    build = [command[0], *flags, "-fsyntax-only", source]
    return subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", sorted({file for file, _ in FORBIDDEN}))
def test_the_sources_compile(commands: dict[str, tuple[list[str], str]], file: str) -> None:
    run = compile_with(*commands[file], KERNELS / file)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("file", "header"), FORBIDDEN)
def test_a_forbidden_include_does_not_compile(
    commands: dict[str, tuple[list[str], str]], tmp_path: Path, file: str, header: str
) -> None:
    source = tmp_path / "planted.cpp"
    source.write_text(f'#include "{header}"\n{(KERNELS / file).read_text()}')
    run = compile_with(*commands[file], source)
    assert run.returncode != 0
    assert f"{header}: No such file or directory" in run.stderr
