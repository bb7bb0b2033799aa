"""The list of commands for several GPUs: what it holds, how a command ends, what becomes of the results."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mega_moe.bench import schema

from ._results import layer_row, measured, sample

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "python/benchmarks"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks

    return ranks


def test_a_dry_run_needs_no_torch_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    (tmp_path / "baseline_grouped.py").write_text("")
    out = tmp_path / "out"
    words = ["--dry-run", "--gpus", "2", "--out", str(out), "--peers", str(tmp_path)]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(FOLDER)!r}]; import ranks; ranks.main({words})"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    peers = [f"peer-baseline_grouped.py-{tokens}" for tokens in (16384, 8192)]
    assert names == ["tests", "layers-30B", "layers-235B", *peers, "step-fused", "step-grouped", "demo"]
    assert "TOK=8192" in done.stdout
    assert not out.exists()


def test_every_command_names_files_that_are_there(ranks: Any, tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        for command in ranks.commands(2, device, tmp_path, None):
            files = [word for word in command.words if word.startswith("python/")]
            assert all((ROOT / name).exists() for name in files), command


def test_a_command_passes_fails_or_is_ended(ranks: Any, tmp_path: Path) -> None:
    def became(code: str, limit_s: float) -> str:
        command = ranks.Command("one", limit_s, (sys.executable, "-c", code))
        status: str = ranks.run(command, tmp_path / "log", limit_s)
        return status

    assert became("print('said')", 60) == "passed"
    assert (tmp_path / "log").read_text() == "said\n"
    assert became("raise SystemExit(3)", 60) == "failed"
    start = time.monotonic()
    assert became("import time; time.sleep(100)", 1) == "timed out"
    assert time.monotonic() - start < 30


def test_without_time_commands_are_left_out(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.main(["--device", "cpu", "--out", str(tmp_path), "--budget", "0"]) == 0
    became = json.loads((tmp_path / "ranks.json").read_text())
    assert set(became.values()) == {"left out"}
    assert "ranks: demo: left out" in capsys.readouterr().out


def test_results_of_all_shapes_and_peers_become_one(ranks: Any, tmp_path: Path) -> None:
    for shape in ("30B", "235B"):
        (tmp_path / shape).mkdir()
        one = sample(num_ranks=2)
        rows = (*one.rows[:2], layer_row(measured("burst", 0.01), shape=shape, num_ranks=2))
        (tmp_path / shape / "a.json").write_text(schema.dumps(dataclasses.replace(one, rows=rows)))
    said = "30B EP 2 baseline fwd ms 8.96 (138 TF/s) fwd+bwd 20.28 -> bwd 11.32\n"
    (tmp_path / "peer-baseline_grouped.py-8192.log").write_text(said)
    ranks.collect(tmp_path, 2, ["--gpus", "2"])
    result = schema.read(tmp_path / "nvidia-h200-x2-2026-11-29.json")
    assert result.arguments == ("--gpus", "2")
    assert [row.kind for row in result.rows] == ["ceiling", "ceiling", "layer", "layer", "peer", "peer"]
    assert [row.tokens for row in result.rows[2:]] == [16384, 16384, 8192, 8192]


def test_what_other_scripts_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks_peers

    said = "30B EP 2 baseline fwd ms 8.96 (138 TF/s) fwd+bwd 20.28 -> bwd 11.32\n30B EP 2 grouped_mm L1 alone ms 0.6\n"
    forward, backward = ranks_peers.baseline_rows(said, 16384, 2)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.outcome.timing.seconds == pytest.approx(8.96e-3)
    assert backward.outcome.timing.seconds == pytest.approx(11.32e-3)
    # 6 and 12 products of H * I a row: the baseline keeps its activations.
    assert forward.tflops == pytest.approx(6 * 16384 * 8 * 2048 * 768 / 8.96e-3 * 1e-12)
    assert backward.tflops == pytest.approx(12 * 16384 * 8 * 2048 * 768 / 11.32e-3 * 1e-12)
    said = (
        "30B EP 2 sgl fp8 mega fwd ms 3.000 TF/s 412 finite True 0.1\n"
        "235B EP 2 sgl fp8 mega fwd ms 7.5 TF/s 660 finite False nan\n"
        "235B FAIL RuntimeError('no')\n"
    )
    good, bad, failed = ranks_peers.fp8_rows(said, 16384, 2)
    assert (good.precision, good.outcome.status) == ("fp8", "measured")
    assert bad.outcome.reasons == ("its result holds NaN or Inf",)
    assert failed.outcome.reasons == ("RuntimeError('no')",)
    assert ranks_peers.baseline_rows("nothing of the kind\n", 16384, 2) == []
