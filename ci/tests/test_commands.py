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
import torch

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
    assert re.search(r"\b(?:grouped|reference)\b", answer.stdout)


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


def call_test_wheel(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # The script takes the python3 of PATH: here, the one that runs this test.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", ROOT / "ci" / "test_wheel.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no suite, want cpu, gpu or multi-gpu"),
        (("tpu",), "suite is 'tpu', must be cpu, gpu or multi-gpu"),
        (("cpu", "gone.whl"), "gone.whl: no such file"),
    ],
)
def test_test_wheel_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = call_test_wheel(*arguments)
    assert result.returncode == 2
    assert f"test_wheel: {message}" in result.stderr


def test_a_plugin_that_warns_where_tests_run_in_parallel_is_left_out(tmp_path: Path) -> None:
    """As pytest-benchmark does, whose warning would be an error before the first test."""
    (tmp_path / "warns.py").write_text(
        "import warnings\ndef pytest_configure(config): warnings.warn('parallel')\n"
    )
    info = tmp_path / "warns-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warns\nVersion: 1.0\n")
    (info / "test_one.py").write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    for name, code in (("benchmark", 0), ("other", 3)):
        (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = warns\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([*command, info / "test_one.py"], env=environment, check=False)
        assert done.returncode == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")
def test_gpu_suite_fails_without_a_gpu(wheel: Path) -> None:
    result = call_test_wheel("gpu", wheel, "-k", "test_clock_of_a_busy_region", "-p", "no:cacheprovider")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "MEGA_MOE_REQUIRE_GPU=1: needs 1 CUDA device(s)" in result.stdout
