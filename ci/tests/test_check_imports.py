"""check_imports passes the package as it is and refuses each planted import and side door."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_imports
import pytest

ROOT = Path(__file__).resolve().parents[2]

PLANTED_IMPORTS = [
    ("_base/types.py", "import mega_moe._ops.registry", "Calls go down only"),
    ("_ops/registry.py", "from mega_moe._backends.choice import decide", "Calls go down only"),
    ("_backends/build.py", "from mega_moe import api", "Calls go down only"),
    ("api.py", "import mega_moe.demo.config", "Calls go down only"),
    ("nn.py", "import mega_moe.testing", "Calls go down only"),
    ("buffer.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("demo/config.py", "import mega_moe.bench.shapes", "Calls go down only"),
    ("_backends/plain/grouped.py", "from mega_moe._backends.choice import decide", "A backend knows neither"),
    (
        "_backends/plain/grouped.py",
        "from mega_moe._backends.plain import reference",
        "The plain backends share dispatch",
    ),
    ("_backends/choice/decide.py", "import torch", "decide is pure"),
    ("_backends/choice/decide.py", "import os", "decide is pure"),
    ("_backends/choice/decide.py", "from mega_moe._backends.choice import facts", "decide is pure"),
    ("_backends/choice/request.py", "from mega_moe._base import env", "decide is pure"),
    ("_backends/plain/executor.py", "import numpy", "The core needs torch alone"),
    ("demo/config.py", "from mega_moe._ops import library", "The demo is written against the public API"),
]

PLANTED_DOORS = [
    ("nn.py", 'torch.ops.load_library("x.so")', "loads a library"),
    ("_backends/choice/facts.py", 'torch.ops.load_library("x.so")', "loads a library"),
    ("_backends/build.py", 'ctypes.CDLL("libcuda.so.1")', "loads a library"),
    ("buffer.py", 'flag = os.environ.get("MEGA_MOE_STRICT")', "touches MEGA_MOE_STRICT"),
    ("demo/config.py", 'flag = os.environ["MEGA_MOE_BACKEND"]', "touches MEGA_MOE_BACKEND"),
    ("api.py", 'flag = os.getenv("MEGA_MOE_DEBUG", "")', "touches MEGA_MOE_DEBUG"),
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


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED_IMPORTS)
def test_planted_import_is_refused(module: str, line: str, contract: str, tree: Path) -> None:
    append(tree / "python/mega_moe" / module, line)
    answer = check_imports.check_contracts(tree)
    broken = [text for text in answer.stdout.splitlines() if " BROKEN" in text]
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert any(text.startswith(contract) for text in broken), answer.stdout


def test_a_module_without_a_place_is_refused(tree: Path) -> None:
    append_to = tree / "python/mega_moe/extra.py"
    append_to.write_text("x = 1\n")
    assert check_imports.main([str(tree)]) == 1


@pytest.mark.parametrize(("module", "line", "fault"), PLANTED_DOORS)
def test_planted_side_door_is_refused(module: str, line: str, fault: str, tree: Path) -> None:
    append(tree / "python/mega_moe" / module, line)
    (found,) = check_imports.check_side_doors(tree)
    assert found.startswith(f"python/mega_moe/{module}:")
    assert fault in found


def test_the_doors_themselves_are_open(tree: Path) -> None:
    append(tree / "python/mega_moe/_ops/library.py", 'torch.ops.load_library("x.so")')
    append(tree / "python/mega_moe/_backends/choice/facts.py", 'ctypes.CDLL("libcuda.so.1")')
    append(tree / "python/mega_moe/_base/env.py", 'os.environ.get("MEGA_MOE_NEW")')
    assert check_imports.check_side_doors(tree) == []
