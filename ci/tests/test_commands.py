"""The README's commands and example are what runs: in CI, from a person's shell, on the installed package."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s {}"


INSTALL = "apt-get install one two\n"


def ci_run(tmp_path: Path, readme: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """.ci/run alongside `readme`; `path`: the only folder of programs."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(readme)
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    bash = shutil.which("bash") or ""
    return subprocess.run(
        [bash, ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("session", ["demo", "tests"])
def test_each_command_is_one_line_of_the_readme(session: str) -> None:
    assert (ROOT / "README.md").read_text().splitlines().count(COMMAND.format(session)) == 1


@pytest.mark.parametrize("code", [0, 7])
def test_ci_runs_the_readme_command_and_exits_with_its_code(code: int, tmp_path: Path) -> None:
    line = f"python3 -m venv --help > /dev/null && echo seen && exit {code} -s tests"
    answer = ci_run(tmp_path, f"text\n```bash\n{line.replace(' -s', '; : -s')}\n```\n{INSTALL}")
    assert answer.returncode == code, answer.stderr
    assert answer.stdout.splitlines()[-1] == "seen"


def test_ci_installs_what_the_readme_names_and_nothing_else(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "grep", "python3"):
        (programs / name).symlink_to(shutil.which(name) or name)
    (programs / "apt-get").write_text(f'#!{programs}/bash\necho "$@" >> {tmp_path}/asked\n')
    (programs / "apt-get").chmod(0o755)
    answer = ci_run(tmp_path, f"{INSTALL}python3 -m venv -h >/dev/null; : -s tests\n", programs)
    assert answer.returncode == 0, answer.stderr
    (install,) = (line for line in (tmp_path / "asked").read_text().splitlines() if "install" in line)
    assert [word for word in install.split() if not word.startswith("-")] == ["install", "one", "two"]


@pytest.mark.parametrize(
    "readme",
    [f"no command\n{INSTALL}", COMMAND.format("tests"), f"{INSTALL}{COMMAND.format('tests')}\n" * 2],
)
def test_ci_refuses_a_readme_without_exactly_one_line_of_each(readme: str, tmp_path: Path) -> None:
    answer = ci_run(tmp_path, readme)
    assert answer.returncode == 1
    assert "want 1" in answer.stderr


def test_the_readme_example_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    # Warnings are errors but for the one that tells of the fallback, which is what the example is about to show.
    command = [sys.executable, "-W", "error", "-W", "default:mega_moe", "-c", example]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    backend, *_ = answer.stdout.split()
    assert backend in {"grouped", "reference"}
    assert "torch.Size([32, 256])" in answer.stdout


def test_a_build_without_kernels_needs_no_compiler(tmp_path: Path) -> None:
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path)
    without = {"MEGA_MOE_BUILD_KERNELS": "0", "CUDACXX": "/nonexistent", "CXX": "/nonexistent"}
    command = [sys.executable, "-m", "pip", "wheel", *options, ROOT]
    subprocess.run(command, env={**os.environ, **without}, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert json.loads(archive.read("mega_moe/_lib/build.json"))["architectures"] == []
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: torch>=2.10" in archive.read(metadata).decode()


def test_a_machine_without_a_cuda_compiler_is_told_what_to_do(tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT / "kernels", "-B", tmp_path, "-G", "Ninja"]
    environment = {**os.environ, "CUDACXX": "/nonexistent/nvcc"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "no CUDA compiler. Put nvcc 12.9 or later on the path" in " ".join(run.stderr.split())
    assert "MEGA_MOE_BUILD_KERNELS=0" in run.stderr


def test_every_session_says_what_it_does() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marked = [node for node in functions if "nox.session" in map(ast.unparse, node.decorator_list)]
    assert {node.name for node in marked} >= {"demo", "tests", "wheel", "bench", "api", "release_check"}
    assert [node.name for node in marked if not ast.get_docstring(node)] == []
