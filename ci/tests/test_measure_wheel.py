"""measure_wheel writes what the files of ci/results hold into a document, and measures a wheel that runs."""

from __future__ import annotations

import json
from pathlib import Path

import measure_wheel
import pytest


def test_writes_and_checks(tmp_path: Path) -> None:
    (tmp_path / "ci/results").mkdir(parents=True)
    one = {
        "import_ms": 41.2, "load_ms": 1.0, "first_call_ms": 170.0, "second_call_ms": 3.0, "backend": "fused",
        "device": "NVIDIA H200", "torch": "2.11.0", "version": "0.1.0+cu130", "wheel_sha256": "ab" * 32,
        "wheel_bytes": 606984, "date": "2026-11-29",
    }  # fmt: skip
    (tmp_path / "ci/results/wheel-a.json").write_text(json.dumps(one))
    assert measure_wheel.main(["--check"], tmp_path) == 1  # no document has a place for it
    page = tmp_path / "docs/costs.md"
    page.parent.mkdir()
    page.write_text("# x\n<!-- wheel:begin -->\n<!-- wheel:end -->\n")
    assert [measure_wheel.main([word], tmp_path) for word in ("--check", "--write", "--check")] == [1, 0, 0]
    want = "| 2.11.0 | 0.1.0+cu130, `abababababab` | 0.61 MB | 41.2 ms | 1 ms | 170 ms (fused) | 3 ms |"
    assert want in page.read_text()
    page.write_text(page.read_text().replace("41.2 ms", "1.2 ms"))
    assert measure_wheel.main(["--check"], tmp_path) == 1


def test_measures_the_built_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_wheel, "PROCESSES", 1)
    assert measure_wheel.main([str(wheel), str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["wheel"], found["wheel_bytes"]) == (wheel.name, wheel.stat().st_size)
    assert found["second_call_ms"] > 0
    assert found["import_ms"] > 0
