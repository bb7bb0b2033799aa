"""Every command of docs/installing.md and docs/pinning.md runs, on the built wheel, from an index on this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import finish_wheel
import matrix
import pytest
import release

from ._helpers import make_wheel, served

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/installing.md", "docs/pinning.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What neither tool of these pages can do on a machine without a network or a container engine.
NOT_RUN = {"dockerfile", "toml"}


def blocks(page: str, kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall((ROOT / page).read_text()) if name == kind]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the project's index, and under packages/ a package index with torch and no label."""
    folder = tmp_path_factory.mktemp("served")
    release.make_index(wheel.parent, folder / "site")
    for project, made in (
        ("mega-moe", finish_wheel.strip_label(wheel, folder)),
        ("torch", make_wheel(folder, "torch", "2.13.0", "py3-none-any")),
        ("tomli", make_wheel(folder, "tomli", "2.2.1", "py3-none-any")),
    ):
        own = folder / "site/packages" / project
        own.mkdir(parents=True)
        shutil.copy(made, own)
        (own / "index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    with served(folder / "site") as address:
        yield address


@pytest.fixture
def shell(site: str, tmp_path: Path) -> dict[str, str]:
    """Environment of a new virtual environment that sees this one's torch, and none of this machine's settings."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    shared = tmp_path / "shared"
    shared.mkdir()
    # torch wants a newer setuptools than Python brings along: without it pip would look for another torch.
    subprocess.run([home / "bin/pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    # pip stays that of the environment; the package itself is what is to be installed.
    hidden = re.compile(r"(?:mega_moe|pip)\b")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not hidden.match(entry.name):
            (shared / entry.name).symlink_to(entry)
    (packages / "shared.pth").write_text(f"{shared}\n")
    ours = ("PIP_", "UV_", "MEGA_MOE_", "PYTHON", "VIRTUAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    uv = Path(sys.executable).parent
    return {
        **kept,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}{os.pathsep}{uv}",
        "INDEX": site,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{site}/packages/",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CONFIG": "1",
        "UV_DEFAULT_INDEX": f"{site}/packages/",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_PYTHON_DOWNLOADS": "never",
    }


def run(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    bash = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_block_is_run_or_named_as_not_run() -> None:
    for page in PAGES:
        kinds = {kind for kind, _ in BLOCK.findall((ROOT / page).read_text())}
        assert kinds <= {"bash", *NOT_RUN}, page
        assert "bash" in kinds


def test_the_version_is_the_present_one() -> None:
    version = matrix.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for page in PAGES:
        said = set(re.findall(r"mega-moe==([\d.]+\d)", (ROOT / page).read_text()))
        assert said == {version}, page
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_installing(shell: dict[str, str], tmp_path: Path) -> None:
    for command in blocks("docs/installing.md", "bash"):
        done = run(command, tmp_path, shell)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "mega-moe==0.1.0+cu130" in run("pip list --format freeze", tmp_path, shell).stdout
    (packages,) = (tmp_path / ".venv/lib").glob("python*/site-packages")
    assert list(packages.glob("mega_moe-*+cu130.dist-info"))
    absent = run('pip install "mega-moe==0.1.0+cu118" --extra-index-url "$INDEX/cu118/"', tmp_path, shell)
    assert absent.returncode == 1  # a command that fails is seen


def test_pinning(shell: dict[str, str], tmp_path: Path, site: str) -> None:
    (settings,) = blocks("docs/pinning.md", "toml")
    machine = platform.machine()
    (tmp_path / "pyproject.toml").write_text(settings.replace("INDEX", site).replace("x86_64", machine))
    *commands, by_hand = blocks("docs/pinning.md", "bash")
    for command in commands:
        done = run(command, tmp_path, shell)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert 'version = "0.1.0+cu130"' in (tmp_path / "uv.lock").read_text()
    assert "0.1.0+cu130" in run("pip list --format freeze", tmp_path, shell).stdout
    (wheel,) = (tmp_path / "wheelhouse").glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (wheel.parent / "SHA256SUMS").write_text(f"{digest}  {wheel.name}\n{'0' * 64}  other.whl\n")
    assert run(by_hand, wheel.parent, shell).returncode == 0
    wheel.write_bytes(wheel.read_bytes() + b"x")
    assert run(by_hand, wheel.parent, shell).returncode == 1
