"""`mega-moe bench` from end to end with the tiny shape, alone and under torchrun."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_moe._ops import library
from mega_moe.bench import main, schema
from mega_moe.bench.environment import driver_version, kernel_code, wheel_hash
from mega_moe.bench.layer import Case
from mega_moe.bench.problem import random_problem
from mega_moe.bench.protocols import PROTOCOLS, HostTimer
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import CeilingRow, HostRow, LayerRow
from mega_moe.bench.shapes import SHAPES, Shape
from mega_moe.bench.suite import Options, run

CPU = Context(torch.device("cpu"), None, 0, 1)
QUICK = ["--device", "cpu", "--quick", "--shape", "tiny"]


def test_whole_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main([*QUICK, "--protocol", "burst", "--json", str(path)]) == 0
    result = schema.read(path)
    layer = [row for row in result.rows if isinstance(row, LayerRow)]
    measured = {(row.backend, row.direction): row for row in layer if row.outcome.status == "measured"}
    assert set(measured) == {
        (backend, direction)
        for backend in ("dispatched", "grouped", "reference")
        for direction in ("forward", "backward", "forward_backward")
    }
    for row in measured.values():
        assert row.outcome.timing is not None
        assert row.outcome.timing.timer == "perf_counter"
        assert row.outcome.timing.mhz_reason == "clocks are read on CUDA devices only, the device is cpu"
        assert row.outcome.timing.input_sets == 3
        assert row.relative_error is not None
        assert row.relative_error <= 1e-4
        assert row.percent_of_ceiling is not None
        assert row.dtype == "float32"
        assert row.dw_dtype == (None if row.direction == "forward" else "float32")
        assert row.reserved_sms is None
    refused = [row for row in layer if row.outcome.status == "refused"]
    assert [row.backend for row in refused] == ["fused", "deep_gemm"]
    assert "needs an NVIDIA GPU, the device is cpu" in refused[0].outcome.reasons
    assert {row.name: row.outcome.status for row in result.rows if isinstance(row, CeilingRow)} == {
        "product float32": "measured",
        "product float8_e4m3fn": "refused",
        "device copy": "measured",
        "peer pull": "refused",
        "peer push": "refused",
    }
    assert result.environment.num_ranks == 1
    assert "forward+backward" in capsys.readouterr().out


def test_host_time_of_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    words = ["--device", "cpu", "--part", "host", "--backend", "grouped,fused", "--tokens", "8"]
    assert main([*words, "--json", str(path)]) == 0
    rows = schema.read(path).rows
    assert all(isinstance(row, HostRow) for row in rows)
    assert [(row.backend, row.direction, row.outcome.status) for row in rows] == [
        ("-", "line", "measured"),
        ("grouped", "forward", "measured"),
        ("grouped", "forward_backward", "measured"),
        ("fused", "all", "refused"),
    ]
    line, forward, both = (row.outcome.timing.seconds for row in rows[:3])
    assert [row.ratio for row in rows[:3]] == pytest.approx([1, forward / line, both / line])
    assert 0 < line < both
    out = capsys.readouterr().out
    assert "x line" in out
    assert "refused: host tiny: backend fused" in out


def test_fewer_tokens_are_measured_where_a_shape_has_more() -> None:
    shape = SHAPES["tiny"]
    fewer = (shape.default_tokens // 2, shape.default_tokens, 2 * shape.default_tokens)
    options = Options(
        parts=("layer",),
        shapes=(shape,),
        tokens=None,
        cases=tuple(Case("bf16", ("grouped",), tokens, directions=("forward",)) for tokens in (None, *fewer)),
        protocols=(PROTOCOLS["burst"].quick(),),
        dtype=torch.float32,
        wheel=None,
    )
    rows = run(options, CPU, [], lambda row: None).rows
    assert [(row.kind, getattr(row, "tokens", None)) for row in rows] == [
        ("layer", shape.default_tokens),
        ("layer", shape.default_tokens // 2),
    ]


def test_sustained_window_is_at_least_its_time_on_a_real_clock(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--protocol", "sustained", "--direction", "forward", "--backend", "grouped", "--part", "layer"]
    assert main([*QUICK, *words, "--json", str(path)]) == 0
    (row,) = schema.read(path).rows
    assert row.outcome.timing is not None
    assert all(s * row.outcome.timing.calls_per_window >= 0.3 for s in row.outcome.timing.windows_s)
    assert isinstance(row, LayerRow)
    assert row.percent_of_ceiling is None  # no ceiling was measured in this run


def test_dw_in_fp8_is_stated_and_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--direction", "backward", "--backend", "reference", "--part", "layer", "--protocol", "burst"]
    words += ["--precision", "fp8", "--dtype", "bfloat16", "--tokens", "16", "--json", str(path)]
    names = []
    for asked in ("bf16", "fp8"):
        assert main([*QUICK, *words, "--dw-precision", asked]) == 0
        (row,) = schema.read(path).rows
        assert isinstance(row, LayerRow)
        assert row.dw_precision == (None if asked == "bf16" else "fp8")
        names.append(row.numerics)
    assert names == ["fp8", "fp8 with dW fp8"]
    assert "tiny T=16 fp8 with dW fp8" in capsys.readouterr().out
    assert main([*QUICK, "--dw-precision", "fp8", "--precision", "fp8,bf16"]) == 2
    assert "dw_precision: got 'fp8' with precision 'bf16', want it" in capsys.readouterr().err


def test_a_precision_that_only_the_reference_can_do_is_refused_by_the_others(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--direction", "forward", "--precision", "fp8", "--part", "layer", "--protocol", "burst"]
    assert main([*QUICK, *words, "--dtype", "bfloat16", "--tokens", "16", "--json", str(path)]) == 0
    status = {row.backend: row.outcome.status for row in schema.read(path).rows if isinstance(row, LayerRow)}
    assert status == {
        "fused": "refused",
        "dispatched": "refused",
        "deep_gemm": "refused",
        "grouped": "refused",
        "reference": "measured",
    }


def test_a_backend_that_computes_something_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mega_moe._backends.plain.grouped import GroupedArithmetic

    honest = GroupedArithmetic.forward
    monkeypatch.setattr(GroupedArithmetic, "forward", lambda *args: honest(*args) * 1.01)
    path = tmp_path / "result.json"
    words = ["--direction", "forward", "--backend", "grouped", "--part", "layer", "--protocol", "burst"]
    assert main([*QUICK, *words, "--json", str(path)]) == 1
    (row,) = schema.read(path).rows
    assert row.outcome.status == "failed"
    assert "differs from the reference backend: relative L2 0.01" in row.outcome.reasons[0]
    assert "failed: tiny" in capsys.readouterr().out


def test_a_backend_that_breaks_is_a_row_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mega_moe._backends.plain.grouped import GroupedArithmetic

    def out_of_memory(*args: object) -> None:
        raise RuntimeError("out of memory: tried to allocate 1 TiB\nmore lines")

    monkeypatch.setattr(GroupedArithmetic, "forward", out_of_memory)
    path = tmp_path / "result.json"
    words = ["--direction", "forward", "--part", "layer", "--protocol", "burst"]
    assert main([*QUICK, *words, "--json", str(path)]) == 1
    rows = {row.backend: row.outcome for row in schema.read(path).rows if isinstance(row, LayerRow)}
    assert rows["grouped"].reasons == ("out of memory: tried to allocate 1 TiB",)
    assert rows["reference"].status == "measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "7B"], "shape: got '7B', wanted one of tiny, 30B"),
        (
            ["--backend", "fast"],
            "backend: got 'fast', wanted one of fused, dispatched, deep_gemm, grouped, reference",
        ),
        (["--protocol", "warm"], "protocol: got 'warm', wanted one of burst, sustained"),
        (["--direction", "up"], "direction: got 'up', wanted one of forward"),
        (["--precision", "int4"], "precision: got 'int4', wanted one of bf16"),
        (["--part", "all"], "part: got 'all', wanted one of ceilings, layer"),
        (["--tokens", "0"], "tokens: got 0, wanted at least 1"),
        (["--wheel", "missing.whl"], "wheel: got missing.whl, wanted a file"),
        (["--json", "no/such/folder/x.json"], "wanted a path in a folder that exists"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    part = [] if "--part" in words else ["--part", "layer"]
    assert main(["--device", "cpu", "--quick", *part, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "status", "told"),
    [
        ("fast", 2, "backend: got 'fast', wanted one of fused, dispatched, deep_gemm, grouped, reference"),
        ("fused", 1, "tiny bf16: fused: refused: takes bfloat16 inputs, got float32; needs an NVIDIA GPU"),
    ],
)
def test_nothing_is_measured_for_what_will_be_refused(
    backend: str, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: object) -> None:
        raise AssertionError("a ceiling was measured")

    monkeypatch.setattr("mega_moe.bench.suite.measure_ceiling", measured)
    assert main(["--device", "cpu", "--quick", "--backend", backend]) == status
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is that of a machine without CUDA")
def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [
        "--direction",
        "forward_backward",
        "--backend",
        "grouped",
        "--part",
        "layer",
        "--protocol",
        "burst",
    ]
    subprocess.run(
        [*torchrun, "-m", "mega_moe.cli", "bench", *QUICK, *words, "--json", str(path)],
        check=True,
        timeout=120,
        capture_output=True,
    )
    result = schema.read(path)
    (row,) = result.rows
    assert isinstance(row, LayerRow)
    assert row.outcome.status == "measured"
    assert (row.num_ranks, result.environment.num_ranks) == (2, 2)


def test_the_random_problem_is_one_and_its_routing_is_normalised() -> None:
    first, again = (random_problem(SHAPES["tiny"], 32, torch.float32, CPU) for _ in range(2))
    assert len(first.sets) == 3
    assert torch.equal(first.w_down, again.w_down)
    assert not torch.equal(first.sets[0].x, first.sets[1].x)
    for inputs in first.sets:
        assert torch.allclose(inputs.topk_weights.sum(-1), torch.ones(32))
        assert all(len(set(ids)) == 2 for ids in inputs.topk_idx.tolist())
    with pytest.raises(ValueError, match=r"ranks: got 3, wanted a divisor of 8 experts"):
        random_problem(SHAPES["tiny"], 32, torch.float32, Context(torch.device("cpu"), None, 0, 3))


def test_wheel_hash_is_that_of_the_named_file(tmp_path: Path) -> None:
    wheel = tmp_path / "mega_moe.whl"
    wheel.write_bytes(b"wheel")
    assert wheel_hash(wheel) == (hashlib.sha256(b"wheel").hexdigest(), None)
    digest, reason = wheel_hash(None)
    assert (digest is None) == (reason is not None)


def test_code_is_that_of_the_kernels_that_the_device_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = ({"name": "a", "architecture": "90a"}, {"name": "b", "architecture": "100a"})
    monkeypatch.setattr(library, "variants", lambda: variants)

    def built(loaded: bool = True, **record: Any) -> None:
        monkeypatch.setattr(library, "status", lambda: library.LibraryStatus(loaded, None, "here"))
        monkeypatch.setattr(library, "wheel_record", lambda: record)

    built(code={"a": "1" * 64, "b": "2" * 64})
    assert kernel_code((9, 0)) == {"a": "1" * 64}
    assert kernel_code((10, 0)) == {"b": "2" * 64}
    assert kernel_code((8, 0)) == {}
    assert kernel_code(None) == {}
    built()
    assert kernel_code((9, 0)) is None
    built(loaded=False, code={"a": "1" * 64})
    assert kernel_code((9, 0)) is None


def test_driver_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)\nGCC version: 12\n"
    )
    assert driver_version(path) == "580.95.05"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"
    )
    assert driver_version(path) == "535.54.03"
    assert driver_version(tmp_path / "missing") is None


def test_poison_spoils_what_an_allocation_may_recycle() -> None:
    problem = random_problem(SHAPES["tiny"], 8, torch.float32, CPU)
    problem.poison()  # must neither keep the block nor touch the inputs
    assert all(bool(torch.isfinite(inputs.x).all()) for inputs in problem.sets)


def test_ceiling_that_was_not_reached_by_its_copy_fails() -> None:
    from mega_moe.bench.ceilings import Ceiling, Operation, measure_ceiling

    lazy = Ceiling(
        "device copy",
        "nothing is copied",
        "GB/s",
        1e6,
        lambda _: Operation([lambda: None], lambda: None, lambda: "the target holds bytes 255 to 255"),
    )
    (row,) = measure_ceiling(lazy, [PROTOCOLS["burst"].quick()], HostTimer("no GPU"), CPU)
    assert (row.outcome.status, row.rate) == ("failed", None)


@pytest.mark.parametrize("hot", [2.0, 4.0])
def test_a_hot_expert_has_so_many_times_its_share(hot: float) -> None:
    shape = Shape("sixteen", 8, 8, 32, 3, 4000)
    problem = random_problem(shape, 4000, torch.float32, Context(torch.device("cpu"), None, 0, 1), hot=hot)
    for inputs in problem.sets:
        counts = inputs.topk_idx.flatten().bincount(minlength=32).double()
        assert counts[0].item() / (4000 * 3 / 32) == pytest.approx(hot, rel=0.1)
        assert counts[1:].max() < 1.3 * counts[1:].mean()
        assert all(len(set(ids)) == 3 for ids in inputs.topk_idx[:100].tolist())


def test_more_than_every_token_for_a_hot_expert() -> None:
    shape = Shape("sixteen", 8, 8, 32, 4, 4000)
    with pytest.raises(ValueError, match=r"hot: got 9.0, wanted above 1 and at most 8.0"):
        random_problem(shape, 8, torch.float32, Context(torch.device("cpu"), None, 0, 1), hot=9.0)
