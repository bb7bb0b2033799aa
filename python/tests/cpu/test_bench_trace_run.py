"""`mega-moe bench --trace`: what it writes and says, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mega_moe._backends.choice import facts
from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe.bench import kernel_ranks, main, trace
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import SHAPES

from ._trace import schedule


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
    assert trace.why_no_trace(options, torch.device("cuda", 0)) == ([] if held else [reason])
    quantized = replace(options, precision="fp8_bwd" if direction == "backward" else "fp8")
    reason = f"this wheel holds no tracing variant of the fp8 {direction} kernel for sm_90"
    assert reason in trace.why_no_trace(quantized, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--protocol", "burst"], "protocol: cannot be combined with --trace"),
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


def test_run_writes_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = trace.Recorded(schedule(), SimpleNamespace(num_sms=2), 9.0, 10.0)  # type: ignore[arg-type]
    monkeypatch.setattr(trace, "why_no_trace", lambda *_: [])
    monkeypatch.setattr(trace, "record", lambda *_: recorded)
    options = kernel_ranks.Options(SHAPES["tiny"], 65, 1)
    trace.run(options, tmp_path / "v1.2", Context(torch.device("cpu"), None, 0, 1))
    said = capsys.readouterr().out
    assert "tiny bf16 forward, T=65 x 1 ranks of 2 SMs" in said
    assert "9.0 us, traced 10.0 us" in said
    assert "tensor cores busy" in said
    assert [path.name for path in tmp_path.iterdir()] == ["v1.2.json"]


def test_several_processes_are_refused(tmp_path: Path) -> None:
    options = kernel_ranks.Options(SHAPES["tiny"], 65, 1)
    with pytest.raises(ValueError, match=r"got 2 processes, wanted one; --virtual-ranks"):
        trace.run(options, tmp_path / "t", Context(torch.device("cpu"), None, 0, 2))
