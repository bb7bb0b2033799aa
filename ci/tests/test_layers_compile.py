"""A forbidden include is a compile error: the build gives each layer only the include folders that it may use."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import find_cuda
import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = [
    ("binding/route.cpp", "device/ptx/fence.cuh"),
    ("binding/route.cpp", "host/select.h"),
    ("binding/route.cpp", "layout/parts.h"),
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
    subprocess.run(
        [
            *(cmake, "-S", ROOT / "kernels", "-B", build, "-G", "Ninja"),
            *(f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DPython_EXECUTABLE={sys.executable}"),
        ],
        check=True,
        capture_output=True,
    )
    entries = json.loads((build / "compile_commands.json").read_text())
    return {
        Path(entry["file"]).relative_to(ROOT / "kernels").as_posix(): (
            shlex.split(entry["command"]),
            entry["directory"],
        )
        for entry in entries
        if entry["file"].endswith(".cpp")
    }


def compile_with(command: list[str], folder: str, source: Path) -> subprocess.CompletedProcess[str]:
    """The build's own command, for a changed source, without output."""
    at = command.index("-c")
    flags = [word for word in command[1:at] if not word.startswith("-M")]
    return subprocess.run(
        [command[0], *flags[: flags.index("-o")], "-fsyntax-only", source],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_machine_without_a_cuda_compiler_is_told_what_to_do(tmp_path: Path) -> None:
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("needs cmake and ninja")
    command = ["cmake", "-S", ROOT / "kernels", "-B", tmp_path, "-G", "Ninja"]
    environment = {**os.environ, "CUDACXX": "/nonexistent/nvcc"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "no CUDA compiler. Put nvcc 12.9 or later on the path" in " ".join(run.stderr.split())
    assert "MEGA_MOE_BUILD_KERNELS=0" in run.stderr


@pytest.mark.parametrize("file", sorted({file for file, _ in FORBIDDEN}))
def test_the_sources_compile(commands: dict[str, tuple[list[str], str]], file: str) -> None:
    run = compile_with(*commands[file], ROOT / "kernels" / file)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("file", "header"), FORBIDDEN)
def test_a_forbidden_include_does_not_compile(
    commands: dict[str, tuple[list[str], str]], tmp_path: Path, file: str, header: str
) -> None:
    source = tmp_path / "planted.cpp"
    source.write_text(f'#include "{header}"\n{(ROOT / "kernels" / file).read_text()}')
    run = compile_with(*commands[file], source)
    assert run.returncode != 0
    assert f"{header}: No such file or directory" in run.stderr
