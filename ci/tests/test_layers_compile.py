"""A forbidden include is a compile error: the build gives each layer only the include folders that it may use."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import find_cuda
import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = [
    ("binding/stage.cpp", "device/ptx/fence.cuh"),
    ("binding/stage.cpp", "host/select.h"),
    ("binding/stage.cpp", "layout/staging.h"),
    ("binding/stage.cpp", "cuda_runtime_api.h"),
    ("host/stage.cpp", "torch/csrc/stable/tensor.h"),
    ("host/stage.cpp", "binding/ops.h"),
    ("host/stage.cpp", "device/ptx/fence.cuh"),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    """How the build compiles each C++ source of the tree: command and folder."""
    cmake, (nvcc, _) = shutil.which("cmake"), find_cuda.find()
    if cmake is None or shutil.which("ninja") is None or nvcc is None:
        pytest.skip("needs cmake, ninja and a CUDA compiler")
    build = tmp_path_factory.mktemp("build")
    options = (f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DPython_EXECUTABLE={sys.executable}")
    command = [cmake, "-S", ROOT / "kernels", "-B", build, "-G", "Ninja", *options]
    subprocess.run(command, check=True, capture_output=True)
    entries = json.loads((build / "compile_commands.json").read_text())
    names = {entry["file"].removeprefix(f"{ROOT}/kernels/"): entry for entry in entries}
    return {name: (shlex.split(entry["command"]), entry["directory"]) for name, entry in names.items()}


def compile_with(command: list[str], folder: str, source: Path) -> subprocess.CompletedProcess[str]:
    """The build's own command, for a changed source, without output."""
    flags = [word for word in command[1 : command.index("-o")] if not word.startswith("-M")]
    build = [command[0], *flags, "-fsyntax-only", source]
    return subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)


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
