"""check_release lets a whole release pass and refuses each kind of incomplete one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import check_release
import finish_wheel
import matrix
import pytest
import release_files
import wheel_file

from ._index import made_up_wheel

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789" * 4


def add_record(path: Path, commit: str = COMMIT, kernels: str = "a") -> None:
    files = wheel_file.read(path)
    label = path.name.split("-")[1].partition("+")[2] or matrix.load().default
    files[finish_wheel.WHEEL_RECORD] = json.dumps({"label": label, "commit": commit}).encode()
    files[finish_wheel.BUILD] = json.dumps({"kernels_sha256": kernels}).encode()
    wheel_file.write(path, files)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A tree at version 0.1.0 with a dated changelog, and under files/ every wheel of its release."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci/matrix.toml", tmp_path / "ci")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0, 2026-12-01\n\n- First.\n\n## 0.0.9, x\n")
    for name in check_release.wanted_names(matrix.load(), "0.1.0"):
        _, version, tags = name.removesuffix(".whl").split("-", 2)
        add_record(made_up_wheel(tmp_path / "files", "mega-moe", version, tags))
    (tmp_path / "files/mega_moe-0.1.0.tar.gz").touch()
    return tmp_path


def faults(release: Path, tag: str = "v0.1.0", judge: Callable[[Path], list[str]] | None = None) -> list[str]:
    return check_release.faults_of(release / "files", tag, COMMIT, judge or (lambda path: []), release)


def test_a_whole_release_passes(release: Path) -> None:
    assert len(list((release / "files").glob("*.whl"))) == 2
    assert faults(release) == []


@pytest.mark.parametrize("kind", ["+cu130-*x86_64", "-py3-none-*x86_64"])
def test_refuses_a_hole(release: Path, kind: str) -> None:
    (missing,) = (release / "files").glob(f"mega_moe-0.1.0{kind}.whl")
    missing.unlink()
    assert faults(release) == [f"a hole in the matrix: {missing.name} is missing"]


@pytest.mark.parametrize("name", [None, "mega_moe-0.2.0.tar.gz"])
def test_refuses_a_release_without_its_source_package(release: Path, name: str | None) -> None:
    (release / "files/mega_moe-0.1.0.tar.gz").unlink()
    if name is not None:
        (release / "files" / name).touch()
    (found,) = faults(release)
    assert found == f"source packages are {[name] if name else []}, must be mega_moe-0.1.0.tar.gz"


def test_refuses_a_wheel_too_many(release: Path) -> None:
    for version, tags in (("0.1.0+cu128", "manylinux_2_28_x86_64"), ("0.1.0+cu130", "linux_x86_64")):
        made_up_wheel(release / "files", "mega-moe", version, f"py3-none-{tags}")
    assert [fault.split(" is ")[1] for fault in faults(release)] == ["not in the matrix"] * 2


def test_refuses_another_version(release: Path) -> None:
    found = faults(release, "v0.2.0")
    assert "tag is v0.2.0, pyproject.toml says version 0.1.0" in found
    assert sum("a hole in the matrix" in fault for fault in found) == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# Changelog\n", "has 0 entries of 0.1.0, must have one"),
        ("## 0.1.0.1, 2026-12-01\n\n- a\n", "has 0 entries of 0.1.0, must have one"),
        ("## 0.1.0, not released\n\n- a\n", "heading is '0.1.0, not released', must be '0.1.0, YYYY-MM-DD'"),
        ("## 0.1.0, 2026-12-01\n\nsoon\n\n## 0.0.9\n\n- a\n", "the entry of 0.1.0 lists nothing"),
        ("## 0.1.0, 2026-12-01\n\n- a\n## 0.1.0, 2026-12-02\n\n- a\n", "has 2 entries of 0.1.0"),
    ],
)
def test_refuses_a_changelog_that_says_nothing(release: Path, text: str, fault: str) -> None:
    (release / "CHANGELOG.md").write_text(text)
    (found,) = faults(release)
    assert fault in found


def test_refuses_wheels_of_several_sources(release: Path) -> None:
    first, second, *_ = sorted((release / "files").glob("*.whl"))
    add_record(first, commit=COMMIT + "+changes")
    found = faults(release)
    assert f"{first.name}: built from {COMMIT}+changes, must be a clean commit" in found
    add_record(first, commit=COMMIT[::-1])
    assert any(f"the release is of {COMMIT}" in fault for fault in faults(release))
    add_record(first)
    add_record(second, kernels="b")
    assert faults(release) == ["wheels come from 1 commits and 2 states of kernels/, must be one"]


def test_every_wheel_is_judged(release: Path) -> None:
    found = faults(release, judge=lambda path: ["is heavy"] if "cu130" in path.name else [])
    assert [fault.split(": ")[1] for fault in found] == ["is heavy"]


def test_the_command_refuses_this_tree_without_wheels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_release.main([str(tmp_path), "--tag", "v9.9.9"]) == 1
    assert "a hole in the matrix" in capsys.readouterr().err


def test_the_files_of_a_release(release: Path, tmp_path: Path) -> None:
    """Labelled wheels in; out come those and the default flavour without labels, with sums that hold."""
    built = list((ROOT / "dist").glob("*.whl"))
    if len(built) != 1:
        pytest.skip(f"dist/ holds {len(built)} wheels, this needs the one that `nox -s wheel` builds")
    shutil.copytree(ROOT / "dist", tmp_path / "built")
    (tmp_path / "built/mega_moe-0.1.0.tar.gz").write_bytes(b"source")
    files = release_files.lay_out(tmp_path / "built", tmp_path / "out")
    label = built[0].name.split("-")[1].partition("+")[2]
    names = {path.name for path in files}
    assert built[0].name in names
    assert built[0].name.replace(f"+{label}", "") in names
    assert f"{built[0].name}.metadata" in names
    assert "mega_moe-0.1.0.tar.gz" in names
    for line in (tmp_path / "out/SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    (tmp_path / "none").mkdir()
    assert release_files.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1
