"""Result files: what is written is read back, and what is wrong is refused."""

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
from mega_moe.bench.schema import SchemaError
from mega_moe.bench.table import render

from ._results import layer_row, measured, sample, with_peer

ROOT = Path(__file__).resolve().parents[3]


def test_round_trip() -> None:
    assert schema.loads(schema.dumps(sample())) == sample()
    with_code = sample(code={"two": "2" * 64, "one": "1" * 64}, compiler="13.0.88")
    assert schema.loads(schema.dumps(with_code)) == with_code
    assert list(json.loads(schema.dumps(with_code))["environment"]["code"]) == ["one", "two"]


def test_a_result_without_code_is_read_and_written_as_it_was() -> None:
    text = schema.dumps(sample())
    assert '"code"' not in text
    assert '"compiler"' not in text
    assert schema.loads(text).environment.code is None


def test_rows_of_a_part_that_is_gone_are_skipped() -> None:
    data = json.loads(schema.dumps(sample()))
    data["rows"].insert(1, {"kind": "stage", "form": "fp8"})
    assert schema.loads(json.dumps(data)) == sample()


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
            r"result.rows\[0\].kind: got 'song', wanted 'ceiling' or 'layer' or 'peer'",
        ),
        (change("rows.0.unit", "kg"), r"result.rows\[0\].unit: got 'kg', wanted 'TF/s' or 'GB/s'"),
        (change("rows.0.rate", "fast"), r"result.rows\[0\].rate: got 'fast', wanted a finite number"),
        (change("rows.0.rate", None), r"result.rows\[0\].rate: got None, wanted a positive number"),
        (change("rows.0.rate", -1.0), r"result.rows\[0\].rate: got -1.0, wanted a positive number"),
        (change("rows.2.rate", 5.0), r"result.rows\[2\].rate: got 5.0, wanted null on a refused row"),
        (change("rows.4.tokens", 1.5), r"result.rows\[4\].tokens: got 1.5, wanted int"),
        (change("rows.4.tokens", True), r"result.rows\[4\].tokens: got True, wanted int"),
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
            r"timing.mhz_reason: got 'x', wanted null alongside a value",
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
        (change("environment.compiler", 13.0), r"environment.compiler: got 13.0, wanted str"),
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
        "device copy",
    ):
        assert part in text
    assert "refused: 30B T=16384 bf16: backend fused" in text
    assert "no fused kernel in this wheel" in text
    assert "refused: peer pull" in text


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


def test_peers_are_written_and_read() -> None:
    result = with_peer()
    assert schema.loads(schema.dumps(result)) == result
    assert "failed: 30B T=16384 bf16: other" in render(result)
