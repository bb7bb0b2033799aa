"""Result files: what is written is read back, what is wrong is refused, and the README says only what they hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_moe.bench import schema
from mega_moe.bench.schema import (
    CeilingRow,
    Environment,
    LayerRow,
    Outcome,
    PeerRow,
    Result,
    SchemaError,
    StageRow,
    Timing,
)
from mega_moe.bench.table import render

ROOT = Path(__file__).resolve().parents[3]
README = "# Project\n\n<!-- bench:begin -->\n<!-- bench:end -->\n\nAfter.\n"


def measured(protocol: str, seconds: float) -> Outcome:
    timing = Timing(protocol, "CUDA events", seconds, (seconds, seconds), 3, 3, 0.25, 1512.5, None)
    return Outcome("measured", (), timing)


def layer_row(outcome: Outcome, **changes: Any) -> LayerRow:
    row = {
        "kind": "layer",
        "shape": "30B",
        "hidden": 2048,
        "intermediate": 768,
        "num_experts": 128,
        "top_k": 8,
        "tokens": 16384,
        "num_ranks": 1,
        "backend": "grouped",
        "precision": "bf16",
        "dtype": "bfloat16",
        "direction": "backward",
        "dw_dtype": "bfloat16",
        "reserved_sms": None,
        "flops": 3.3e12,
        "flop_rule": "16*T*K*H*I, gate and up recomputed",
        "tflops": 330.0,
        "percent_of_ceiling": 42.9,
        "peak_bytes": 3 << 30,
        "relative_error": 3.1e-3,
        "outcome": outcome,
    }
    return LayerRow(**{**row, **changes})


def sample(**environment: Any) -> Result:
    refused = Outcome("refused", ("no fused kernel in this wheel", "T is odd"), None)
    nothing: dict[str, Any] = dict.fromkeys(
        ("dw_dtype", "flops", "flop_rule", "tflops", "percent_of_ceiling", "peak_bytes", "relative_error")
    )
    nothing |= {"backend": "fused", "direction": "all"}
    where = Environment(
        date="2026-11-29T10:00:00Z",
        device="NVIDIA H200",
        num_sms=132,
        num_ranks=1,
        driver="580.95.05",
        cuda="13.0",
        torch="2.11.0+cu130",
        python="3.12.3",
        platform="Linux",
        mega_moe="0.1.0",
        wheel_sha256="a" * 64,
        wheel_reason=None,
        kernels_sha256="b" * 64,
        kernels_reason=None,
    )
    rows = (
        CeilingRow(
            "ceiling", "product bfloat16", "8192^3", "TF/s", 1.1e12, 770.0, measured("burst", 1.43e-3)
        ),
        CeilingRow(
            "ceiling", "product bfloat16", "8192^3", "TF/s", 1.1e12, 680.0, measured("sustained", 1.6e-3)
        ),
        CeilingRow(
            "ceiling", "peer pull", "256 MiB", "GB/s", 2.7e8, None, Outcome("refused", ("no peer",), None)
        ),
        StageRow("stage", "fp8", 16384, 2048, 8, 10**8, 3900.0, 90.7, measured("burst", 2.6e-5)),
        layer_row(measured("burst", 0.010)),
        layer_row(measured("sustained", 0.012), tflops=275.0, percent_of_ceiling=40.4),
        layer_row(refused, **nothing),
        layer_row(refused, shape="235B", **nothing),
    )
    return Result(schema.SCHEMA_VERSION, dataclasses.replace(where, **environment), ("--quick",), rows)


def test_round_trip() -> None:
    assert schema.loads(schema.dumps(sample())) == sample()
    with_code = sample(code={"two": "2" * 64, "one": "1" * 64})
    assert schema.loads(schema.dumps(with_code)) == with_code
    assert list(json.loads(schema.dumps(with_code))["environment"]["code"]) == ["one", "two"]


def test_a_result_without_code_is_read_and_written_as_it_was() -> None:
    text = schema.dumps(sample())
    assert '"code"' not in text
    assert schema.loads(text).environment.code is None


def test_read_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SchemaError, match=r"broken.json: result: got text that is not JSON"):
        schema.read(tmp_path / "broken.json")


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Sets the field at a dotted path."""

    def apply(data: Any) -> None:
        *folders, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in folders:
            data = data[part]
        data[last] = value

    return apply


def drop_environment(data: Any) -> None:
    del data["environment"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (change("schema_version", 2), r"result.schema_version: got 2, wanted 1"),
        (drop_environment, r"result: .*wanted also environment"),
        (change("extra", 1), r"result: got \['extra'\], wanted only the fields of Result"),
        (change("rows", {}), r"result.rows: got \{\}, wanted a list"),
        (
            change("rows.0.kind", "song"),
            r"result.rows\[0\].kind: got 'song', wanted 'ceiling' or 'stage' or 'layer'",
        ),
        (change("rows.0.unit", "kg"), r"result.rows\[0\].unit: got 'kg', wanted 'TF/s' or 'GB/s'"),
        (change("rows.0.rate", "fast"), r"result.rows\[0\].rate: got 'fast', wanted a finite number"),
        (change("rows.0.rate", None), r"result.rows\[0\].rate: got None, wanted a positive number"),
        (change("rows.0.rate", -1.0), r"result.rows\[0\].rate: got -1.0, wanted a positive number"),
        (change("rows.2.rate", 5.0), r"result.rows\[2\].rate: got 5.0, wanted null on a refused row"),
        (change("rows.3.tokens", 1.5), r"result.rows\[3\].tokens: got 1.5, wanted int"),
        (change("rows.3.tokens", True), r"result.rows\[3\].tokens: got True, wanted int"),
        (
            change("rows.4.dw_dtype", None),
            r"result.rows\[4\].dw_dtype: got None, wanted a dtype for a backward",
        ),
        (change("rows.4.direction", "forward"), r"result.rows\[4\].dw_dtype: .*wanted null for a forward"),
        (change("rows.4.flop_rule", ""), r"result.rows\[4\].flop_rule: got '', wanted the rule"),
        (change("rows.4.flops", None), r"result.rows\[4\].flops: got None, wanted a positive number"),
        (change("rows.4.outcome.timing", None), r"rows\[4\].outcome.timing: got None, wanted a timing"),
        (
            change("rows.4.outcome.reasons", ["slow"]),
            r"rows\[4\].outcome.reasons: .*wanted none on a measured row",
        ),
        (change("rows.4.outcome.timing.seconds", 0), r"timing.seconds: got 0.0, wanted a positive number"),
        (change("rows.4.outcome.timing.windows_s", []), r"timing.windows_s: .*wanted at least one window"),
        (change("rows.4.outcome.timing.mhz", None), r"timing.mhz_reason: got None, wanted a reason"),
        (
            change("rows.4.outcome.timing.mhz_reason", "x"),
            r"timing.mhz_reason: got 'x', wanted null beside a value",
        ),
        (
            change("rows.6.outcome.reasons", []),
            r"rows\[6\].outcome.reasons: .*wanted at least one on a refused row",
        ),
        (
            change("rows.6.outcome.status", "lost"),
            r"rows\[6\].outcome.status: got 'lost', wanted 'measured' or",
        ),
        (change("environment.date", "today"), r"environment.date: got 'today', wanted YYYY"),
        (
            change("environment.wheel_sha256", "abc"),
            r"environment.wheel_sha256: got 'abc', wanted 64 hex digits",
        ),
        (
            change("environment.kernels_sha256", None),
            r"environment.kernels_reason: got None, wanted a reason",
        ),
        (change("environment.num_ranks", 0), r"environment.num_ranks: got 0, wanted at least 1"),
        (change("environment.code", ["a"]), r"environment.code: got \['a'\], wanted an object"),
        (change("environment.code", {"a": 1}), r"environment.code.a: got 1, wanted str"),
        (change("environment.code", {"a": "b"}), r"environment.code.a: got 'b', wanted 64 hex digits"),
    ],
)
def test_a_wrong_result_is_refused(fault: Callable[[Any], None], message: str) -> None:
    data = json.loads(schema.dumps(sample()))
    fault(data)
    with pytest.raises(SchemaError, match=message):
        schema.loads(json.dumps(data))


def test_nan_is_not_written() -> None:
    bad = dataclasses.replace(
        sample(), rows=(layer_row(measured("burst", 0.01), relative_error=float("nan")),)
    )
    with pytest.raises(ValueError, match="JSON compliant"):
        schema.dumps(bad)


def test_terminal_table_has_every_measured_row_and_every_refusal() -> None:
    text = render(sample())
    assert text.count("backward") >= 2
    for part in (
        "42.9 %",
        "40.4 %",
        "1512",
        "330 TF/s",
        "n/a",
        "3.00 GiB",
        "bfloat16",
        "stage fp8 T=16384 H=2048",
    ):
        assert part in text
    assert "refused: 30B T=16384 bf16: backend fused" in text
    assert "no fused kernel in this wheel" in text
    assert "refused: peer pull" in text


@pytest.fixture
def report() -> Any:
    sys.path.insert(0, str(ROOT / "python/benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    return report


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tree with a README, the kernels and no result."""
    (tmp_path / "README.md").write_text(README)
    left_out = shutil.ignore_patterns("build", "bench", "tests", "__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=left_out)
    (tmp_path / "python/benchmarks/results").mkdir(parents=True)
    return tmp_path


def put(project: Path, name: str, result: Result) -> None:
    (project / "python/benchmarks/results" / name).write_text(schema.dumps(result))


def hashes(report: Any, project: Path) -> dict[str, Any]:
    """What the environment of a result says that was measured with the kernels of `project`."""
    kernels = report.staleness.Kernels.of(project / "kernels")
    return {"kernels_sha256": kernels.sha256, "code": kernels.code}


def test_without_results_the_readme_says_so_in_one_line(report: Any, project: Path) -> None:
    assert report.main([], project) == 0
    between = (
        (project / "README.md").read_text().split("<!-- bench:begin -->\n")[1].split("<!-- bench:end -->")[0]
    )
    assert between.count("\n") == 1
    assert between.startswith("No figures yet")
    assert not (project / "docs/benchmarks.png").exists()
    assert report.main(["--check"], project) == 0


def test_table_and_plot_come_from_the_results(report: Any, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    put(project, "a.json", sample(**hashes(report, project)))
    assert report.main([], project) == 0
    text = (project / "README.md").read_text()
    assert text.startswith("# Project\n")
    assert text.endswith("\nAfter.\n")
    what = "| 30B, T 16384, bf16 | grouped | backward | 10 / 12 | 330 / 275 TF/s"
    assert f"{what} | 43 % / 40 % | 1512 / 1512 | bfloat16 | n/a |" in text
    assert "| staging fp8, T 16384, H 2048 | - | - | 0.026 (burst) | 3900 GB/s | 91 % |" in text
    assert "\n\n- refused: peer pull: 256 MiB: no peer\n" in text
    assert "- refused: fused: 30B bf16, 235B bf16: no fused kernel in this wheel; T is odd\n" in text
    assert "stale" not in text
    assert report.stamp_of(project / "docs/benchmarks.png").startswith("results ")
    assert report.main(["--check"], project) == 0


def test_rows_are_stale_once_a_kernel_has_changed(report: Any, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    put(project, "a.json", sample(**hashes(report, project)))
    report.main([], project)
    kernel = project / "kernels/device/kernel/sm90_stage.cuh"
    kernel.write_text(f"// Another comment.\n{kernel.read_text()}")
    assert report.main(["--check"], project) == 0
    kernel.write_text(f"{kernel.read_text()}constexpr int kNew = 1;\n")
    assert report.main(["--check"], project) == 1
    report.main([], project)
    text = (project / "README.md").read_text()
    assert "| staging fp8, T 16384, H 2048 (stale) |" in text
    assert "| 30B, T 16384, bf16 (stale) | grouped |" in text
    assert "| product bfloat16: 8192^3 |" in text
    assert "stale: `sm90_bf16_stage`, `sm90_fp8_stage` have changed since" in text
    assert report.main(["--check"], project) == 0


def test_check_refuses_a_planted_stale_readme(
    report: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([], project)
    readme = project / "README.md"
    readme.write_text(readme.read_text().replace("No figures yet", "Twice as fast as anything"))
    assert report.main(["--check"], project) == 1
    assert "README.md: the benchmark table is not what" in capsys.readouterr().err


def test_check_refuses_a_plot_of_other_results(
    report: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    put(project, "a.json", sample())
    report.main([], project)
    plot = project / "docs/benchmarks.png"
    kept = plot.read_bytes()
    put(project, "a.json", sample(date="2026-11-30T10:00:00Z"))
    report.main([], project)
    plot.write_bytes(kept)
    assert report.main(["--check"], project) == 1
    assert "drawn from other results" in capsys.readouterr().err
    plot.unlink()
    assert report.main(["--check"], project) == 1
    (project / "python/benchmarks/results/a.json").unlink()
    report.main([], project)
    plot.write_bytes(kept)
    assert report.main(["--check"], project) == 1
    assert "no result stands behind it" in capsys.readouterr().err


def test_newest_of_a_device_and_of_a_number_of_ranks(report: Any, project: Path) -> None:
    put(project, "a.json", sample(date="2026-11-30T10:00:00Z"))
    put(project, "b.json", sample(date="2026-11-29T10:00:00Z"))
    put(project, "c.json", sample(num_ranks=2))
    found = report.newest(project / "python/benchmarks/results")
    assert [(r.environment.date[:10], r.environment.num_ranks) for r in found] == [
        ("2026-11-30", 1),
        ("2026-11-29", 2),
    ]


def test_a_readme_without_markers_is_refused(report: Any) -> None:
    for text in ("nothing", "<!-- bench:end --> <!-- bench:begin -->", "<!-- bench:begin -->"):
        with pytest.raises(ValueError, match=r"README.md: wanted <!-- bench:begin -->"):
            report.with_report(text, "x")


def test_report_runs_without_torch(tmp_path: Path) -> None:
    """As a gate on a machine that has Python alone."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'python/benchmarks')!r}]; import report"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60)


def test_hash_of_kernels_sees_sources_alone(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(ROOT / "kernels", kernels, ignore=shutil.ignore_patterns("build"))
    script = kernels / "hash_kernels.py"

    def digest() -> str:
        done = subprocess.run(
            [sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    before = digest()
    assert len(before) == 64
    for name in (
        "build/a.cu",
        "tests/a.cu",
        "bench/a.cu",
        "host/tests/a.cpp",
        "a.o",
        ".cache/x",
        "__pycache__/a.pyc",
    ):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text("x")
    assert digest() == before
    (kernels / "new.cuh").write_text("x")
    with_new = digest()
    assert with_new != before
    (kernels / "new.cuh").rename(kernels / "newer.cuh")
    assert digest() not in (before, with_new)


def uneven_and_peer() -> Result:
    """Eight ranks: an uneven layer and another implementation's two rows beside the usual ones."""
    peer = {
        "kind": "peer",
        "peer": "other",
        "shape": "30B",
        "tokens": 16384,
        "num_ranks": 8,
        "precision": "bf16",
    }
    rows = (
        layer_row(measured("burst", 0.010), num_ranks=8),
        layer_row(measured("burst", 0.040), num_ranks=8, skew=4.0),
        PeerRow(
            **peer,
            direction="forward",
            flop_rule="6*T*K*H*I",
            tflops=150.0,
            outcome=measured("its own", 0.008),
        ),
        PeerRow(
            **peer,
            direction="all",
            flop_rule=None,
            tflops=None,
            outcome=Outcome("failed", ("no figure",), None),
        ),
    )
    return dataclasses.replace(sample(num_ranks=8), rows=rows)


def test_uneven_routing_and_peers_are_written_and_read() -> None:
    result = uneven_and_peer()
    assert schema.loads(schema.dumps(result)) == result
    text = render(result)
    assert "30B T=16384 bf16, 4x to rank 0" in text
    assert "failed: 30B T=16384 bf16: other" in text
    # A row without the field is written as before it was there.
    assert schema.dumps(sample()).count("skew") == 0
    with pytest.raises(SchemaError, match=r"skew: got 9.0, wanted null, or above 1 and at most num_ranks"):
        layer_row(measured("burst", 0.010), num_ranks=8, skew=9.0)


def test_uneven_routing_and_peers_in_the_readme(report: Any, project: Path) -> None:
    kernels = report.staleness.Kernels("b" * 64, {}, {})
    text = report.report([uneven_and_peer()], kernels)
    assert "| 30B, T 16384, bf16 | grouped | backward | 10 (burst) |" in text
    assert "| 30B, T 16384, bf16, 4x to rank 0 | grouped | backward | 40 (burst) |" in text
    assert "| 30B, T 16384, bf16 | other | forward | 8 (its own) | 150 TF/s | - |" in text
    assert "- failed: other: 30B, T 16384, bf16: no figure" in text
    assert "30B forward 12.0 -> 3.9 ms" in text
    assert "12.0 -> 3.9" not in report.report([sample()], kernels)
    pytest.importorskip("matplotlib", reason="the plot needs the extra 'demo'")
    put(project, "a.json", uneven_and_peer())
    assert report.main([], project) == 0
