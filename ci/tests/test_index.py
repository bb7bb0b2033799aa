"""The generated index: each label its own wheel, hashes that hold, metadata alongside; pip takes and refuses by it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import make_index
import pytest
import wheel_file

from ._helpers import make_wheel, served

TAGS = f"py3-none-manylinux_2_28_{platform.machine()}"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for version in ("0.1.0", "0.2.0"):
        for label in ("cu129", "cu130"):
            make_wheel(tmp_path / "wheels", "mega-moe", f"{version}+{label}", TAGS, "torch>=2.10")
    return tmp_path / "wheels"


def pip(target: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Without the settings of this machine: what is asked of the index shows what the index says."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    options = (
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-deps",
        "--target",
        str(target),
    )
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words],
        env={**kept, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pip_takes_the_wheel_of_the_label_and_refuses_others(wheels: Path, tmp_path: Path) -> None:
    site, other = tmp_path / "site", {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    make_index.make(wheels, site)
    with served(site) as address:
        index = ("--index-url", f"{address}/cu129/")
        assert pip(tmp_path / "new", *index, "mega-moe==0.1.0").returncode == 0
        assert "0.1.0+cu129" in (tmp_path / "new/mega_moe/__init__.py").read_text()
        # Another label, a system with an older glibc, and another kind of machine.
        old = ("--only-binary", ":all:", "--platform")
        for words in (
            ("mega-moe==0.1.0+cu130",),
            (*old, f"manylinux_2_17_{platform.machine()}", "mega-moe==0.1.0"),
            (*old, f"manylinux_2_28_{other}", "mega-moe==0.1.0"),
        ):
            done = pip(tmp_path / "none", *index, *words)
            assert f"No matching distribution found for {words[-1]}" in done.stderr
        # The same wheel with one more file: whole, installable, and not what was published.
        (tampered,) = (site / "cu129/mega-moe").glob("*-0.2.0+cu129-*.whl")
        wheel_file.write(tampered, {**wheel_file.read(tampered), "mega_moe/planted.py": b""})
        assert "DO NOT MATCH THE HASHES" in pip(tmp_path / "none", *index, "mega-moe").stderr
        assert not (tmp_path / "none").exists()


def test_each_link_has_the_hash_of_the_file_and_of_its_metadata(wheels: Path, tmp_path: Path) -> None:
    make_index.make(wheels, tmp_path / "site")
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
        make_index.main([str(wheels), str(tmp_path / "site"), "--files-at", "http://x.example/v{version}/"])
        == 0
    )
    own = tmp_path / "site/cu130/mega-moe"
    assert [path.name for path in own.iterdir()] == ["index.html"]
    link = f'href="http://x.example/v0.2.0/mega_moe-0.2.0%2Bcu130-{TAGS}.whl#sha256='
    assert link in (own / "index.html").read_text()


def test_refuses_no_wheels_and_wheels_without_a_label(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no wheels, want one at least"):
        make_index.make(tmp_path, tmp_path / "out")
    made = make_wheel(tmp_path, "mega-moe", "0.1.0", TAGS)
    with pytest.raises(ValueError, match="version has no label such as"):
        make_index.make(tmp_path, tmp_path / "out")
    made.rename(tmp_path / f"mega_moe-0.3.0+cu130-{TAGS}.whl")
    with pytest.raises(ValueError, match=r"its metadata is of version 0\.1\.0"):
        make_index.make(tmp_path, tmp_path / "out")
