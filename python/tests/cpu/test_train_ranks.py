"""The demonstration job on several gloo ranks, against the same run in one process.

Tolerances: losses are near 5 and several ranks sum in another order than one process, so 1e-4 absolute (seen: 1e-6). A
gradient that is off by the number of ranks shows in the norm by that factor.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mega_moe.demo.train import train

from ._train import read_report, small, torchrun

CURVES = {"loss": 1e-4, "balance": 1e-4, "gradient_norm": 1e-3, "load_max_over_mean": 1e-2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run in one process."""
    return train(small(), tmp_path_factory.mktemp("alone"), device="cpu", backend="grouped")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run on two ranks, the experts spread over both."""
    out = tmp_path_factory.mktemp("two")
    torchrun(2, out)
    return out


def assert_same_run(report: dict[str, Any], alone: dict[str, Any]) -> None:
    for name, tolerance in CURVES.items():
        assert report["history"][name] == pytest.approx(alone["history"][name], abs=tolerance, rel=0), name
    assert report["held_out_loss"] == pytest.approx(alone["held_out_loss"], abs=1e-4)
    for kind in ("routers", "least_moved_experts"):
        assert report["weights_moved"][kind] == pytest.approx(alone["weights_moved"][kind], rel=1e-2), kind


def test_two_ranks_take_the_steps_of_one(two: Path, alone: dict[str, Any]) -> None:
    report = read_report(two)
    assert (report["ranks"], report["ep_size"]) == (2, 2)
    assert_same_run(report, alone)


@pytest.mark.parametrize(("ranks", "ep_size"), [(2, 1), (4, 2)])
def test_experts_sharded_over_data_ranks_take_the_steps_of_one(
    ranks: int, ep_size: int, tmp_path: Path, alone: dict[str, Any]
) -> None:
    report = torchrun(ranks, tmp_path, "--ep-size", str(ep_size))
    assert (report["ranks"], report["ep_size"]) == (ranks, ep_size)
    assert_same_run(report, alone)


def test_checkpoint_of_two_ranks_resumes_bit_for_bit(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "checkpoints/step-000006", tmp_path / "checkpoints/step-000006")
    resumed = torchrun(2, tmp_path, "--resume")
    assert resumed["first_step"] == 6
    assert resumed["history"] == read_report(two)["history"]


def test_checkpoint_of_two_ranks_holds_all_experts_and_resumes_in_one_process(
    two: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    shutil.copytree(two / "checkpoints/step-000006", tmp_path / "checkpoints/step-000006")
    resumed = train(small(), tmp_path, device="cpu", backend="grouped", resume=True)
    assert resumed["first_step"] == 6
    assert_same_run(resumed, alone)


def test_checkpoint_of_one_process_resumes_on_two_ranks(tmp_path: Path, alone: dict[str, Any]) -> None:
    shutil.copytree(Path(alone["out"]) / "checkpoints/step-000006", tmp_path / "checkpoints/step-000006")
    resumed = torchrun(2, tmp_path, "--resume")
    assert resumed["first_step"] == 6
    assert_same_run(resumed, alone)
