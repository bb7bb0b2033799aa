"""check_tree refuses each planted fault and passes a clean tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import check_tree
import pytest

# Put together from parts, so that this file itself passes the gate.
PLANTED = {
    "TO" + "DO: later": "left-over marker",
    "x = 1  # FIX" + "ME": "left-over marker",
    "<" * 7 + " HEAD": "left-over marker",
    "    break" + "point()": "left-over marker",
    "see /ho" + "me/someone/notes": "path of one machine",
    "cp /ro" + "ot/x .": "path of one machine",
    "pip install --extra-index-" + "url https://host/cpu x": "address of a package index",
    "from https://host.example/sim" + "ple/ it comes": "address of a package index",
    "as seen in #" + "1234 before": "number of a tracker's entry",
    "see iss" + "ue 12": "number of a tracker's entry",
}

CLEAN = [
    "#include <cuda.h>",
    "colour #ffffff",
    "a path: python/mega_moe/api.py",
    "/usr/local/cuda/bin",
    "{root}/wo" + "rk/x",
    "an issue of order",
    "x[::-1]  # 4 rows",
    "https://example.org/page",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


@pytest.mark.parametrize("line", PLANTED)
def test_planted_line_is_refused(line: str, tree: Path) -> None:
    (tree / "a.py").write_text(f"first = 1\n{line}\n")
    faults = check_tree.check_file(tree / "a.py", "a.py")
    assert [fault.split(": ")[:2] for fault in faults] == [["a.py:2", PLANTED[line]]]
    assert check_tree.main([str(tree)]) == 1


def test_harmless_lines_pass(tree: Path) -> None:
    (tree / "a.py").write_text("\n".join(CLEAN))
    assert check_tree.main([str(tree)]) == 0


def test_length_is_bounded(tree: Path) -> None:
    (tree / "a.py").write_text("x\n" * 500)
    assert check_tree.main([str(tree)]) == 0
    (tree / "a.py").write_text("x\n" * 501)
    assert check_tree.main([str(tree)]) == 1
    (tree / "a.py").rename(tree / "a.json")
    assert check_tree.main([str(tree)]) == 0


def test_ignored_files_are_not_read_and_an_empty_tree_is_no_pass(tree: Path) -> None:
    assert check_tree.main([str(tree)]) == 1
    (tree / ".gitignore").write_text("build/\n")
    (tree / "build").mkdir()
    (tree / "build" / "a.py").write_text("TO" + "DO\n")
    assert check_tree.main([str(tree)]) == 0
