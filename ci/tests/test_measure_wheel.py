"""measure_wheel writes the figures of ci/results into docs/installing.md, and measures a wheel that runs."""

from __future__ import annotations

import json
from pathlib import Path

import measure_wheel
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure_wheel, "ROOT", tmp_path)
    results = tmp_path / "ci/results"
    results.mkdir(parents=True)
    monkeypatch.setattr(measure_wheel.table, "__defaults__", (results,))
    one = {
        "import_ms": 41.2, "load_ms": 1.0, "first_call_ms": 170.0, "second_call_ms": 3.0, "backend": "fused",
        "device": "NVIDIA H200", "torch": "2.11.0", "version": "0.1.0+cu130", "wheel_sha256": "ab" * 32,
        "wheel_bytes": 606984, "date": "2026-11-29",
    }  # fmt: skip
    (results / "wheel-a.json").write_text(json.dumps(one))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/installing.md").write_text("# x\n<!-- wheel:begin -->\n<!-- wheel:end -->\n")
    return tmp_path


def test_writes_and_checks(tree: Path) -> None:
    assert measure_wheel.main(["--check"]) == 1
    assert measure_wheel.main(["--write"]) == 0
    assert measure_wheel.main(["--check"]) == 0
    text = (tree / "docs/installing.md").read_text()
    want = "| 2.11.0 | 0.1.0+cu130, `abababababab` | 0.61 MB | 41.2 ms | 1 ms | 170 ms (fused) | 3 ms |"
    assert want in text
    (tree / "docs/installing.md").write_text(text.replace("41.2 ms", "1.2 ms"))
    assert measure_wheel.main(["--check"]) == 1
    (tree / "docs/installing.md").write_text("# no table\n")
    assert measure_wheel.main(["--check"]) == 1


def test_measures_the_built_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = list((ROOT / "dist").glob("*.whl"))
    if len(built) != 1:
        pytest.skip(f"dist/ holds {len(built)} wheels, this needs the one that `nox -s wheel` builds")
    monkeypatch.setattr(measure_wheel, "PROCESSES", 1)
    assert measure_wheel.main([str(built[0]), str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["wheel"] == built[0].name
    assert found["wheel_bytes"] == built[0].stat().st_size
    assert found["second_call_ms"] > 0
    assert found["import_ms"] > 0


def test_wants_a_wheel_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure_wheel.main([])
    assert "got no WHEEL and FILE.json" in capsys.readouterr().err
