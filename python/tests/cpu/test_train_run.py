"""The demonstration job in one process: learning, backends against each other, resume, time box, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_moe.demo import checkpoint
from mega_moe.demo.command import main
from mega_moe.demo.config import Config
from mega_moe.demo.corpus import load_corpus
from mega_moe.demo.parallel import Ranks, clip_gradients
from mega_moe.demo.train import learning_rate, train
from mega_moe.demo.trainer import Trainer

from ._train import read_report, small, words

HERE = Ranks(torch.device("cpu"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    # Bit-equality is promised for one number of threads; two are slower than one at these sizes.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(config: Config, out: Path, **options: Any) -> dict[str, Any]:
    return train(config, out, **{"device": "cpu", "backend": "grouped", **options})


def test_loss_falls_and_every_weight_moves(tmp_path: Path, one_thread: None) -> None:
    report = run(small(steps=60), tmp_path)
    losses = report["history"]["loss"]
    assert losses[0] == pytest.approx(5.545, abs=1e-3)  # ln 256
    assert report["train_loss"] == pytest.approx(sum(losses[-50:]) / 50)
    assert losses[-1] < 3.2
    assert report["held_out_loss"] < 3.3
    assert report["weights_moved"]["ok"]
    assert all(value >= 1 for value in report["history"]["load_max_over_mean"])
    assert report["tokens_per_second"] > 0
    assert read_report(tmp_path) == json.loads(json.dumps(report))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_grouped_follows_reference_for_50_steps(tmp_path: Path, one_thread: None) -> None:
    config = small(steps=50, eval_every=1000, checkpoint_every=1000)
    losses = [
        run(config, tmp_path / backend, backend=backend)["history"]["loss"]
        for backend in ("grouped", "reference")
    ]
    assert len(losses[0]) == 50
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-3


def test_the_default_run_follows_reference_for_its_first_50_steps(one_thread: None) -> None:
    """At full size: with a warm-up that is too short, rounding decides the run before these steps are over."""
    config = Config()
    corpus, losses = load_corpus(config), []
    for backend in ("grouped", "reference"):
        trainer = Trainer(config, corpus, HERE, backend=backend)
        with trainer.buffer:
            rates = [learning_rate(config, step, step / config.steps) for step in range(50)]
            losses.append([trainer.step(step, rate).loss for step, rate in enumerate(rates)])
    assert losses[0][-1] < losses[0][0] - 1.0, "it learns meanwhile"
    assert max(abs(a - b) for a, b in zip(*losses)) < 1e-3


def test_bf16_autocast_keeps_fp32_weights_and_learns_alike(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(steps=20)
    exact = run(config, tmp_path / "fp32")["history"]["loss"]
    monkeypatch.setattr(Trainer, "_dtype", lambda self: torch.bfloat16)
    rounded = run(config, tmp_path / "bf16")["history"]["loss"]
    assert rounded != exact
    # bf16 rounds to 4e-3; the losses are between 3 and 6.
    assert max(abs(a - b) for a, b in zip(exact, rounded)) < 2e-2
    assert {t.dtype for t in _tensors(tmp_path / "bf16", 20).values()} == {torch.float32}


def test_seed_changes_the_run(tmp_path: Path, one_thread: None) -> None:
    losses = [run(small(steps=2, seed=seed), tmp_path / str(seed))["history"]["loss"] for seed in (0, 1)]
    assert losses[0][1] != losses[1][1]


def test_resume_continues_bit_for_bit(tmp_path: Path, one_thread: None) -> None:
    straight = run(small(), tmp_path / "straight")
    saved = tmp_path / "straight/checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step-000006", "step-000012"]
    shutil.copytree(saved / "step-000006", tmp_path / "resumed/checkpoints/step-000006")
    resumed = run(small(), tmp_path / "resumed", resume=True)
    assert resumed["first_step"] == 6
    assert resumed["history"]["loss"] == straight["history"]["loss"]
    assert resumed["history"]["gradient_norm"] == straight["history"]["gradient_norm"]
    assert resumed["held_out_loss"] == straight["held_out_loss"]
    assert resumed["weights_moved"] == straight["weights_moved"]  # from the same initial weights
    tensors = [_tensors(tmp_path / name, 12) for name in ("straight", "resumed")]
    assert len(tensors[0]) == 4 * 25  # weight, two moments and step count of each parameter
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def _tensors(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All state at a step, read through a trainer that started with other weights."""
    config = small(seed=1)
    with_other = Trainer(config, load_corpus(config), HERE, backend="grouped")
    with with_other.buffer:
        with_other.load(out / f"checkpoints/step-{step:06d}")
        return checkpoint.tensors(with_other.parameters, with_other.optimizer, HERE)


def test_resume_refuses_another_run_and_a_finished_one(tmp_path: Path, one_thread: None) -> None:
    with pytest.raises(ValueError, match="resume: no complete checkpoint"):
        run(small(), tmp_path, resume=True)
    run(small(steps=2), tmp_path)
    with pytest.raises(ValueError, match=r"resume: top_k is 1, but .*step-000002 was made with 2"):
        run(small(steps=4, top_k=1), tmp_path, resume=True)
    with pytest.raises(
        ValueError, match=r"resume: .*step-000002 is at step 2, so steps must be larger, not 2"
    ):
        run(small(steps=2), tmp_path, resume=True)
    (tmp_path / "checkpoints/step-000003").mkdir()  # what a killed run leaves: not complete, not newest
    assert run(small(steps=3), tmp_path, resume=True)["steps"] == 3


def test_time_box_ends_the_run_with_everything_written(tmp_path: Path, one_thread: None) -> None:
    report = run(small(steps=100_000, minutes=0.02), tmp_path)
    assert 1 <= report["steps"] < 100_000
    assert report["seconds"] < 10
    assert (tmp_path / "loss.png").exists()
    assert checkpoint.newest(tmp_path / "checkpoints").name == f"step-{report['steps']:06d}"


def test_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    config = small(learning_rate=1.0, warmup_steps=10, decay_share=0.5)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 9, 0.01) == pytest.approx(1.0)
    assert learning_rate(config, 500, 0.5) == pytest.approx(1.0)
    assert learning_rate(config, 700, 0.75) == pytest.approx(0.5)
    assert learning_rate(config, 999, 1.0) == 0


def test_frozen_expert_is_found(one_thread: None) -> None:
    config = small()
    trainer = Trainer(config, load_corpus(config), HERE, backend="grouped")
    with trainer.buffer:
        experts = trainer.model.layers()[1].experts
        experts.down_proj.register_hook(lambda grad: grad * (torch.arange(8) != 5)[:, None, None])
        for step in range(6):
            trainer.step(step, 3e-3)
        moved = trainer.weights_moved()
        assert not moved["ok"]
        assert {name for name, value in moved["least_moved_experts"].items() if value == 0} == {
            "blocks.1.experts.down_proj"
        }


def test_frozen_router_is_found_and_is_the_exit_status(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer.step

    def with_frozen_router(self: Trainer, *args: Any) -> Any:
        self.model.layers()[0].router.weight.requires_grad_(False)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", with_frozen_router)
    assert main(words(tmp_path, "--steps", "3")[1:]) == 1
    assert "weights moved  NOT ALL" in capsys.readouterr().out


def test_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Trainer.__init__

    def broken(self: Trainer, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        with torch.no_grad():
            self.model.embedding.weight.fill_(float("nan"))

    monkeypatch.setattr(Trainer, "__init__", broken)
    assert main(words(tmp_path, "--steps", "3")[1:]) == 1
    assert "error: step 0: StepResult(loss=nan" in capsys.readouterr().err


def test_clipping_equals_torch_in_one_process() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for max_norm in (1.0, 100.0):
        gradients = [torch.randn_like(p) for p in parameters]
        norms, clipped = [], []
        for clip in (
            lambda limit: clip_gradients(parameters, limit, HERE),
            lambda limit: torch.nn.utils.clip_grad_norm_(parameters, limit),
        ):
            for p, g in zip(parameters, gradients):
                p.grad = g.clone()
            norms.append(clip(max_norm))
            clipped.append([p.grad for p in parameters])
        torch.testing.assert_close(norms[0], norms[1])
        torch.testing.assert_close(clipped[0], clipped[1])
