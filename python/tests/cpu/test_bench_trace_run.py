"""`mega-moe bench --trace`: what it writes and says, and what it refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mega_moe._backends.choice import facts
from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe.bench import kernel_ranks, main, trace, trace_file, trace_run
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import SHAPES
from mega_moe.bench.trace_events import Trace
from mega_moe.bench.trace_tiles import Wanted, row_tiles

from ._trace import COLUMNS, ROWS, SLOTS, schedule


def test_without_a_gpu_the_reason_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--trace", str(tmp_path / "t")]) == 2
    said = capsys.readouterr().err
    assert "trace: no trace can be recorded here: " in said
    assert "needs an NVIDIA GPU, the device is cpu" in said
    assert list(tmp_path.iterdir()) == []


H200 = RankFacts(
    device="cuda:0",
    device_name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    driver_cuda=(13, 0),
    library_loaded=True,
    library_cuda="13.0",
    library_architectures=("90a",),
    variants=(
        Variant("route", "90a", "none"),
        Variant("forward", "90a", "bf16", 256, 128),
        Variant("backward", "90a", "bf16", 256, 128, "bf16"),
    ),
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("architectures", "held"), [(["90a"], True), ([], False), (["100a"], False)])
def test_without_a_tracing_variant_the_reason_is_said(
    architectures: list[str], held: bool, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wgrad = "bf16" if direction == "backward" else "none"
    tracing = tuple(Variant(direction, name, "bf16", 256, 128, wgrad, trace=True) for name in architectures)
    monkeypatch.setattr(facts, "collect", lambda *_: replace(H200, variants=(*H200.variants, *tracing)))
    options = kernel_ranks.Options(SHAPES["30B"], 128, 1, direction)
    reason = f"this wheel holds no tracing variant of the bf16 {direction} kernel for sm_90"
    assert trace_run.why_no_trace(options, torch.device("cuda", 0)) == ([] if held else [reason])
    quantized = replace(options, precision="fp8_bwd" if direction == "backward" else "fp8")
    reason = f"this wheel holds no tracing variant of the fp8 {direction} kernel for sm_90"
    assert reason in trace_run.why_no_trace(quantized, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--protocol", "burst"], "protocol: cannot be combined with --trace"),
        (["--dw-dtype", "float32"], "dw-dtype: cannot be combined with --trace"),
        (["--quick"], "quick: cannot be combined with --trace"),
        (["--shape", "30B,235B"], "shape: got '30B,235B', wanted one shape to trace"),
        (
            ["--direction", "forward_backward"],
            "direction: got 'forward_backward', wanted one of forward, backward",
        ),
        (
            ["--direction", "forward,backward"],
            "direction: got 'forward,backward', wanted one of forward, backward",
        ),
        (["--precision", "bf16,fp8"], "precision: got 'bf16,fp8', wanted one of bf16, fp8"),
        (["--tokens", "0"], "tokens: got 0, wanted at least 1"),
        (["--virtual-ranks", "3"], "want a multiple of the 3 ranks"),
        (["--virtual-ranks", "0"], "num_ranks: got 0"),
    ],
)
def test_words_that_do_not_fit_a_trace_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--trace", str(tmp_path / "t"), *words]) == 2
    assert message in capsys.readouterr().err


def test_virtual_ranks_and_folders_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--virtual-ranks", "2"]) == 2
    assert "virtual-ranks: can only be combined with --trace" in capsys.readouterr().err
    assert main(["--device", "cpu", "--trace", str(tmp_path / "none" / "t")]) == 2
    assert "in a folder that exists" in capsys.readouterr().err
    assert trace.Files.of(tmp_path / "v1.2") == trace.Files(tmp_path / "v1.2.json", tmp_path / "v1.2.png")


def recorded(made: Trace) -> trace_run.Recorded:
    return trace_run.Recorded(made, Wanted(row_tiles([ROWS], [SLOTS], COLUMNS)), 9.0, 10.0, 2)


def run(made: Trace, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(trace, "why_no_trace", lambda *_: [])
    monkeypatch.setattr(trace, "record", lambda *_: recorded(made))
    options = kernel_ranks.Options(SHAPES["tiny"], 65, 1)
    return trace.run(options, trace.Files.of(out), Context(torch.device("cpu"), None, 0, 1))


def test_run_writes_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(schedule(), tmp_path / "t", monkeypatch) == 0
    said = capsys.readouterr()
    assert "tiny bf16 forward, T=65 x 1 ranks of 2 SMs" in said.out
    assert "schedule: right, each of 6 products once and after what it reads" in said.out
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "t.json").is_file()
    assert (tmp_path / "t.png").is_file() is drawn
    assert ("not drawn" in said.err) is not drawn


def test_run_without_matplotlib_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert run(schedule(), tmp_path / "t", monkeypatch) == 0
    assert (
        "not drawn: matplotlib is not installed (the extra mega-moe[demo] brings it)"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_run_fails_on_a_wrong_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(schedule(columns=(0,)), tmp_path / "t", monkeypatch) == 1
    assert (
        "schedule: 2 faults, the first of them\n  rank 0 chunk 0 down e0 m2 n1: no products"
        in capsys.readouterr().out
    )


def test_a_trace_with_dropped_events_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = replace(schedule(columns=(0,)), full_lanes=((0, 1, 2),))
    assert run(dropped, tmp_path / "t", monkeypatch) == 0
    assert "schedule: not judged, since events were dropped" in capsys.readouterr().out


def test_a_written_trace_is_summed_up_and_drawn_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'demo'")
    assert run(schedule(), tmp_path / "t", monkeypatch) == 0
    table = capsys.readouterr().out.split("schedule: right")[0]
    (tmp_path / "t.png").unlink()
    assert trace_file.main([str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / "t.png").is_file()
    assert trace_file.main([str(tmp_path / "t.png")]) == 2
    assert trace_file.main([str(tmp_path / "none.json")]) == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert trace_file.main([str(tmp_path / "t.json")]) == 1


def test_several_processes_are_refused(tmp_path: Path) -> None:
    options = kernel_ranks.Options(SHAPES["tiny"], 65, 1)
    with pytest.raises(ValueError, match=r"got 2 processes, wanted one; --virtual-ranks"):
        trace.run(options, trace.Files.of(tmp_path / "t"), Context(torch.device("cpu"), None, 0, 2))
