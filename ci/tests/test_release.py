"""The release check lets a whole release pass and refuses each kind of incomplete one."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import finish_wheel
import matrix
import pytest
import release
import wheel_file

from ._helpers import make_wheel

COMMIT = "0123456789" * 4


def describe(path: Path, commit: str = COMMIT, kernels: str = "a") -> None:
    files = wheel_file.read(path)
    files[finish_wheel.WHEEL_RECORD] = json.dumps({"commit": commit}).encode()
    files[finish_wheel.BUILD] = json.dumps({"kernels_sha256": kernels}).encode()
    wheel_file.write(path, files)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree at version 0.1.0 with a dated changelog, and under files/ every file of its release."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0, 2026-12-01\n\n- First.\n\n## 0.0.9, x\n")
    (tmp_path / "files").mkdir()
    for name in release.wanted_names(matrix.load(), "0.1.0"):
        if name.endswith(".whl"):
            _, version, tags = name.removesuffix(".whl").split("-", 2)
            describe(make_wheel(tmp_path / "files", "mega-moe", version, tags))
        else:
            (tmp_path / "files" / name).touch()
    return tmp_path


def faults(tree: Path, tag: str = "v0.1.0", judge: Callable[[Path], list[str]] = lambda _: []) -> list[str]:
    return release.faults_of(tree / "files", tag, COMMIT, judge, tree)


def test_a_whole_release_passes_and_every_wheel_is_judged(tree: Path) -> None:
    assert len(list((tree / "files").glob("*.whl"))) == 2
    assert faults(tree) == []
    found = faults(tree, judge=lambda path: ["is heavy"] if "cu130" in path.name else [])
    assert [fault.split(": ")[1] for fault in found] == ["is heavy"]


@pytest.mark.parametrize("name", ["+cu130-*x86_64.whl", "-py3-none-*x86_64.whl", ".tar.gz"])
def test_refuses_a_hole(tree: Path, name: str) -> None:
    (missing,) = (tree / "files").glob(f"mega_moe-0.1.0{name}")
    missing.rename(missing.with_name(missing.name.replace("0.1.0", "0.2.0")))
    assert faults(tree) == [
        f"a hole in the release: {missing.name} is missing",
        f"{missing.name.replace('0.1.0', '0.2.0')} does not belong into the release",
    ]


def test_refuses_another_version(tree: Path) -> None:
    found = faults(tree, "v0.2.0")
    assert "tag is v0.2.0, pyproject.toml says version 0.1.0" in found
    assert sum("a hole in the release" in fault for fault in found) == 3


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
def test_refuses_a_changelog_that_says_nothing(tree: Path, text: str, fault: str) -> None:
    (tree / "CHANGELOG.md").write_text(text)
    (found,) = release.faults_of(None, "v0.1.0", None, lambda _: [], tree)
    assert fault in found


def test_refuses_wheels_of_several_sources(tree: Path) -> None:
    first, second = sorted((tree / "files").glob("*.whl"))
    describe(first, commit=COMMIT + "+changes")
    assert f"{first.name}: built from {COMMIT}+changes, must be a clean commit" in faults(tree)
    describe(first, commit=COMMIT[::-1])
    assert any(f"the release is of {COMMIT}" in fault for fault in faults(tree))
    describe(first)
    describe(second, kernels="b")
    assert faults(tree) == ["wheels come from 1 commits and 2 states of kernels/, must be one"]


def test_the_command_refuses_this_tree_without_wheels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["check", str(tmp_path), "--tag", "v9.9.9"]) == 1
    assert "a hole in the release" in capsys.readouterr().out


def test_the_files_of_a_release(wheel: Path, tmp_path: Path) -> None:
    """Labelled wheels in; out come those and the default flavour without labels, with sums that hold."""
    shutil.copytree(wheel.parent, tmp_path / "built")
    (tmp_path / "built/mega_moe-0.1.0.tar.gz").write_bytes(b"source")
    release.main(["lay-out", str(tmp_path / "built"), str(tmp_path / "out")])
    names = {wheel.name, f"{wheel.name}.metadata", wheel.name.replace("+cu130", ""), "mega_moe-0.1.0.tar.gz"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "SHA256SUMS"}
    for line in (tmp_path / "out/SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    with pytest.raises(ValueError, match="got no wheels, want one at least"):
        release.lay_out(tmp_path / "out" / "none", tmp_path / "out")


TAGS = f"py3-none-manylinux_2_28_{platform.machine()}"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for version in ("0.1.0", "0.2.0"):
        for label in ("cu129", "cu130"):
            make_wheel(tmp_path / "wheels", "mega-moe", f"{version}+{label}", TAGS, "torch>=2.10")
    return tmp_path / "wheels"


def test_each_link_has_the_hash_of_the_file_and_of_its_metadata(wheels: Path, tmp_path: Path) -> None:
    release.make_index(wheels, tmp_path / "site")
    own = tmp_path / "site/cu130/mega-moe"
    links = re.findall(
        r'<a href="(.*?)#sha256=(\w+)" data-requires-python="&gt;=3.10" data-core-metadata="sha256=(\w+)"',
        (own / "index.html").read_text(),
    )
    assert len(links) == 2
    for name, digest, metadata in links:
        path = own / name.replace("%2B", "+")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        assert hashlib.sha256((own / f"{path.name}.metadata").read_bytes()).hexdigest() == metadata


def test_files_of_a_release_are_linked_where_they_are(wheels: Path, tmp_path: Path) -> None:
    assert (
        release.main(
            ["index", str(wheels), str(tmp_path / "site"), "--files-at", "http://x.example/v{version}/"]
        )
        == 0
    )
    own = tmp_path / "site/cu130/mega-moe"
    assert [path.name for path in own.iterdir()] == ["index.html"]
    link = f'href="http://x.example/v0.2.0/mega_moe-0.2.0%2Bcu130-{TAGS}.whl#sha256='
    assert link in (own / "index.html").read_text()


def test_refuses_no_wheels_and_wheels_without_a_label(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no wheels, want one at least"):
        release.make_index(tmp_path, tmp_path / "out")
    made = make_wheel(tmp_path, "mega-moe", "0.1.0", TAGS)
    with pytest.raises(ValueError, match="version has no label such as"):
        release.make_index(tmp_path, tmp_path / "out")
    made.rename(tmp_path / f"mega_moe-0.3.0+cu130-{TAGS}.whl")
    with pytest.raises(ValueError, match=r"its metadata is of version 0\.1\.0"):
        release.make_index(tmp_path, tmp_path / "out")
