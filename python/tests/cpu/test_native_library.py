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

from mega_moe._backends.symmetric import Shape, symmetric_layout
from mega_moe._base.mode import Mode
from mega_moe._ops import library


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.require()


def stage_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of `stage` that pass every check but that of the device; changes replace them."""
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 256, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(4, 2),
        "buffer": 1 << 20,
        "buffer_bytes": 1 << 20,
        "max_tokens": 16,
        "num_experts": 8,
        "quantize": True,
        "power_of_two": False,
    }
    return arguments | changes


def misaligned() -> torch.Tensor:
    storage = torch.zeros(4 * 256 + 8, dtype=torch.bfloat16)
    start = next(i for i in range(8) if (storage.data_ptr() + 2 * i) % 16 == 2)
    return storage[start : start + 4 * 256].view(4, 256)


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
    ("arguments", "offsets"),
    [
        ((16384, 8, 2048, False), [0, 67108864, 67108864, 67371008, 67895296, 67895552]),
        ((16384, 8, 2048, True), [0, 33554432, 34603008, 34865152, 35389440, 35389696]),
        ((1, 1, 8, False), [0, 256, 256, 512, 768, 1024]),
        ((1, 1, 128, True), [0, 256, 512, 768, 1024, 1280]),
        ((129, 3, 640, True), [0, 82688, 85504, 86528, 88320, 88576]),
    ],
)
def test_staging_layout(ops: Any, arguments: tuple[int, int, int, bool], offsets: list[int]) -> None:
    assert list(ops.staging_layout(*arguments)) == offsets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 2048, False), "max_tokens is 0, must be 1 to 1048575"),
        ((1 << 20, 8, 2048, False), "max_tokens is 1048576, must be 1 to 1048575"),
        ((16, 0, 2048, False), "top_k is 0, must be 1 to 16"),
        ((16, 17, 2048, False), "top_k is 17, must be 1 to 16"),
        ((16, 8, 0, False), "hidden is 0, must be 1 to 65536"),
        ((16, 8, 12, False), "hidden is 12, must be a multiple of 8"),
        ((16, 8, 136, True), "hidden (quantized) is 136, must be a multiple of 128"),
    ],
)
def test_staging_layout_refuses(ops: Any, arguments: tuple[int, int, int, bool], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        ops.staging_layout(*arguments)
    assert str(error.value) == f"staging_layout: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "x: device is cpu, must be cuda"),
        ({"x": torch.zeros(1024, dtype=torch.bfloat16)}, "x: shape is [1024], must have 2 dimensions"),
        ({"x": torch.zeros(4, 256)}, "x: dtype is float32, must be bfloat16"),
        (
            {"x": torch.zeros(4, 128, dtype=torch.bfloat16).t()},
            "topk_idx: shape is [4, 2], dimension 0 must be 128",
        ),
        (
            {"x": torch.zeros(256, 4, dtype=torch.bfloat16).t()},
            "x: strides are [1, 4] for shape [4, 256], must be contiguous",
        ),
        (
            {"x": torch.zeros(1, 256, dtype=torch.bfloat16).expand(4, 256)},
            "x: strides are [0, 1] for shape [4, 256], must be contiguous",
        ),
        ({"x": misaligned()}, "x: address is 2 past a multiple of 16 bytes, must be aligned to it"),
        (
            {"x": torch.zeros(4, 200, dtype=torch.bfloat16)},
            "hidden (quantized) is 200, must be a multiple of 128",
        ),
        (
            {"x": torch.zeros(4, 204, dtype=torch.bfloat16), "quantize": False},
            "hidden is 204, must be a multiple of 8",
        ),
        ({"topk_idx": torch.zeros(8, dtype=torch.int64)}, "topk_idx: shape is [8], must have 2 dimensions"),
        (
            {"topk_idx": torch.zeros(4, 2, dtype=torch.int16)},
            "topk_idx: dtype is int16, must be int32 or int64",
        ),
        (
            {"topk_idx": torch.zeros(3, 2, dtype=torch.int64)},
            "topk_idx: shape is [3, 2], dimension 0 must be 4",
        ),
        (
            {"topk_idx": torch.zeros(2, 4, dtype=torch.int64).t()},
            "topk_idx: strides are [1, 4] for shape [4, 2], must be contiguous",
        ),
        ({"topk_weights": torch.zeros(8)}, "topk_weights: shape is [8], must have 2 dimensions"),
        (
            {"topk_weights": torch.zeros(4, 2, dtype=torch.float64)},
            "topk_weights: dtype is float64, must be float32 or bfloat16",
        ),
        ({"topk_weights": torch.zeros(4, 3)}, "topk_weights: shape is [4, 3], dimension 1 must be 2"),
        ({"topk_weights": torch.zeros(5, 2)}, "topk_weights: shape is [5, 2], dimension 0 must be 4"),
        (
            {"topk_weights": torch.zeros(2, 4).t()},
            "topk_weights: strides are [1, 4] for shape [4, 2], must be contiguous",
        ),
        (
            {"topk_idx": torch.zeros(4, 17, dtype=torch.int64), "topk_weights": torch.zeros(4, 17)},
            "top_k is 17, must be 1 to 16",
        ),
        ({"max_tokens": 3}, "number of tokens is 4, must be 0 to 3"),
        ({"max_tokens": 1 << 20}, "max_tokens is 1048576, must be 1 to 1048575"),
        ({"num_experts": 0}, "num_experts is 0, must be 1 to 2048"),
        ({"num_experts": 2049}, "num_experts is 2049, must be 1 to 2048"),
        ({"buffer_bytes": 5119}, "buffer_bytes is 5119, must be at least 5120"),
        ({"quantize": False, "power_of_two": True}, "power_of_two is true, must be false without quantize"),
        ({"buffer": 0}, "buffer is a null address, must be an address on the device"),
        ({"buffer": 257}, "buffer: address is 1 past a multiple of 256 bytes, must be aligned to it"),
    ],
)
def test_stage_refuses(ops: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        ops.stage(*stage_arguments(**changes).values())
    assert str(error.value) == f"stage: {message}"


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
