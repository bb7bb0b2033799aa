"""The generated index serves pip and uv: each label its own wheel, pins that hold, tampered files refused."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import make_index
import pytest
import wheel_file

from ._index import made_up_wheel, served

ROOT = Path(__file__).resolve().parents[2]
TAGS = f"py3-none-manylinux_2_28_{platform.machine()}"
LABELS = ("cu129", "cu130")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    for version in ("0.1.0", "0.2.0"):
        for label in LABELS:
            made_up_wheel(folder, "mega-moe", f"{version}+{label}", TAGS, "torch>=2.10")
    return folder


@pytest.fixture
def site(wheels: Path, tmp_path: Path) -> Path:
    """What a server shows: the index, and under torch/ another one, which stands for where torch comes from."""
    make_index.make(wheels, tmp_path / "site")
    torch = tmp_path / "site/torch/torch"
    made = made_up_wheel(torch, "torch", "2.13.0", "py3-none-any")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    (torch / "index.html").write_text(f'<a href="{made.name}#sha256={digest}">{made.name}</a>')
    return tmp_path / "site"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without the settings of this machine: what is asked of the index shows what the index says."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    # UV_PYTHON: else uv starts every Python of the machine, to see which one it takes.
    clean = {
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(cwd / "cache"),
        "UV_PYTHON": sys.executable,
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **clean, "PIP_NO_CACHE_DIR": "1", "UV_PYTHON_DOWNLOADS": "never"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def pip(target: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options = ("--quiet", "--disable-pip-version-check", "--target", str(target))
    return run(sys.executable, "-m", "pip", "install", *options, *words, cwd=target.parent)


def uv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "uv", *words, cwd=folder)


def version_in(site_packages: Path) -> str:
    text = (site_packages / "mega_moe/__init__.py").read_text()
    return text.split("'")[1]


def tamper(path: Path) -> None:
    """The same wheel with one more file: whole, installable, and not what was published."""
    files = wheel_file.read(path)
    files["mega_moe/planted.py"] = b""
    wheel_file.write(path, files)


@pytest.mark.parametrize(("label", "as_json"), [("cu129", False), ("cu130", True)])
def test_pip_takes_the_wheel_of_the_label(site: Path, tmp_path: Path, label: str, as_json: bool) -> None:
    with served(site, as_json) as (address, asked):
        indexes = ("--index-url", f"{address}/{label}/", "--extra-index-url", f"{address}/torch/")
        done = pip(tmp_path / "new", *indexes, "mega-moe==0.1.0")
        assert done.returncode == 0, done.stderr
        assert version_in(tmp_path / "new") == f"0.1.0+{label}"
        assert (tmp_path / "new/torch").is_dir()
        # Metadata from alongside the wheel: the choice costs no download.
        assert any(path.endswith(".whl.metadata") for path in asked)
        done = pip(tmp_path / "newest", *indexes, "mega-moe")
        assert version_in(tmp_path / "newest") == f"0.2.0+{label}", done.stderr


def test_pip_refuses_what_is_not_there(site: Path, tmp_path: Path) -> None:
    with served(site) as (address, _):
        index = ("--index-url", f"{address}/cu129/", "--no-deps")
        done = pip(tmp_path / "new", *index, "mega-moe==0.1.0+cu130")
        assert done.returncode == 1
        assert "No matching distribution found for mega-moe==0.1.0+cu130" in done.stderr
        # A system with an older glibc, and another kind of machine.
        other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
        for system in (f"manylinux_2_17_{platform.machine()}", f"manylinux_2_28_{other}"):
            words = ("--platform", system, "--only-binary", ":all:")
            done = pip(tmp_path / "old", *index, *words, "mega-moe==0.1.0")
            assert done.returncode == 1, system
            assert "No matching distribution found for mega-moe==0.1.0" in done.stderr


def test_pip_refuses_a_torch_below_the_floor(site: Path, tmp_path: Path) -> None:
    for path in (site / "torch/torch").iterdir():
        path.unlink()
    made = made_up_wheel(site / "torch/torch", "torch", "2.9.1", "py3-none-any")
    (site / "torch/torch/index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    with served(site) as (address, _):
        indexes = ("--index-url", f"{address}/cu130/", "--extra-index-url", f"{address}/torch/")
        # Without what is installed here: pip looks at its own environment unless it has another target's Python.
        words = ("--platform", TAGS.removeprefix("py3-none-"), "--only-binary", ":all:", "--ignore-installed")
        done = pip(tmp_path / "new", *indexes, *words, "mega-moe==0.1.0")
    assert done.returncode == 1
    assert "No matching distribution found for torch>=2.10" in done.stderr


def test_pip_refuses_a_tampered_wheel(site: Path, tmp_path: Path) -> None:
    (wheel,) = (site / "cu130/mega-moe").glob("*-0.1.0+cu130-*.whl")
    tamper(wheel)
    with served(site) as (address, _):
        done = pip(tmp_path / "new", "--index-url", f"{address}/cu130/", "--no-deps", "mega-moe==0.1.0")
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "new").exists()


def test_pip_pins_by_hash(site: Path, tmp_path: Path) -> None:
    sums = dict(line.split("  ")[::-1] for line in (site / "SHA256SUMS").read_text().splitlines())
    name = f"mega_moe-0.1.0+cu130-{TAGS}.whl"
    wanted = tmp_path / "requirements.txt"
    with served(site) as (address, _):
        index = ("--index-url", f"{address}/cu130/", "--no-deps", "--require-hashes", "-r", str(wanted))
        wanted.write_text(f"mega-moe==0.1.0+cu130 --hash=sha256:{sums[name]}\n")
        done = pip(tmp_path / "new", *index)
        assert done.returncode == 0, done.stderr
        wanted.write_text(f"mega-moe==0.1.0+cu130 --hash=sha256:{'0' * 64}\n")
        done = pip(tmp_path / "other", *index)
        assert done.returncode == 1
        assert "DO NOT MATCH THE HASHES" in done.stderr


def project(folder: Path, address: str, source: str) -> Path:
    """A trainer's project that pins the wheel in its settings."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "trainer"\nversion = "1"\nrequires-python = ">=3.10"\n'
        'dependencies = ["mega-moe==0.1.0"]\n'
        f"[tool.uv]\nenvironments = [\"sys_platform == 'linux' and platform_machine == '{platform.machine()}'\"]\n"
        f"[tool.uv.sources]\nmega-moe = {source}\n"
        f'[[tool.uv.index]]\nname = "mega-moe-cu130"\nurl = "{address}/cu130/"\nexplicit = true\n'
    )
    return folder


@pytest.mark.parametrize("how", ["index", "url"])
def test_uv_locks_and_syncs(site: Path, tmp_path: Path, how: str) -> None:
    with served(site) as (address, _):
        url = f"{address}/cu130/mega-moe/mega_moe-0.1.0%2Bcu130-{TAGS}.whl"
        source = '{ index = "mega-moe-cu130" }' if how == "index" else f'{{ url = "{url}" }}'
        trainer = project(tmp_path / "trainer", address, source)
        locked = uv(trainer, "lock", "--default-index", f"{address}/torch/")
        assert locked.returncode == 0, locked.stderr
        lock = (trainer / "uv.lock").read_text()
        sums = (site / "SHA256SUMS").read_text()
        digest = next(line.split()[0] for line in sums.splitlines() if "0.1.0+cu130" in line)
        assert 'version = "0.1.0+cu130"' in lock
        assert f"sha256:{digest}" in lock
        assert set(re.findall(r'https?://[^/"]+', lock)) == {address}  # nothing comes from elsewhere
        done = uv(trainer, "sync", "--frozen")
        assert done.returncode == 0, done.stderr
        (packages,) = (trainer / ".venv/lib").glob("python*/site-packages")
        assert version_in(packages) == "0.1.0+cu130"
        # Another file under the same name, after the lock was written.
        tamper(next((site / "cu130/mega-moe").glob("*-0.1.0+cu130-*.whl")))
        done = uv(trainer, "sync", "--frozen", "--reinstall", "--no-cache")
        assert done.returncode != 0
        assert "Hash mismatch" in done.stderr


def test_uv_moves_to_another_cuda_version(site: Path, tmp_path: Path) -> None:
    with served(site) as (address, _):
        trainer = project(tmp_path / "trainer", address, '{ index = "mega-moe-cu130" }')
        assert uv(trainer, "lock", "--default-index", f"{address}/torch/").returncode == 0
        settings = trainer / "pyproject.toml"
        settings.write_text(settings.read_text().replace("cu130", "cu129"))
        done = uv(trainer, "lock", "--default-index", f"{address}/torch/")
        assert done.returncode == 0, done.stderr
        assert 'version = "0.1.0+cu129"' in (trainer / "uv.lock").read_text()


def test_files_of_a_release_are_linked_where_they_are(wheels: Path, tmp_path: Path) -> None:
    make_index.make(wheels, tmp_path / "site", "http://host.example/files/v{version}/")
    own = tmp_path / "site/cu130/mega-moe"
    assert not list(own.glob("*.whl"))
    text = (own / "index.html").read_text()
    assert f'href="http://host.example/files/v0.2.0/mega_moe-0.2.0%2Bcu130-{TAGS}.whl#sha256=' in text
    assert len(list(wheels.glob("*.whl.metadata"))) == 4
    listing = json.loads((own / "index.json").read_text())
    assert listing["versions"] == ["0.1.0+cu130", "0.2.0+cu130"]
    assert {file["requires-python"] for file in listing["files"]} == {">=3.10"}


def test_refuses_no_wheels_and_wheels_without_a_label(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert make_index.main([str(empty), str(tmp_path / "out")]) == 1
    made_up_wheel(empty, "mega-moe", "0.1.0", TAGS)
    with pytest.raises(ValueError, match="version has no label such as"):
        make_index.make(empty, tmp_path / "out")
    (empty / f"mega_moe-0.1.0-{TAGS}.whl").rename(empty / f"mega_moe-0.3.0+cu130-{TAGS}.whl")
    with pytest.raises(ValueError, match=r"its metadata is of version 0\.1\.0"):
        make_index.make(empty, tmp_path / "out")


def test_the_built_wheel_installs_from_its_index(tmp_path: Path) -> None:
    built = list((ROOT / "dist").glob("*.whl"))
    if len(built) != 1:
        pytest.skip(f"dist/ holds {len(built)} wheels, this needs the one that `nox -s wheel` builds")
    (wheel,) = make_index.make(ROOT / "dist", tmp_path / "site")
    with served(tmp_path / "site") as (address, _):
        plain = wheel.version.partition("+")[0]
        index = ("--index-url", f"{address}/{wheel.label}/", "--no-deps")
        done = pip(tmp_path / "new", *index, f"mega-moe=={plain}")
        assert done.returncode == 0, done.stderr
    code = "import mega_moe; print(mega_moe.__version__, mega_moe._ops.library.status().loaded)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "new")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stdout.split() == [wheel.version, "True"], told.stderr
