"""The step benchmark on a CPU: what it measures and refuses, what it writes, and what it takes a model's step to be."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mega_moe.bench import main, schema
from mega_moe.bench.step.model import Transformer, initialize
from mega_moe.bench.step.shapes import MODELS, Model, find_model, peak_flops

ROOT = Path(__file__).resolve().parents[3]
SMALL = Model("small", 32, 2, 2, 1, 16, 4, 2, 16, 64, 8)


def words(*more: str) -> list[str]:
    return ["step", "--device", "cpu", "--sequence", "16", "--steps", "3", "--skip", "1", *more]


def test_a_run_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.json"
    assert main(words("--json", str(out), "--backend", "fused,deep_gemm,grouped,reference")) == 0
    result = schema.read(out, schema.StepResult)
    status = {row.backend: row.status for row in result.rows}
    assert status == {
        "fused": "refused",
        "deep_gemm": "refused",
        "grouped": "measured",
        "reference": "measured",
    }
    assert result.arguments[-4:-2] == ("--json", "steps.json")
    refused = result.rows[1]
    assert "needs an NVIDIA GPU, the device is cpu" in refused.reasons
    assert not any("fused" in reason for reason in refused.reasons)
    for row in result.rows[2:]:
        assert (row.layers, row.model_layers, row.sequence, row.ep_size) == (2, 2, 16, 1)
        # Full checkpointing, and yet each of the two layers runs once.
        assert row.moe_forwards == 2
        assert row.seconds is not None
        assert row.moe_seconds is not None
        assert 0 < row.moe_seconds < row.seconds
        assert row.tokens_per_s == pytest.approx(16 / row.seconds)
        assert len(row.steps_s) == 2
        assert row.seconds == pytest.approx(sum(row.steps_s) / 2)
        assert (row.mfu, row.peak_bytes) == (None, None)
    # The same weights and tokens whatever serves them.
    assert result.rows[2].losses == pytest.approx(result.rows[3].losses, rel=1e-4)
    printed = capsys.readouterr().out
    for part in (
        "tokens/s/GPU",
        "grouped",
        "2 of 2 layers, sequence 16, EP 1",
        "refused: tiny bf16: backend fused",
    ):
        assert part in printed


def test_several_precisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.json"
    named = ("--backend", "reference,grouped", "--precision", "bf16,fp8", "--model", "tiny")
    assert main(words(*named, "--json", str(out))) == 0
    rows = schema.read(out, schema.StepResult).rows
    assert [(row.backend, row.precision, row.status) for row in rows] == [
        ("reference", "bf16", "measured"),
        ("grouped", "bf16", "measured"),
        ("reference", "fp8", "measured"),
        ("grouped", "fp8", "refused"),
    ]
    printed = capsys.readouterr().out
    assert "tiny fp8" in printed
    assert "refused: tiny fp8: backend grouped: computes in the inputs' dtype only" in printed


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--precision", "bf16,fp4"), "precision: got 'fp4', wanted one of bf16, fp8"),
        (("--precision", ","), "precision: got ',', wanted one of bf16, fp8"),
        (("--model", "40B"), "model: got '40B', wanted one of tiny, 30B, 235B"),
        (("--backend", "fast"), "backend: got 'fast', wanted one of fused"),
        (("--skip", "3"), "skip: got 3, wanted 0 to 2"),
        (("--layers", "0"), "layers: got 0, wanted at least 1"),
        (("--layers", "3"), "layers: got 3, wanted at most 2"),
        (("--ep-size", "3"), "ep_size: got 3, want a divisor of the 1 ranks"),
        (("--json", "no/such/folder.json"), "json: got no/such/folder.json"),
        (("--device", "cuda"), "device: got 'cuda'"),
    ],
)
def test_bad_words(more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(*more)) == 2
    assert told in capsys.readouterr().err


def test_everything_refused_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--backend", "fused")) == 1
    assert "refused: tiny bf16: backend fused" in capsys.readouterr().out


def test_two_ranks_share_the_experts(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "mega_moe.cli", "bench", *words("--backend", "grouped", "--json", str(out))]
    import os

    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = schema.read(out, schema.StepResult).rows
    assert (row.num_ranks, row.ep_size, row.status, row.moe_forwards) == (2, 2, "measured", 2)


@pytest.mark.parametrize("where", ["clip_grad_norm_", "initialize"])
def test_a_failure_is_a_row(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mega_moe.bench.step import measure

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory\nand pages of it")

    monkeypatch.setattr(measure, where, out_of_memory)
    out = tmp_path / "steps.json"
    assert main(words("--backend", "grouped", "--json", str(out))) == 1
    (row,) = schema.read(out, schema.StepResult).rows
    assert (row.status, row.reasons, row.seconds) == ("failed", ("CUDA out of memory",), None)
    assert "failed: tiny bf16: backend grouped: CUDA out of memory" in capsys.readouterr().out


def test_parameters_and_flops_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = Transformer(SMALL)
    counted = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(n for name, n in counted.items() if ".experts." in name)
    attention = sum(n for name, n in counted.items() if ".qkv." in name or ".out." in name)
    assert experts == 2 * SMALL.expert_parameters
    assert attention == 2 * SMALL.attention_parameters
    # Two FLOPs for each weight that a token meets, forward, and twice that backward; attention itself comes on top.
    met = attention + experts * SMALL.top_k / SMALL.num_experts + 2 * 32 * 4 + 64 * 32
    scores = 2 * 2 * SMALL.sequence * 2 * 16
    assert SMALL.flops(10) == 3 * 10 * (2 * met + scores)


def test_published_sizes() -> None:
    """Parameters in billions, as the models' names say; embedding and head counted."""
    for name, total in (("30B", 30.5), ("235B", 235.1)):
        model = MODELS[name]
        block = model.attention_parameters + model.expert_parameters + model.hidden * model.num_experts
        assert (model.num_layers * block + 2 * model.vocab_size * model.hidden) / 1e9 == pytest.approx(
            total, rel=0.01
        )
    assert find_model("30b") is MODELS["30B"]


def test_layers_that_fit() -> None:
    large, gib = MODELS["30B"], 1 << 30
    alone = large.layers_that_fit(139 * gib, 1, 1)
    assert 3 <= alone < 20
    assert large.layers_that_fit(139 * gib, 8, 8) == 48
    assert alone < large.layers_that_fit(139 * gib, 2, 2) < 48
    assert large.layers_that_fit(1, 1, 1) == 1
    assert MODELS["235B"].layers_that_fit(139 * gib, 8, 8) < 94


def test_peaks_by_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA GeForce RTX 5090") is None


def test_weights_depend_on_the_seed_alone() -> None:
    models = [Transformer(SMALL) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2)):
        initialize(model, seed)
    first, again, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def row(**changes: Any) -> schema.StepRow:
    known: dict[str, Any] = dict(
        kind="step", model="30B", layers=9, model_layers=48, sequence=16384, num_ranks=1, ep_size=1, backend="fused",
        precision="bf16", reserved_sms=16, status="measured", reason="fused", seconds=2.0, steps_s=(2.0,),
        tokens_per_s=8192.0, mfu=0.4, peak_bytes=100 << 30, moe_seconds=1.0, moe_forwards=9, load_max_over_mean=1.2,
        losses=(12.0,), reasons=(),
    )  # fmt: skip
    return schema.StepRow(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seconds": None}, "seconds: got None"),
        ({"moe_forwards": 0}, "moe_forwards: got 0"),
        ({"steps_s": ()}, "steps_s"),
        ({"reasons": ("why",)}, "reasons"),
        ({"status": "refused"}, "seconds: got 2.0, wanted null on a refused row"),
        ({"status": "failed", "seconds": None}, "reasons"),
    ],
)
def test_a_row_that_contradicts_itself(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(schema.SchemaError, match=told):
        row(**changes)


def environment(**changes: Any) -> schema.Environment:
    known: dict[str, Any] = dict(
        date="2026-11-29T12:00:00Z", device="NVIDIA H200", num_sms=132, num_ranks=1, driver="580.1", cuda="13.0",
        torch="2.11.0", python="3.12", platform="Linux", mega_moe="0.1.0", wheel_sha256="a" * 64, wheel_reason=None,
        kernels_sha256="b" * 64, kernels_reason=None,
    )  # fmt: skip
    return schema.Environment(**{**known, **changes})


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_report", ROOT / "python/benchmarks/report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(*rows: schema.StepRow, **changes: Any) -> schema.StepResult:
    return schema.StepResult(schema.SCHEMA_VERSION, environment(**changes), (), rows)


def test_results_are_read_as_they_were_written_and_nothing_else() -> None:
    made = result(row(), row(status="refused", seconds=None, reasons=("why",)))
    text = schema.dumps(made)
    assert schema.loads(text, schema.StepResult) == made
    with pytest.raises(schema.SchemaError, match="only the fields"):
        schema.loads(json.dumps({**dataclasses.asdict(made), "more": 1}), schema.StepResult)
    with pytest.raises(schema.SchemaError, match="not JSON"):
        schema.loads("{", schema.StepResult)


def test_the_document_gets_the_newest_of_each_model(report: ModuleType, tmp_path: Path) -> None:
    refused = row(
        backend="deep_gemm", status="refused", seconds=None, reasons=("deep_gemm is not installed",)
    )
    files = {
        "old": result(row(seconds=9.0), date="2026-11-01T12:00:00Z"),
        "new": result(row(seconds=3.25), refused),
        "other": result(row(model="235B", seconds=4.5, mfu=None)),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(schema.dumps(content))
    same, other = (report.staleness.Kernels(digest * 64, {}, {}, "13.0.88") for digest in "bc")
    text = report.full_report([], same, report.newest_steps(tmp_path))
    assert "9.000" not in text
    assert "| fused | bf16 | 3.250 | 8192 | 40.0% | 1.000 | 9 | 100.0 | 1.20 |" in text
    assert "| fused | bf16 | 4.500 | 8192 | - |" in text
    assert "- refused: deep_gemm: deep_gemm is not installed" in text
    assert "30B: 9 of 48 layers, sequence 16384 a GPU, EP 1" in text
    assert "stale" not in text
    assert "fused (stale)" in report.full_report([], other, report.newest_steps(tmp_path))
    assert report.full_report([], same, []) == report.NONE_YET
