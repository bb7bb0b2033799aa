"""Whether a backend trains as the reference does: the verdict, a small comparison, and a backend that goes astray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_moe.demo import follow
from mega_moe.demo.config import Config
from mega_moe.demo.parallel import Ranks
from mega_moe.demo.trainer import StepResult, Trainer

from ._train import small


@pytest.mark.parametrize(
    ("other", "outside", "follows"),
    [(2.0, 0.0, True), (2.1, 0.0, True), (2.29, 0.19, True), (2.35, 0.25, False), (1.75, 0.25, False)],
)
def test_verdict(other: float, outside: float, follows: bool) -> None:
    verdict = follow.judge([2.0, 2.1, 2.05], other)
    assert verdict.spread == pytest.approx(0.1)
    assert verdict.outside == pytest.approx(outside)
    assert verdict.follows is follows
    assert ("DOES NOT FOLLOW" in str(verdict)) is not follows
    assert not follow.judge([2.0, 2.1, 2.05], float("nan")).follows


def config() -> Config:
    return small(steps=60, warmup_steps=20)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], torch.Tensor]:
    """The embedding that each run, by backend and number among those of it, began with."""
    began: dict[tuple[str, int], torch.Tensor] = {}
    plain = Trainer.step

    def step(self: Trainer, number: int, learning_rate: float) -> StepResult:
        if number == 0:
            backend = self.buffer.backend
            at = sum(name == backend for name, _ in began)
            began[backend, at] = self.model.embedding.weight.detach().clone()
        return plain(self, number, learning_rate)

    monkeypatch.setattr(Trainer, "step", step)
    return began


def test_grouped_follows(
    tmp_path: Path, trained: dict[tuple[str, int], torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    verdict = follow.follow(config(), tmp_path / "out", "grouped", "cpu")
    written = json.loads((tmp_path / "out" / "follow.json").read_text())
    assert [run["name"] for run in written["runs"]] == [
        "grouped",
        "reference",
        "reference +1 ulp",
        "reference -1 ulp",
    ]
    assert all(len(run["losses"]) == 60 for run in written["runs"])
    assert written["verdict"]["follows"] is verdict.follows
    assert (tmp_path / "out" / "follow.png").read_bytes().startswith(b"\x89PNG")
    # The three references are three runs: they start one ulp apart, and end apart.
    drawn, up, down = (trained["reference", at] for at in range(3))
    assert torch.equal(drawn, trained["grouped", 0])
    assert torch.equal(torch.nextafter(drawn, torch.full_like(drawn, torch.inf)), up)
    assert torch.equal(torch.nextafter(drawn, torch.full_like(drawn, -torch.inf)), down)
    assert len({run["losses"][-1] for run in written["runs"][1:]}) > 1
    # In fp32 and so few steps the backends differ by little more than an ulp: as near as the references, or nearly.
    assert abs(verdict.other - verdict.references[0]) < 0.02
    assert "reference +1 ulp: 60 steps" in capsys.readouterr().err


def test_a_backend_that_trains_otherwise_does_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    plain = Trainer.step

    def astray(self: Trainer, number: int, learning_rate: float) -> Any:
        # As with gradients that are wrong in size.
        return plain(self, number, learning_rate * (0.1 if self.buffer.backend == "grouped" else 1.0))

    monkeypatch.setattr(Trainer, "step", astray)
    verdict = follow.follow(config(), tmp_path, "grouped", "cpu")
    assert not verdict.follows
    assert verdict.outside > 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "49"], "steps: got 49, wanted at least 50"),
        (["--backend", "fused", "--device", "cpu"], "needs an NVIDIA GPU"),
    ],
)
def test_words_that_do_not_fit(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow.main([*words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Ranks):
        world_size = 2

    monkeypatch.setattr(follow, "connect", lambda *_: Two(torch.device("cpu")))
    with pytest.raises(ValueError, match="got 2 processes, wanted one"):
        follow.follow(config(), tmp_path, "grouped", "cpu")


def test_the_demos_sizes_are_those_of_the_fused_kernels() -> None:
    sizes = Config()
    assert sizes.hidden % 256 == 0
    assert sizes.intermediate % 128 == 0
