"""check_tree refuses each planted fault and passes a clean tree."""

from __future__ import annotations

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


@pytest.mark.parametrize("line", PLANTED)
def test_planted_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"first = 1\n{line}\n")
    faults = check_tree.check_file(tmp_path / "a.py", "a.py")
    assert [fault.split(": ")[:2] for fault in faults] == [["a.py:2", PLANTED[line]]]
    assert check_tree.main([str(tmp_path)]) == 1


@pytest.mark.parametrize("line", CLEAN)
def test_harmless_line_passes(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(f"{line}\n")
    assert check_tree.main([str(tmp_path)]) == 0


def test_length_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x\n" * 500)
    assert check_tree.main([str(tmp_path)]) == 0
    (tmp_path / "a.py").write_text("x\n" * 501)
    assert check_tree.main([str(tmp_path)]) == 1
    (tmp_path / "a.py").rename(tmp_path / "a.json")
    assert check_tree.main([str(tmp_path)]) == 0


def test_ignored_folders_are_not_read_and_an_empty_tree_is_no_pass(tmp_path: Path) -> None:
    assert check_tree.main([str(tmp_path)]) == 1
    (tmp_path / ".git").write_text("gitdir: /ho" + "me/someone/.git")
    assert check_tree.main([str(tmp_path)]) == 1  # no file of the tree, so still nothing was read
    (tmp_path / ".gitignore").write_text("build/\ndeep/inside/\n")
    for folder in ("build", "deep/build", "deep/inside"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("TO" + "DO\n")
    assert check_tree.main([str(tmp_path)]) == 0
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.py").write_text("TO" + "DO\n")
    assert check_tree.main([str(tmp_path)]) == 1
