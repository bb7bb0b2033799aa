"""The compiled library on a machine without a GPU: it loads, lays out the buffer, refuses bad arguments by name."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_moe._backends.fused.memory import Shape, symmetric_layout
from mega_moe._base.mode import Mode
from mega_moe._ops import library


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.require()


def test_build_info_is_build_json(ops: Any) -> None:
    assert json.loads(ops.build_info()) == library.build_record()


def test_build_record(ops: Any) -> None:
    record = library.build_record()
    assert record["torch_target"] == "2.10"
    assert record["architectures"] == sorted({v["architecture"] for v in library.variants()})
    assert len(record["kernels_sha256"]) == 64
    assert re.fullmatch(r"\d+\.\d+\.\d+", record["compiler"])


def test_is_built_from_these_sources() -> None:
    """A stale wheel would let the tests pass for code that is not here."""
    script = Path(__file__).resolve().parents[3] / "kernels" / "hash_kernels.py"
    if not script.exists():
        pytest.skip("the sources of the kernels are not alongside the tests")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert library.build_record()["kernels_sha256"] == done.stdout.strip()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "out: shape is [3], must have 2 dimensions"),
        (torch.zeros(2, 3, dtype=torch.int32), "out: dtype is int32, must be int64"),
        (torch.zeros(2, 4, dtype=torch.int64), "out: shape is [2, 4], dimension 1 must be 3"),
        (
            torch.zeros(3, 2, dtype=torch.int64).t(),
            "out: strides are [1, 2] for shape [2, 3], must be contiguous",
        ),
        (torch.zeros(2, 3, dtype=torch.int64), "out: device is cpu, must be cuda"),
    ],
)
def test_clock_probe_refuses(ops: Any, out: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        ops.clock_probe(out)
    assert str(error.value) == f"clock_probe: {message}"


def test_documents_say_the_multiples_of_the_kernels() -> None:
    """The table in docs/backends.md, from what this wheel holds."""
    held = {(v["op"], v["precision"]): v for v in library.variants() if v["op"] in ("forward", "backward")}
    text = (Path(__file__).resolve().parents[3] / "docs/backends.md").read_text()
    for precision, forward, backward in (
        ("bf16", "bf16", "bf16"),
        ("fp8", "fp8", "fp8"),
        ("fp8_bwd", "bf16", "fp8"),
    ):
        both = (held["forward", forward], held["backward", backward])
        hidden, inner = (
            math.lcm(*(v[name] for v in both)) for name in ("hidden_multiple", "intermediate_multiple")
        )
        assert f"| `{precision}` | {hidden} | {inner} |" in text
        shape = Shape(16, 2, 8, hidden + 128, 1, intermediate=inner, mode=Mode(forward, backward, "bf16"))
        with pytest.raises(RuntimeError, match=f"hidden is .*, must be a multiple of {hidden}"):
            symmetric_layout(shape)
