"""The contracts of import-linter hold for the package as it is, and refuse each planted import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """As the session `layers` does it."""
    program = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": str(tree / "python")}
    command = [program, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def test_the_package_keeps_its_contracts_and_a_module_without_a_place_is_refused(tree: Path) -> None:
    answer = lint(tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (tree / "python/mega_moe/extra.py").write_text("x = 1\n")
    answer = lint(tree)
    assert answer.returncode == 1
    assert "extra" in answer.stdout


def test_planted_imports_are_refused(tree: Path) -> None:
    """All in one copy, as a look at the package takes seconds: each is named below the contract that it breaks."""
    for module, line, _ in PLANTED_IMPORTS:
        append(tree / "python/mega_moe" / module, line)
    answer = lint(tree)
    assert answer.returncode == 1
    told = [part.strip() for part in re.split(r"\n(?=[^\n]+\n-{5,}\n)", answer.stdout)]
    for module, line, contract in PLANTED_IMPORTS:
        importer = "mega_moe." + module.removesuffix(".py").replace("/", ".")
        imported = re.sub(r"from (\S+) import (\S+)", r"\1.\2", line).removeprefix("import ")
        (part,) = (text for text in told if text.startswith(contract) and "-----" in text)
        assert f"{importer} -> {imported} (l." in part, answer.stdout
