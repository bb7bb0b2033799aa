"""The workflows pass their gates, and each gate refuses a workflow, Dockerfile or script with one planted fault."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_workflows
import matrix
import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TOOLS = Path(sys.executable).parent
ZIZMOR = ("--offline", "--quiet", "--no-progress")


def run(program: str, *arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A checker as the session `lint` calls it."""
    tool = TOOLS / program
    if not tool.exists():
        pytest.skip(f"needs {program}, of the dependency group lint")
    return subprocess.run([tool, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_workflows_are_the_six() -> None:
    assert [path.stem for path in WORKFLOWS] == ["bench", "cpu", "gpu", "lint", "release", "wheels"]
    assert check_workflows.main([str(ROOT)]) == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the workflows, with what they are judged against."""
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    return tmp_path


CHECKOUT = next(
    line.strip(" -") for line in WORKFLOWS[0].read_text().splitlines() if "actions/checkout@" in line
)
# File, what is replaced, by what, and what the gate then says.
PLANTED = [
    ("lint.yml", CHECKOUT, "uses: actions/checkout@v6", "is not pinned by a commit"),
    ("lint.yml", CHECKOUT, CHECKOUT.partition(" #")[0], "is not pinned by a commit"),
    ("lint.yml", "permissions: {}", "permissions: read-all", "permissions of the workflow are read-all"),
    ("cpu.yml", "    permissions:\n      contents: read\n", "", "tests: names no permissions"),
    ("cpu.yml", "    timeout-minutes: 90\n", "", "tests: has no timeout-minutes"),
    ("cpu.yml", "nox -s tests\n", "nox -s test\n", "no such nox session: test"),
    ("lint.yml", "[lint, types,", "[lint, typos,", "no such nox session: typos"),
    ("cpu.yml", "run: nox -s tests\n", "run: nox -s tests && nox -s lint\n", "starts more than one nox session"),
    ("cpu.yml", "run: nox -s tests\n", "run: pip install . && nox -s tests\n", "does itself what a nox session is for"),
    ("wheels.yml", "run: nox -s wheel_manylinux", "run: docker build . && nox -s wheel_manylinux", "does itself"),
    ("gpu.yml", "tests_gpu -- artifact/*.whl", "tests_gpu --", "without the wheel of a build"),
    ("bench.yml", "nox -s bench -- artifact/*.whl", "nox -s wheel", "without the wheel of a build"),
    ("release.yml", "--draft --verify-tag", "--verify-tag", "creates a release that is not a draft"),
    ("release.yml", "    needs: draft\n", "    needs: wheels\n", "publishes without needing the job that drafts"),
    ("release.yml", "sha256sum --check --strict", "sha256sum", "publishes what it did not check"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "fault"), PLANTED)
def test_refuses(
    tree: Path, name: str, old: str, new: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree / ".github/workflows" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert check_workflows.main([str(tree)]) == 1
    assert fault in capsys.readouterr().out


def test_no_workflow_is_no_pass(tmp_path: Path) -> None:
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    assert check_workflows.main([str(tmp_path)]) == 1


def lint(folder: Path) -> str:
    """What the two linters say, as the session `lint` calls them; empty where both pass."""
    shown = ""
    for tool, *words in (("actionlint", *sorted(folder.glob("*.yml"))), ("zizmor", *ZIZMOR, folder)):
        answer = run(tool, *words, cwd=folder)
        shown += answer.stdout if answer.returncode else ""
    return shown


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("${{ matrix.runner }}", "${{ matrix.runer }}", 'property "runer" is not defined'),
        ("nox -s tests\n", "nox -s tests ${{ github.event.pull_request.title }}\n", "template-injection"),
        ("          persist-credentials: false\n", "          fetch-depth: 1\n", "artipacked"),
    ],
)
def test_actionlint_and_zizmor_refuse(tree: Path, old: str, new: str, fault: str) -> None:
    subprocess.run(
        ["git", "init", "-q", tree], check=True
    )  # actionlint looks for its settings in the repository
    path = tree / ".github/workflows/cpu.yml"
    assert lint(path.parent) == ""
    path.write_text(path.read_text().replace(old, new))
    assert fault in lint(path.parent)


def test_hadolint_and_shellcheck_refuse(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp && sudo true\n")
    assert "DL3007" in run("hadolint", tmp_path / "Dockerfile").stdout
    (tmp_path / "a.sh").write_text("#!/bin/sh\nrm -rf $1/*\n")
    assert run("shellcheck", tmp_path / "a.sh").returncode == 1


def test_images_are_made_from_a_digest_and_hold_the_torch_that_the_sessions_build_with() -> None:
    """The image comes from BASE alone, which has no default: whoever builds must name one, by digest."""
    (dockerfile,) = (ROOT / "docker").glob("*.Dockerfile")
    assert re.findall(r"^(?:FROM|ARG) .*", dockerfile.read_text(), re.MULTILINE) == [
        "ARG BASE",
        "FROM ${BASE}",
    ]
    lines = (ROOT / "docker/requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted), wanted
    groups = matrix.tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert groups["torch"] == [line for line in wanted if line.startswith("torch==")]


def test_the_container_build_is_one_build() -> None:
    settings = matrix.tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert settings["build"] == "cp311-manylinux_*"
    assert "finish_wheel.py" in settings["repair-wheel-command"]
    for needed in ("check_wheel.py {wheel}", "test_wheel.sh cpu {wheel}"):
        assert [part for part in settings["test-command"] if needed in part]
