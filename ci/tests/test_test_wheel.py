"""test_wheel.sh refuses wrong calls, and a suite that this machine cannot run fails instead of skipping."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
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
def test_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
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
    result = run("gpu", wheel, "-k", "test_clock_probe", "-p", "no:cacheprovider")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "MEGA_MOE_REQUIRE_GPU=1: needs 1 CUDA device(s)" in result.stdout
