"""The linters, under this project's settings, refuse planted faults: a setting that lets all pass would go unseen."""

from __future__ import annotations

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
    return subprocess.run([str(TOOLS / program), *rest], cwd=cwd, capture_output=True, text=True, check=False)


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
