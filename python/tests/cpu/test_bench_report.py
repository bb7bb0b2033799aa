"""README, docs/benchmarks.md and the chart say what the results hold and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_moe.bench import schema
from mega_moe.bench.schema import Result

from ._results import layer_row, measured, sample, with_peer

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = "# Project\n\n<!-- bench:begin -->\n<!-- bench:end -->\n\nAfter.\n"
DOCUMENTS = ("README.md", "docs/benchmarks.md")


@pytest.fixture
def report() -> Any:
    sys.path.insert(0, str(ROOT / "python/benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    return report


@pytest.fixture
def project(report: Any, tmp_path: Path) -> Path:
    """A tree with the two documents, the kernels, their wheel and no result."""
    (tmp_path / "docs").mkdir()
    for name in DOCUMENTS:
        (tmp_path / name).write_text(DOCUMENT)
    left_out = shutil.ignore_patterns("build", "bench", "tests", "__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=left_out)
    (tmp_path / "python/benchmarks/results").mkdir(parents=True)
    build(report, tmp_path)
    return tmp_path


def build(report: Any, project: Path, *changed: str, compiler: str = "13.0.88") -> None:
    """Leaves what is read of a wheel in dist/: of the project's kernels, the code of some other than it was."""
    kernels = project / "kernels"
    names = [name for found in report.staleness.variants(kernels).values() for name in found]
    told = {
        "build": {"kernels_sha256": report.staleness.hash_kernels(kernels), "compiler": compiler},
        "wheel": {"code": {name: ("2" if name in changed else "1") * 64 for name in names}},
    }
    (project / "dist").mkdir(exist_ok=True)
    with zipfile.ZipFile(project / "dist/mega_moe.whl", "w") as wheel:
        for name, record in told.items():
            wheel.writestr(f"mega_moe/_lib/{name}.json", json.dumps(record))


def put(project: Path, name: str, result: Result) -> None:
    (project / "python/benchmarks/results" / name).write_text(schema.dumps(result))


def hashes(report: Any, project: Path) -> dict[str, Any]:
    """What the environment of a result says that was measured with the kernels of `project`."""
    kernels = report.staleness.Kernels.of(project)
    return {"kernels_sha256": kernels.sha256, "code": kernels.code, "compiler": kernels.compiler}


def test_without_results_the_documents_say_so_in_one_line(report: Any, project: Path) -> None:
    assert report.main([], project) == 0
    for name in DOCUMENTS:
        text = (project / name).read_text()
        between = text.split("<!-- bench:begin -->\n")[1].split("<!-- bench:end -->")[0]
        assert between.count("\n") == 1
        assert between.startswith("No figures yet")
    assert not (project / "docs/benchmarks.png").exists()
    assert report.main(["--check"], project) == 0


def fused_rows() -> tuple[schema.LayerRow, ...]:
    """`fused` at 30B, forward 2 ms and backward 4 ms in bf16, half of that in fp8, under sustained load."""
    rows = []
    for way, ms in (("forward", 2), ("backward", 4)):
        common = {"backend": "fused", "direction": way, "reserved_sms": 0}
        common["dw_dtype"] = None if way == "forward" else "bfloat16"
        rows.append(layer_row(measured("sustained", ms * 1e-3), **common))
        fp8 = {"precision": "fp8", "weight_copies": "reused"}
        rows.append(layer_row(measured("sustained", ms * 5e-4), **common, **fp8))
        # None of these is what README shows.
        rows.append(layer_row(measured("burst", ms * 1e-4), **common))
        rows.append(layer_row(measured("sustained", ms * 1e-4), **common, tokens=8192))
        rows.append(layer_row(measured("sustained", ms * 1e-4), **{**common, "reserved_sms": 16}))
    return tuple(rows)


def published(**environment: Any) -> Result:
    return replace(sample(**environment), rows=(*sample().rows, *fused_rows()))


def test_documents_and_chart_come_from_the_results(report: Any, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    put(project, "a.json", published(**hashes(report, project)))
    assert report.main([], project) == 0
    readme, text = ((project / name).read_text() for name in DOCUMENTS)
    for document in (readme, text):
        assert document.startswith("# Project\n")
        assert document.endswith("\nAfter.\n")
        assert "stale" not in document
    what = "| 30B, T 16384, bf16 | grouped | backward | 10 / 12 | 330 / 275 TF/s"
    assert f"{what} | 43 % / 40 % | 1512 / 1512 | bfloat16 | n/a | 3.00 |" in text
    assert "| device copy: 512 MiB | - | - | 0.26 (burst) | 4200 GB/s | - |" in text
    assert "windows a figure: 2 burst, 2 sustained." in text
    assert "\n\n- refused: peer pull: 256 MiB: no peer\n" in text
    refused = "30B, T 16384, bf16; 235B, T 16384, bf16"
    assert f"- refused: fused: {refused}: no fused kernel in this wheel; T is odd\n" in text
    assert "![Latency per layer call](benchmarks.png)" in text
    assert "| 30B, T 16384, bf16 | 0.2 / 2 | 0.4 / 4 | - |" in text
    assert "30B: hidden 2048, intermediate 768, top 8 of 128 experts." in text.replace("\n", " ")
    assert "![Latency per layer call](docs/benchmarks.png)" in readme
    assert [line for line in readme.splitlines() if line.startswith("| 30B")] == [
        "| 30B, bf16 | NVIDIA H200 | 2 | 4 | - |",
        "| 30B, fp8 | NVIDIA H200 | 1 | 2 | - |",
    ]
    assert report.stamp_of(project / "docs/benchmarks.png").startswith("results ")
    assert report.main(["--check"], project) == 0


def test_speedup_is_over_grouped_gemm_or_its_own_script(report: Any) -> None:
    def grouped(way: str, ms: float) -> schema.LayerRow:
        dw = None if way == "forward" else "bfloat16"
        return layer_row(measured("sustained", ms * 1e-3), direction=way, dw_dtype=dw)

    def peer(name: str, way: str, ms: float) -> schema.PeerRow:
        outcome = measured("its own", ms * 1e-3)
        return schema.PeerRow("peer", name, "30B", 16384, 1, "bf16", way, "rule", 150.0, outcome)

    kernels = report.staleness.Kernels("b" * 64, {}, {}, "13.0.88")

    def told(*rows: Any) -> list[str]:
        text = report.report([replace(sample(), rows=(*fused_rows(), *rows))], kernels)
        return [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| 30B")]

    own = (grouped("forward", 5), grouped("backward", 10))
    assert told(*own) == ["2.50x |", "5.00x |"]
    assert told(own[0]) == ["- |", "- |"]
    script = [peer("torch grouped + all-to-all", *one) for one in (("forward", 3), ("backward", 6))]
    assert told(*own, *script) == ["1.50x |", "3.00x |"]


def test_an_implementation_has_one_colour_in_all_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    monkeypatch.syspath_prepend(ROOT / "python/benchmarks")
    import plot  # type: ignore[import-not-found]

    grouped = layer_row(measured("sustained", 1e-2))
    first = replace(sample(), rows=(*fused_rows(), grouped))
    second = replace(sample(num_ranks=2), rows=(*fused_rows()[:1], grouped))
    figure = plot.figure_of([first, second])
    colors: dict[str, set[Any]] = {}
    for bars in (bars for panel in figure.axes for bars in panel.containers):
        colors.setdefault(bars.get_label(), set()).add(bars.patches[0].get_facecolor())
    assert set(colors) == {"torch grouped GEMM + all-to-all", "fused bf16", "fused fp8"}
    assert all(len(own) == 1 for own in colors.values())
    assert len(set.union(*colors.values())) == 3
    heights = [bar.get_height() for bars in figure.axes[0].containers for bar in bars.patches]
    assert heights == pytest.approx([2.0, 1.0, 10.0, 4.0, 2.0])
    assert [text.get_text() for text in figure.axes[1].texts] == ["2", "10"]
    assert all(panel.get_legend() is None for panel in figure.axes)


def test_more_results_stand_behind_the_newest(report: Any, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    put(project, "a.json", published(**hashes(report, project)))
    report.main([], project)
    readme, text = ((project / name).read_text() for name in DOCUMENTS)
    (project / "python/benchmarks/results/more").mkdir()
    put(project, "more/b.json", sample(**hashes(report, project)))
    assert report.main(["--check"], project) == 1
    report.main([], project)
    assert report.main(["--check"], project) == 0
    other_readme, other = ((project / name).read_text() for name in DOCUMENTS)
    assert other_readme == readme
    (heading,) = [line for line in other.splitlines() if line.endswith(", a run of its own")]
    assert heading.removesuffix(", a run of its own") in text.splitlines()


def test_rows_are_stale_once_a_kernel_has_changed(report: Any, project: Path) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    put(project, "a.json", published(**hashes(report, project)))
    report.main([], project)
    kernel = project / "kernels/device/kernel/sm90_route.cuh"
    kernel.write_text(f"// Another comment.\n{kernel.read_text()}")
    build(report, project)
    assert report.main(["--check"], project) == 0
    build(report, project, "sm90_bf16_forward")
    assert report.main(["--check"], project) == 1
    report.main([], project)
    readme, text = ((project / name).read_text() for name in DOCUMENTS)
    assert "| 30B, bf16 (stale) |" in readme
    assert "| 30B, fp8 |" in readme
    assert "stale: `sm90_bf16_forward` has changed since" in readme
    assert "| 30B, T 16384, bf16 (stale) | fused | forward |" in text
    assert "| 30B, T 16384, bf16 | grouped |" in text
    assert "| product bfloat16: 8192^3 |" in text
    assert "stale: `sm90_bf16_forward` has changed since" in text
    assert report.main(["--check"], project) == 0
    build(report, project, "sm90_bf16_forward", compiler="13.1.20")
    report.main([], project)
    for name in DOCUMENTS:
        told = (project / name).read_text()
        assert "(stale)" not in told
        assert "Not judged whether stale: measured with code of nvcc 13.0.88, the wheel" in told


def test_without_a_wheel_of_the_present_kernels_nothing_is_judged(
    report: Any, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [(project / name).read_text() for name in DOCUMENTS]

    def refused(*reasons: str) -> None:
        for arguments in ([], ["--check"]):
            assert report.main(arguments, project) == 1
            told = capsys.readouterr().err
            assert all(reason in told for reason in (*reasons, "build it: nox -s wheel"))
        assert [(project / name).read_text() for name in DOCUMENTS] == before

    (project / "kernels/host/new.cpp").write_text("int made_of() { return 1; }\n")
    refused("mega_moe.whl", "built from kernels/ ", "wanted a wheel of the present ")
    shutil.copy(project / "dist/mega_moe.whl", project / "dist/other.whl")
    refused("got 2 wheels in dist/")
    shutil.rmtree(project / "dist")
    monkeypatch.setattr(report.staleness.importlib.util, "find_spec", lambda _: None)
    refused("got 0 wheels in dist/ and none installed")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_check_refuses_a_document_that_was_edited_by_hand(
    report: Any, project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    put(project, "a.json", published())
    report.main([], project)
    document = project / name
    written = document.read_text()
    assert "| 30B" in written
    document.write_text(written.replace("| 30B", "| 31B", 1))
    assert report.main(["--check"], project) == 1
    told = capsys.readouterr().err
    assert f"{name}: the benchmark table is not what" in told
    assert told.count("\n") == 1
    document.write_text(written.replace("After", "Whatever else it says"))
    assert report.main(["--check"], project) == 0


def test_check_refuses_a_plot_of_other_results(
    report: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    put(project, "a.json", published())
    report.main([], project)
    plot = project / "docs/benchmarks.png"
    kept = plot.read_bytes()
    put(project, "a.json", published(date="2026-11-30T10:00:00Z"))
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


def test_a_document_without_markers_is_refused(report: Any) -> None:
    for text in ("nothing", "<!-- bench:end --> <!-- bench:begin -->", "<!-- bench:begin -->"):
        with pytest.raises(ValueError, match=r"docs/benchmarks.md: got \d of <!-- bench:begin -->"):
            report.with_report(text, "x", report.FULL)


def test_report_runs_without_torch(tmp_path: Path) -> None:
    """As a gate on a machine that has Python alone."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'python/benchmarks')!r}]; import report"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=60)


def test_peers_in_the_documents(report: Any, project: Path) -> None:
    kernels = report.staleness.Kernels("b" * 64, {}, {}, "13.0.88")
    text = report.full_report([with_peer()], kernels)
    assert "| 30B, T 16384, bf16 | grouped | backward | 10 (burst) |" in text
    assert "| 30B, T 16384, bf16 | other | forward | 8 (its own) | 150 TF/s | - |" in text
    assert "- failed: other: 30B, T 16384, bf16: no figure" in text
    assert "| 30B, T 16384, bf16, grouped | - | 10 (burst) | - | 43 % (burst) backward |" in text
    assert "30B forward 12.0 -> 3.9 ms" in text
    assert "12.0 -> 3.9" not in report.full_report([sample()], kernels)
    assert report.report([with_peer()], kernels) == report.NONE_YET
    pytest.importorskip("matplotlib", reason="the chart needs the extra 'demo'")
    put(project, "a.json", with_peer())
    assert report.main([], project) == 0
