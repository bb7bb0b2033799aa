"""The linters, under this project's settings, refuse planted faults: a setting that lets all pass would go unseen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent

HEAD = '"""A module."""\n\nfrom __future__ import annotations\n\n'
RUFF = {
    "import os\n": "F401",
    "def f(x: list[int] = []) -> None:\n    x.append(1)\n": "B006",
    "def f() -> None:\n    try:\n        print()\n    except:\n        pass\n": "E722",
    "x = " + " + ".join("1" * 40) + "\n": "E501",
    "x = 1  # noqa\n": "PGH004",
    'import torch\n\ntorch.ops.load_library("x.so")\n': "TID251",
    'import ctypes\n\nctypes.CDLL("libcuda.so.1")\n': "TID251",
    'import os\n\nflag = os.environ["MEGA_MOE_BACKEND"]\n': "TID251",
    'import os\n\nflag = os.getenv("MEGA_MOE_DEBUG", "")\n': "TID251",
}
MYPY = {
    "def f(x):\n    return x\n": "no-untyped-def",
    "def f(x: dict) -> None: ...\n": "type-arg",
    "x: int = 'a'\n": "assignment",
    "import mega_moe_gone\n": "import-not-found",
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    program, *rest = map(str, command)
    environment = {**os.environ, "PYTHONPATH": str(cwd / "python")}
    command = [str(TOOLS / program), *rest]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python/mega_moe").mkdir(parents=True)
    (tmp_path / "python/mega_moe/__init__.py").write_text(HEAD + "x = 1\n")
    return tmp_path


def test_ruff_refuses_each(tree: Path) -> None:
    assert run("ruff", "check", "--no-cache", ".", cwd=tree).returncode == 0
    for number, code in enumerate(RUFF):
        (tree / f"python/mega_moe/bad{number}.py").write_text(HEAD + code)
    told = run("ruff", "check", "--no-cache", "--output-format=concise", ".", cwd=tree).stdout
    for number, rule in enumerate(RUFF.values()):
        assert re.search(rf"bad{number}\.py:\S* {rule} ", told), told
    (tree / "python/mega_moe/bad.py").write_text(HEAD + "x = {'a':1}\n")
    assert run("ruff", "format", "--no-cache", "--check", "python/mega_moe/bad.py", cwd=tree).returncode == 1


def test_mypy_refuses_each(tree: Path) -> None:
    for number, code in enumerate(MYPY):
        (tree / f"python/mega_moe/bad{number}.py").write_text(HEAD + code)
    told = run("mypy", "--cache-dir", tree / "cache", cwd=tree).stdout
    for number, rule in enumerate(MYPY.values()):
        assert re.search(rf"bad{number}\.py:.*\[{rule}\]", told), told


def test_clang_format_refuses(tree: Path) -> None:
    (tree / "good.cuh").write_text("#pragma once\nint f(int x);\n")
    (tree / "bad.cuh").write_text("#pragma once\nint f( int x ) ;\n")
    assert run("clang-format", "--dry-run", "--Werror", "good.cuh", cwd=tree).returncode == 0
    assert run("clang-format", "--dry-run", "--Werror", "bad.cuh", cwd=tree).returncode == 1


PLANTED_IMPORTS = [
    ("_base/types.py", "import mega_moe._ops.registry", "Calls go down only"),
    ("_ops/registry.py", "from mega_moe._backends.choice import decide", "Calls go down only"),
    ("_backends/build.py", "from mega_moe import api", "Calls go down only"),
    ("api.py", "import mega_moe.demo.config", "Calls go down only"),
    ("nn.py", "import mega_moe.testing", "Calls go down only"),
    ("buffer.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("demo/config.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("_backends/plain/grouped.py", "from mega_moe._backends import build", "A backend knows neither"),
    (
        "_backends/fused/layer.py",
        "from mega_moe._backends.deep_gemm import library",
        "A backend knows neither",
    ),
    (
        "_backends/plain/grouped.py",
        "from mega_moe._backends.plain import reference",
        "The plain backends share",
    ),
    (
        "_backends/deep_gemm/arithmetic.py",
        "import mega_moe._backends.plain.grouped",
        "DeepGEMM's backend knows",
    ),
    ("_backends/choice/decide.py", "import torch", "decide is pure"),
    ("_backends/choice/decide.py", "import os", "decide is pure"),
    ("_backends/choice/decide.py", "from mega_moe._backends.choice import facts", "decide is pure"),
    ("_backends/choice/request.py", "from mega_moe._base import env", "decide is pure"),
    ("_backends/plain/executor.py", "import numpy", "The core needs torch alone"),
    ("demo/config.py", "from mega_moe._ops import library", "The demo is written against the public API"),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package and its contracts, to be spoilt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "python/mega_moe",
        tmp_path / "python/mega_moe",
        ignore=shutil.ignore_patterns("_lib", "__pycache__"),
    )
    return tmp_path


def append(path: Path, line: str) -> None:
    assert path.is_file(), f"the planted line needs {path.name}"
    path.write_text(f"{path.read_text()}\n{line}\n")


def test_the_package_keeps_its_contracts_and_a_module_without_a_place_is_refused(package: Path) -> None:
    answer = run("lint-imports", "--no-cache", "--no-logo", cwd=package)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (package / "python/mega_moe/extra.py").write_text("x = 1\n")
    answer = run("lint-imports", "--no-cache", "--no-logo", cwd=package)
    assert answer.returncode == 1
    assert "extra" in answer.stdout


def test_planted_imports_are_refused(package: Path) -> None:
    """All in one copy, as a look at the package takes seconds: each is named below the contract that it breaks."""
    for module, line, _ in PLANTED_IMPORTS:
        append(package / "python/mega_moe" / module, line)
    answer = run("lint-imports", "--no-cache", "--no-logo", cwd=package)
    assert answer.returncode == 1
    parts = re.split(r"\n(?=[^\n]+\n-{5,}\n)", answer.stdout)
    told = [re.sub(r"\s+", " ", part).strip() for part in parts]  # long lines are wrapped
    for module, line, contract in PLANTED_IMPORTS:
        importer = "mega_moe." + module.removesuffix(".py").replace("/", ".")
        imported = re.sub(r"from (\S+) import (\S+)", r"\1.\2", line).removeprefix("import ")
        (part,) = (text for text in told if text.startswith(contract) and "-----" in text)
        assert f"{importer} -> {imported} (l." in part, answer.stdout
