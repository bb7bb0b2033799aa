"""The operator that makes e4m3 copies of a weight refuses bad arguments by name, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._ops import library

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.require()


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def arguments(**changes: Any) -> dict[str, Any]:
    """What passes every check but that of the device; changes replace it."""
    plain: dict[str, Any] = {
        "weight": torch.zeros(3, 256, 384, dtype=torch.bfloat16),
        "codes": codes(3, 256, 384),
        "codes_t": codes(3, 384, 256),
        "scales": torch.zeros(3, 2, 3),
        "power_of_two": False,
    }
    return plain | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "weight: device is cpu, must be cuda"),
        ({"codes": None}, "weight: device is cpu, must be cuda"),
        ({"codes_t": None}, "weight: device is cpu, must be cuda"),
        (
            {"weight": torch.zeros(256, 384, dtype=torch.bfloat16)},
            "weight: shape is [256, 384], must have 3 dimensions",
        ),
        ({"weight": torch.zeros(3, 256, 384)}, "weight: dtype is float32, must be bfloat16"),
        (
            {"weight": torch.zeros(3, 200, 384, dtype=torch.bfloat16)},
            "rows of an expert is 200, must be a multiple of 128",
        ),
        (
            {"weight": torch.zeros(3, 256, 64, dtype=torch.bfloat16)},
            "columns of an expert is 64, must be a multiple of 128",
        ),
        (
            {"weight": torch.zeros(3, 384, 256, dtype=torch.bfloat16).transpose(1, 2)},
            "weight: strides are [98304, 1, 256] for shape [3, 256, 384], must be contiguous",
        ),
        (
            {"codes": codes(3, 384, 256)},
            "codes: shape is [3, 384, 256], dimension 1 must be 256",
        ),
        (
            {"codes": torch.zeros(3, 256, 384, dtype=torch.bfloat16)},
            "codes: dtype is bfloat16, must be float8_e4m3fn",
        ),
        (
            {"codes_t": codes(3, 256, 384)},
            "codes_t: shape is [3, 256, 384], dimension 1 must be 384",
        ),
        ({"scales": torch.zeros(3, 3, 2)}, "scales: shape is [3, 3, 2], dimension 1 must be 2"),
        (
            {"scales": torch.zeros(3, 2, 3, dtype=torch.bfloat16)},
            "scales: dtype is bfloat16, must be float32",
        ),
    ],
)
def test_refuses(ops: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        ops.quantize_weights(**arguments(**changes))
    assert str(error.value) == f"quantize_weights: {message}"
