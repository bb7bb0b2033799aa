"""check_imports passes the package as it is and refuses each planted import and side door."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import check_imports
import pytest

ROOT = Path(__file__).resolve().parents[2]

PLANTED_IMPORTS = [
    ("_base/types.py", "import mega_moe._ops.registry", "Calls go down only"),
    ("_ops/registry.py", "from mega_moe._backends import decide", "Calls go down only"),
    ("_backends/plan.py", "from mega_moe import api", "Calls go down only"),
    ("api.py", "import mega_moe.demo.config", "Calls go down only"),
    ("nn.py", "import mega_moe.testing", "Calls go down only"),
    ("buffer.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("demo/config.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("_backends/grouped.py", "from mega_moe._backends import plan", "A backend knows neither"),
    ("_backends/grouped.py", "from mega_moe._backends import reference", "A backend knows neither"),
    ("_backends/decide.py", "import torch", "decide is pure"),
    ("_backends/decide.py", "import os", "decide is pure"),
    ("_backends/decide.py", "from mega_moe._backends import facts", "decide is pure"),
    ("_backends/request.py", "from mega_moe._base import env", "decide is pure"),
    ("_backends/plain.py", "import numpy", "The core needs torch alone"),
    ("demo/config.py", "from mega_moe._ops import library", "The demo is written against the public API"),
]

PLANTED_DOORS = [
    ("nn.py", 'torch.ops.load_library("x.so")', "loads a library"),
    ("_backends/facts.py", 'torch.ops.load_library("x.so")', "loads a library"),
    ("_backends/plan.py", 'ctypes.CDLL("libcuda.so.1")', "loads a library"),
    ("buffer.py", 'flag = os.environ.get("MEGA_MOE_STRICT")', "touches MEGA_MOE_STRICT"),
    ("demo/config.py", 'flag = os.environ["MEGA_MOE_BACKEND"]', "touches MEGA_MOE_BACKEND"),
    ("api.py", 'flag = os.getenv("MEGA_MOE_DEBUG", "")', "touches MEGA_MOE_DEBUG"),
]
OPEN_DOORS = [
    ("_ops/library.py", 'torch.ops.load_library("x.so")'),
    ("_backends/facts.py", 'ctypes.CDLL("libcuda.so.1")'),
    ("_base/env.py", 'os.environ.get("MEGA_MOE_NEW")'),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
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


def test_the_package_keeps_its_contracts(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check_imports.main([str(tree)]) == 0, capfd.readouterr().out


def test_planted_imports_are_refused(tree: Path) -> None:
    """All in one copy, as a look at the package takes seconds: each is named below the contract that it breaks."""
    for module, line, _ in PLANTED_IMPORTS:
        append(tree / "python/mega_moe" / module, line)
    answer = check_imports.check_contracts(tree)
    assert answer.returncode == 1
    told: dict[str, str] = {}
    for part in re.split(r"\n(?=[^\n]+\n-{5,}\n)", answer.stdout):
        told[part.strip().partition("\n")[0]] = part
    for module, line, contract in PLANTED_IMPORTS:
        importer = "mega_moe." + module.removesuffix(".py").replace("/", ".")
        imported = re.sub(r"from (\S+) import (\S+)", r"\1.\2", line).removeprefix("import ")
        (part,) = (text for name, text in told.items() if name.startswith(contract))
        assert f"{importer} -> {imported} (l." in part, answer.stdout


def test_a_module_without_a_place_is_refused(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tree / "python/mega_moe/extra.py").write_text("x = 1\n")
    assert check_imports.main([str(tree)]) == 1
    assert "extra" in capfd.readouterr().out


def test_planted_side_doors_are_refused_and_the_doors_themselves_are_open(tree: Path) -> None:
    for module, line in OPEN_DOORS:
        append(tree / "python/mega_moe" / module, line)
    assert check_imports.check_side_doors(tree) == []
    for module, line, _ in PLANTED_DOORS:
        append(tree / "python/mega_moe" / module, line)
    found = check_imports.check_side_doors(tree)
    assert len(found) == len(PLANTED_DOORS)
    for module, _, fault in PLANTED_DOORS:
        assert [line for line in found if line.startswith(f"python/mega_moe/{module}:") and fault in line]
