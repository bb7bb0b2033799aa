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


def run(program: str, *arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A checker as the session `lint` calls it."""
    tool = TOOLS / program
    if not tool.exists():
        pytest.skip(f"needs {program}, of the dependency group lint")
    return subprocess.run(
        [tool, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=100
    )


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
def test_refuses(tree: Path, name: str, old: str, new: str, fault: str) -> None:
    path = tree / ".github/workflows" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    found = check_workflows.faults(path, check_workflows.sessions(tree))
    assert any(fault in line for line in found), found
    assert check_workflows.main([str(tree)]) == 1


def test_no_workflow_is_no_pass(tmp_path: Path) -> None:
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    assert check_workflows.main([str(tmp_path)]) == 1


def test_actionlint_and_zizmor_pass_and_refuse(tree: Path) -> None:
    folder = tree / ".github/workflows"
    subprocess.run(
        ["git", "init", "-q", tree], check=True
    )  # actionlint looks for its settings in the repository
    assert run("actionlint", *sorted(folder.glob("*.yml")), cwd=tree).returncode == 0
    assert run("zizmor", "--offline", "--quiet", "--no-progress", folder, cwd=tree).returncode == 0
    path = folder / "cpu.yml"
    text = path.read_text()
    path.write_text(text.replace("${{ matrix.runner }}", "${{ matrix.runer }}"))
    answer = run("actionlint", *sorted(folder.glob("*.yml")), cwd=tree)
    assert answer.returncode == 1
    assert 'property "runer" is not defined' in answer.stdout
    path.write_text(
        text.replace("run: nox -s tests\n", "run: nox -s tests ${{ github.event.pull_request.title }}\n")
    )
    answer = run("zizmor", "--offline", "--quiet", "--no-progress", folder, cwd=tree)
    assert answer.returncode != 0
    assert "template-injection" in answer.stdout
    path.write_text(text.replace("          persist-credentials: false\n", "          fetch-depth: 1\n"))
    answer = run("zizmor", "--offline", "--quiet", "--no-progress", folder, cwd=tree)
    assert "artipacked" in answer.stdout


def test_hadolint_and_shellcheck_refuse(tmp_path: Path) -> None:
    assert run("hadolint", *sorted((ROOT / "docker").glob("*.Dockerfile"))).returncode == 0
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp && sudo true\n")
    answer = run("hadolint", tmp_path / "Dockerfile")
    assert answer.returncode == 1
    assert "DL3007" in answer.stdout
    (tmp_path / "a.sh").write_text("#!/bin/sh\nrm -rf $1/*\n")
    assert run("shellcheck", tmp_path / "a.sh").returncode == 1


def base_faults(dockerfile: str) -> list[str]:
    """An image comes from BASE alone, which has no default: whoever builds must name one, by digest."""
    lines = [line for line in dockerfile.splitlines() if re.match(r"(?:FROM|ARG BASE)\b", line)]
    return [] if lines == ["ARG BASE", "FROM ${BASE}"] else lines


def test_images_are_made_from_a_digest() -> None:
    for path in sorted((ROOT / "docker").glob("*.Dockerfile")):
        assert base_faults(path.read_text()) == [], path.name
    assert base_faults("ARG BASE=debian:12\nFROM ${BASE}\n")
    assert base_faults("ARG BASE\nFROM debian:12\n")


def test_the_image_holds_the_torch_that_the_sessions_build_with() -> None:
    wanted = [
        line
        for line in (ROOT / "docker/requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted), wanted
    assert re.findall(r'^torch = \["(.*?)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE) == [
        line for line in wanted if line.startswith("torch==")
    ]


def test_the_container_build_is_one_build() -> None:
    settings = matrix.tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert settings["build"] == "cp311-manylinux_*"
    assert "finish_wheel.py" in settings["repair-wheel-command"]
    assert [part for part in settings["test-command"] if "check_wheel.py {wheel}" in part]
    assert [part for part in settings["test-command"] if "test_wheel.sh cpu {wheel}" in part]
