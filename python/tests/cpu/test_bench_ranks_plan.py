"""The plan of the run over several GPUs: what it holds, what is dropped for time, what other scripts' words become."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "python/benchmarks"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks_plan

    return ranks_plan


def setting(plan: Any, num_ranks: int, **changes: Any) -> Any:
    words = {"device": "cuda", "wheel": Path("a.whl"), "peers": None, "tiny": False, "quick": False}
    return plan.Setting(num_ranks=num_ranks, folder=Path("between"), **{**words, **changes})


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_part_is_there_in_order_and_has_a_limit_of_its_own(plan: Any, num_ranks: int) -> None:
    parts = plan.plan(setting(plan, num_ranks))
    kinds = [part.name.split(":")[0] for part in parts]
    assert list(dict.fromkeys(kinds)) == ["tests", "ceilings and layers", "peer", "demo", "step"]
    assert all(part.limit_s > part.seconds for part in parts)
    files = {path.stem for path in (ROOT / "python/tests/gpu").glob("test_*_multi_gpu.py")}
    names = [part.name for part in parts if part.name.startswith("tests")]
    assert {f"tests: {name}, EP {num_ranks}" for name in files} <= set(names)
    # A host of eight tells about four as well.
    assert len(names) == len(files) * (2 if num_ranks == 8 else 1) + 1
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.name.startswith("tests"):  # what cannot run fails, and sources do not stand in for the wheel
            assert (part.env["MEGA_MOE_REQUIRE_GPU"], part.env["MEGA_MOE_REQUIRE_INSTALLED"]) == ("1", "1")
            assert (ROOT / part.command[part.command.index("no:cacheprovider") + 1]).exists()


def test_layers_in_every_precision_backend_direction_and_size(plan: Any) -> None:
    found = plan.cases(setting(plan, 2))
    assert len({case.name for case in found}) == len(found)
    fused = {(c.shape, c.tokens, c.precision) for c in found if c.backend == "fused"}
    assert fused == {
        (shape, tokens, precision)
        for shape in ("30B", "235B")
        for tokens in (16384, 8192)
        for precision in ("bf16", "fp8", "fp8_bwd")
    }
    assert {case.backend for case in found} == {"fused", "grouped", "deep_gemm", "reference"}
    assert {(c.tokens, c.backend) for c in found if c.importance < 6 and not c.reserved_sms} == {
        (tokens, backend) for tokens in (16384, 8192) for backend in ("fused", "grouped", "deep_gemm")
    }
    reserved = {(c.shape, c.tokens, c.precision) for c in found if c.reserved_sms}
    assert reserved == {("30B", 16384, "bf16"), ("235B", 16384, "bf16")}
    with_dw = {(c.shape, c.tokens, c.precision, c.directions) for c in found if c.dw_precision == "fp8"}
    assert with_dw == {(shape, tokens, "fp8", ("backward",)) for shape, tokens, _ in fused}


@pytest.mark.parametrize(("num_ranks", "skews"), [(1, set()), (2, set()), (4, {2, 4}), (8, {2, 4, 7})])
def test_uneven_routing_as_far_as_the_ranks_allow(plan: Any, num_ranks: int, skews: set[float]) -> None:
    assert {case.skew for case in plan.cases(setting(plan, num_ranks))} == {None, *skews}


def test_peers_that_are_not_there_are_skipped_with_the_reason(plan: Any, tmp_path: Path) -> None:
    assert {part.skipped for part in plan.peer_parts(setting(plan, 2))} == {
        "no folder was given, --peers names it"
    }
    (tmp_path / plan.BASELINE).write_text("")
    parts = plan.peer_parts(setting(plan, 2, peers=tmp_path))
    assert [part.skipped for part in parts] == [
        None,
        f"{plan.FP8_PEER} is not in the folder that --peers names",
    ] * 2
    assert [part.env["TOK"] for part in parts] == ["16384", "16384", "8192", "8192"]


def test_without_two_gpus_the_tests_are_scripts(plan: Any) -> None:
    commands = [part.command for part in plan.test_parts(setting(plan, 1))]
    assert [command[-1] for command in commands] == [f"python/tests/gpu/{name}" for name in plan.TEST_SCRIPTS]
    (rehearsal,) = plan.test_parts(setting(plan, 2, device="cpu"))
    assert rehearsal.command[-2:] == ("python/tests/gpu/late_ranks.py", "cpu")
    for command in (*commands, rehearsal.command):
        assert any((ROOT / word).is_file() for word in command if word.endswith("_ranks.py"))


@pytest.mark.parametrize("budget", [0.0, 30.0, 100.0, 200.0, 300.0, 10_000.0])
def test_the_least_important_is_dropped_first(plan: Any, budget: float) -> None:
    parts = plan.plan(setting(plan, 8))
    kept, dropped = plan.fit(parts, budget)
    importance = {part.name: part.importance for part in parts if part.skipped is None}
    importance |= {case.name: case.importance for part in parts for case in part.cases}
    there = {part.name for part in kept if part.skipped is None} | {
        case.name for part in kept for case in part.cases
    }
    assert there | set(dropped) == set(importance)
    assert not there & set(dropped)
    assert sum(part.seconds for part in kept if part.skipped is None) <= max(budget, 0.0) + 1e-6
    if there and dropped:
        assert max(importance[name] for name in there) <= min(importance[name] for name in dropped)
    if budget > 9_000:
        assert not dropped


def test_a_dry_run_needs_no_torch_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    out = tmp_path / "out"
    words = ["--dry-run", "--gpus", "2", "--budget", "300", "--out", str(out)]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(FOLDER)!r}]; import ranks; ranks.main({words})"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "30B T=16384 bf16: fused forward+backward" in done.stdout
    assert "dropped for time: 235B T=16384 bf16: reference forward+backward" in done.stdout
    assert "peer: baseline, T=16384: skipped, no folder was given, --peers names it" in done.stdout
    assert "of 300 s on 2 x cuda" in done.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--peers", "nowhere"], "peers: got nowhere, wanted a folder"),
        (["--wheel", "gone.whl"], "wheel: got gone.whl"),
    ],
)
def test_bad_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks

    assert ranks.main(["--gpus", "2", *words]) == 2
    assert f"ranks: {text}" in capsys.readouterr().err


def test_other_ranks_of_torchrun_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks

    monkeypatch.setenv("RANK", "1")
    assert ranks.main(["--gpus", "2", "--wheel", "gone.whl"]) == 0


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
