"""The comparison of precisions: its verdict, its files, and a small run in which fp8 is emulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_moe.demo import convergence

from ._train import SMALL

# e4m3 blocks need multiples of 128.
SIZES = {**SMALL, "hidden": 128, "intermediate": 128, "num_layers": 1, "num_experts": 4, "eval_every": 3}
FIELDS = {name: value for name, value in SIZES.items() if name not in ("steps", "minutes")}


def words(out: Path, *more: str) -> list[str]:
    sets = [word for name, value in FIELDS.items() for word in ("--set", f"{name}={value}")]
    return ["--out", str(out), "--device", "cpu", "--backend", "reference", *sets, *more]


@pytest.mark.parametrize(
    ("fp8", "ok"),
    [
        ([2.0, 2.1, 2.2], True),
        ([2.4, 2.5, 2.6], True),  # 0.4 off, of 0.4
        ([2.5, 2.6, 2.6], False),
        ([1.5, 1.6, 1.6], False),  # better by so much is another training, not a better one
        ([2.1, 2.1, float("nan")], False),
    ],
)
def test_verdict(fp8: list[float], ok: bool) -> None:
    verdict = convergence.judge({"bf16": [2.0, 2.1, 2.2], "fp8": fp8})
    assert verdict["allowed"] == pytest.approx(0.4)
    assert verdict["precisions"]["bf16"]["ok"]
    assert verdict["precisions"]["fp8"]["ok"] is ok
    assert verdict["ok"] is ok


def test_small_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = convergence.main(words(tmp_path, "--steps", "6", "--seeds", "0", "1"))
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "convergence.json").read_text())
    assert status == (0 if result["verdict"]["ok"] else 1)
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert list(result["final_held_out"]) == ["bf16", "fp8", "fp8_bwd"]
    for precision, runs in result["training"].items():
        assert [len(losses) for losses in runs] == [6, 6]
        assert runs[0] != runs[1], "seeds"
        # Same seeds: the same weights and batches, so that the first forward differs by the products alone.
        for losses, base in zip(runs, result["training"]["bf16"], strict=True):
            assert losses[0] == pytest.approx(base[0], rel=1e-2)
        if precision != "bf16":
            assert runs != result["training"]["bf16"], precision
    assert result["training"]["fp8"] != result["training"]["fp8_bwd"]
    # Forward in bf16: the first loss is that of bf16, to the bit; what follows is not.
    assert result["training"]["fp8_bwd"][0][0] == result["training"]["bf16"][0][0]
    assert "spread of bf16 over 2 seeds" in printed

    # Finished runs are found again; others are not taken for them.
    before = (tmp_path / "fp8-0" / "report.json").stat().st_mtime_ns
    assert convergence.main(words(tmp_path, "--steps", "6", "--seeds", "0", "1")) == status
    assert (tmp_path / "fp8-0" / "report.json").stat().st_mtime_ns == before
    assert convergence.main(words(tmp_path, "--steps", "7", "--seeds", "0")) == 2
    assert "is of another run" in capsys.readouterr().err


def test_bad_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convergence.main(words(tmp_path, "--set", "hiden=128")) == 2
    assert "hiden" in capsys.readouterr().err
