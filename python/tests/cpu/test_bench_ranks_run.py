"""The run over several GPUs with programs that hang, break or are slow: the rest goes on, and what is known is kept."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mega_moe.bench import schema

FOLDER = Path(__file__).resolve().parents[3] / "python/benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import ranks_plan
    import ranks_process
    import ranks_run

    return ranks_plan, ranks_process, ranks_run


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(300)
"""


def test_a_limit_ends_what_the_program_started_in_sessions_of_its_own(modules: Any, tmp_path: Path) -> None:
    _, process, _ = modules
    output = tmp_path / "output"
    start = time.monotonic()
    # Python ends at SIGTERM without a word to its child, as a torchrun that is killed does.
    ended = process.run([sys.executable, "-c", GRANDCHILD], output, 2.0)
    assert (ended.code, ended.reason) == (None, "no end within 2 s")
    assert time.monotonic() - start < 2 + process.GRACE_S + 5
    status = Path(f"/proc/{int(output.read_text())}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_ends_by_itself(modules: Any, tmp_path: Path) -> None:
    _, process, _ = modules
    ended = process.run([sys.executable, "-c", "import sys; print('said'); sys.exit(3)"], tmp_path / "o", 60)
    assert (ended.code, ended.reason) == (3, None)
    assert (tmp_path / "o").read_text() == "said\n"


def test_a_program_that_says_nothing_is_ended_early(modules: Any, tmp_path: Path) -> None:
    _, process, _ = modules
    ended = process.run(["sleep", "60"], tmp_path / "o", 60, stalled=lambda: "silent")
    assert (ended.code, ended.reason) == (None, "silent")
    assert ended.seconds < 10


# Plays the measuring program: a row for each case; what the case's backend says it does.
MEASURING = """
import json, os, sys, time
job, events = json.load(open(sys.argv[1])), open(sys.argv[2], "a")
def tell(**what):
    print(json.dumps(what), file=events, flush=True)
sample = json.load(open(os.environ["SAMPLE"]))
tell(event="environment", environment=sample["environment"])
if not job["rates"]:
    tell(event="row", row=sample["ceiling"])
for case in job["cases"]:
    if time.time() + case["seconds"] > job["deadline"]:
        tell(event="left out", case=case["name"])
        continue
    row = {**sample["row"], "backend": case["backend"], "tokens": case["tokens"]}
    tell(event="begin", case=case["name"], lost={**row, **sample["nothing"]})
    if case["backend"] == "fused":
        time.sleep(300)
    if case["backend"] == "deep_gemm":
        raise RuntimeError("an illegal memory access")
    tell(event="row", row=row)
    tell(event="end", case=case["name"])
"""


@pytest.fixture
def measuring(modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose measuring program is the one above, and cases of three backends."""
    plan, _, run = modules
    script = tmp_path / "measuring.py"
    script.write_text(MEASURING)
    from .test_bench_results import layer_row, measured, sample

    nothing = (
        "dw_dtype",
        "flops",
        "flop_rule",
        "tflops",
        "percent_of_ceiling",
        "peak_bytes",
        "relative_error",
    )
    told = {
        "environment": schema.plain(sample(num_ranks=2).environment),
        "ceiling": schema.plain(sample().rows[0]),
        "row": schema.plain(layer_row(measured("burst", 0.01), num_ranks=2)),
        "nothing": {**dict.fromkeys(nothing), "direction": "all"},
    }
    (tmp_path / "sample.json").write_text(json.dumps(told))
    monkeypatch.setenv("SAMPLE", str(tmp_path / "sample.json"))
    monkeypatch.setattr(run, "torchrun", lambda _, __, *words: (sys.executable, str(script), *words))
    folder = tmp_path / "between"
    folder.mkdir()
    setting = plan.Setting(2, "cuda", None, None, tiny=False, quick=True, folder=folder)
    return run.Run(setting, tmp_path / "out", 600.0, ["--out", "/a/b"], limits=(2.0, 20.0))


def case(modules: Any, backend: str, tokens: int = 16384) -> Any:
    return modules[0].Case("30B", tokens, "bf16", backend, ("backward",), None, 2)


def rows_of(run: Any) -> list[tuple[str, int, str]]:
    result = schema.read(run.result)
    return [
        (row.backend, row.tokens, row.outcome.status)
        for row in result.rows
        if isinstance(row, schema.LayerRow)
    ]


def test_a_hang_and_a_crash_cost_their_own_rows(modules: Any, measuring: Any) -> None:
    chosen = [case(modules, name) for name in ("grouped", "fused", "deep_gemm", "reference")]
    became = measuring.measure(modules[0].rows_part(measuring.setting, chosen), 500.0)
    assert became.status == "failed"
    assert rows_of(measuring) == [
        ("grouped", 16384, "measured"),
        ("fused", 16384, "failed"),
        ("deep_gemm", 16384, "failed"),
        ("reference", 16384, "measured"),
    ]
    result = schema.read(measuring.result)
    reasons = [row.outcome.reasons for row in result.rows if row.outcome.status == "failed"]
    assert reasons == [
        ("nothing was heard for 2 s",),
        ("ended with status 1: RuntimeError: an illegal memory access",),
    ]
    assert [row.kind for row in result.rows].count(
        "ceiling"
    ) == 1  # the second program did not measure it again
    assert measuring.result.name == "nvidia-h200-x2-2026-11-29.json"
    assert result.arguments == ("--out", "b")


def test_a_backend_that_is_lost_twice_is_not_tried_again(modules: Any, measuring: Any) -> None:
    chosen = [*(case(modules, "fused", tokens) for tokens in (1, 2, 3)), case(modules, "grouped")]
    became = measuring.measure(modules[0].rows_part(measuring.setting, chosen), 500.0)
    assert rows_of(measuring) == [
        ("fused", 1, "failed"),
        ("fused", 2, "failed"),
        ("grouped", 16384, "measured"),
    ]
    assert "left out: 30B T=3 bf16: fused backward" in str(became.reason)


def test_cases_beyond_the_deadline_are_left_out(modules: Any, measuring: Any) -> None:
    first, second = case(modules, "grouped"), case(modules, "reference", 1 << 17)
    assert first.seconds() + 0.2 < second.seconds()
    between = (first.seconds() + second.seconds()) / 2
    became = measuring.measure(modules[0].rows_part(measuring.setting, [first, second]), between)
    assert became.status == "passed"
    assert became.reason == f"left out: {second.name}"
    assert rows_of(measuring) == [("grouped", 16384, "measured")]


def test_parts_that_hang_or_fail_do_not_stop_the_others(
    modules: Any, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, run = modules
    python = (sys.executable, "-c")
    parts = [
        plan.Part("tests: hangs", 1, 1, 1.5, (*python, "import time; time.sleep(300)")),
        plan.Part("tests: fails", 1, 1, 60, (*python, "raise ValueError('wrong bits')")),
        plan.rows_part(measuring.setting, [case(modules, "grouped")]),
        plan.Part("peer: other", 2, 1, 60, skipped="not here"),
        plan.Part("demo", 3, 9_999, 60, (*python, "")),
        plan.Part("step: fused", 2, 1, 60, (*python, "print('stepped')")),
    ]
    monkeypatch.setattr(run, "plan", lambda _: parts)
    assert measuring.everything() == 1
    kept = json.loads((measuring.out / "ranks.json").read_text())["parts"]
    assert [(part["name"], part["status"]) for part in kept] == [
        ("tests: hangs", "timed out"),
        ("tests: fails", "failed"),
        ("ceilings and layers", "passed"),
        ("peer: other", "skipped"),
        ("demo", "left out"),
        ("step: fused", "passed"),
    ]
    assert kept[1]["reason"] == "ended with status 1: ValueError: wrong bits"
    assert rows_of(measuring) == [("grouped", 16384, "measured")]
    assert "stepped" in (measuring.out / "log.txt").read_text()


def test_every_row_is_on_disk_before_the_program_ends(modules: Any, measuring: Any) -> None:
    """As when the whole run is killed: rows are written while the measuring program goes on."""
    seen = []
    keep = measuring._write_result
    measuring._write_result = lambda: (keep(), seen.append(rows_of(measuring)))
    chosen = [case(modules, "grouped"), case(modules, "fused")]
    measuring.measure(modules[0].rows_part(measuring.setting, chosen), 500.0)
    assert seen[0] == [("grouped", 16384, "measured")]
    assert seen[-1][-1] == ("fused", 16384, "failed")


def test_peers_stand_in_the_same_result(modules: Any, measuring: Any) -> None:
    plan, process, _ = modules
    measuring.measure(plan.rows_part(measuring.setting, [case(modules, "grouped")]), 500.0)
    part = plan.Part("peer: baseline", 2, 1, 60, ("python", plan.BASELINE), {"TOK": "16384"})
    said = "30B EP 2 baseline fwd ms 8.96 (138 TF/s) fwd+bwd 20.28 -> bwd 11.32\n"
    measuring._keep_peer(part, said, process.Ended(None, 90.0, "no end within 90 s"))
    measuring._write_result()
    peers = [row for row in schema.read(measuring.result).rows if isinstance(row, schema.PeerRow)]
    assert [(row.shape, row.direction, row.outcome.status) for row in peers] == [
        ("30B", "forward", "measured"),
        ("30B", "backward", "measured"),
        ("235B", "all", "failed"),
    ]
    assert peers[2].outcome.reasons == ("no end within 90 s",)


def test_layers_and_the_peer_find_what_others_bring_and_tests_do_not(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, process, run = modules
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "other.whl").touch()
    setting = plan.Setting(2, "cuda", tmp_path / "a.whl", peers, tiny=False, quick=True, folder=tmp_path)
    made = run.Run(setting, tmp_path / "out", 600.0, [])
    made._env["PYTHONPATH"] = "ours"
    monkeypatch.setattr(made, "_installed", lambda name, wheels: f"{name}: {[w.name for w in wheels]}")
    seen = {}

    def ended(name: str, command: Any, limit_s: float, env: dict[str, str], stalled: Any = None) -> Any:
        made._log_of(name).touch()
        seen[name] = env.get("PYTHONPATH")
        return process.Ended(0, 1.0, None)

    monkeypatch.setattr(made, "_run", ended)
    made._measuring([case(modules, "fused")], 1e12, 60.0)
    made._program(plan.Part("peer: FP8 peer", 2, 1, 60, ("python", plan.FP8_PEER), {"TOK": "16384"}))
    made._program(plan.Part("tests: route", 1, 1, 60, ("python", "-m", "pytest")))
    theirs = "peer: ['other.whl']"
    assert seen == {
        "ceilings and layers": f"ours:{theirs}",
        "peer: FP8 peer": theirs,
        "tests: route": None,
    }


@pytest.mark.slow
def test_the_measuring_program_itself_over_two_ranks(modules: Any, tmp_path: Path) -> None:
    plan, _, run = modules
    folder = tmp_path / "between"
    folder.mkdir()
    setting = plan.Setting(2, "cpu", None, None, tiny=True, quick=True, folder=folder)
    made = run.Run(setting, tmp_path / "out", 600.0, [])
    chosen = [
        plan.Case("tiny", 256, "bf16", "fused", ("forward",), None, 2),
        plan.Case("tiny", 256, "bf16", "grouped", ("forward",), 2.0, 2),
    ]
    became = made.measure(plan.rows_part(setting, chosen), 500.0)
    assert became.status == "passed", (made.out / "log.txt").read_text()
    result = schema.read(made.result)
    layers = [row for row in result.rows if isinstance(row, schema.LayerRow)]
    assert [(row.backend, row.skew, row.outcome.status) for row in layers] == [
        ("fused", None, "refused"),
        ("grouped", 2.0, "measured"),
        ("grouped", 2.0, "measured"),
    ]
    assert layers[1].flop_rule == "6*T*K*H*I, times 2 on rank 0"
    assert layers[1].relative_error is not None
    assert result.environment.num_ranks == 2
