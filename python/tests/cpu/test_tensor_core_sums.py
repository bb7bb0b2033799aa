"""The emulation of the tensor core's sums, without one: what an H200 gave, and sums made by hand."""

from __future__ import annotations

import pytest
import torch

from mega_moe._backends.plain.quantize import E4M3

# What is tested here lies alongside the GPU tests that use it.
from ..gpu._tensor_core import in_torch  # noqa: TID252

# Codes of two rows and two columns with 64 of the contraction each, and their products.
ROWS = (
    "a21bd52ee16cd564c723077ef97408da9de3c39db629b1713a14f9be9b646feede30d7a35907858d9b53f45823433f263b5f43210ad8f6e788dcdda8c418f990",
    "864d1ee6afea4cf30258104697149528dcb938f60d0e882d3c16b3c64db6f4412e34194f3149662424df87f61ab6022a8af7403a6458a433b5af9d5d3cc4ee0a",
)
COLUMNS = (
    "f0a51ba4e9f6cbe5b081a1a87d751c093484b1def99f2f9812e22e7d559dd4073b9ffc4ce8cbb34ff0a6a78ff62855edb605afaa64df1917b77633975bfe5335",
    "43380d76831b4bcffb46539fd54d3ef89c1f716b726cd9ecccbecb87e257e9a7f36cf0e3f1454625e837ae36caa3edbf523aaf53585cabf56c3300f353c82822",
)
PRODUCTS = [[-106936.0, 6779.0], [35968.0, -21634.0]]


def codes(rows: tuple[str, ...]) -> torch.Tensor:
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8).view(E4M3)


def test_what_a_device_gave() -> None:
    got = in_torch(codes(ROWS), codes(COLUMNS))
    assert got.tolist() == PRODUCTS
    assert not torch.equal(got, codes(ROWS).float() @ codes(COLUMNS).float().T)


@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        # The unit of 256 * 256 is 2^3.
        ((256, 8), (256, 1), 65536 + 8),
        ((256, 7.5), (256, 1), 65536),
        ((256, -7.5), (256, 1), 65536),
        # Each is cut alone.
        ((256, *[4] * 31), (256, *[1] * 31), 65536),
        # 1.75 * 1.75 is above 2, and its exponent that of 1 * 1 here, but its sum has a bit less.
        ((448, 8), (448, 1), 448 * 448),
        ((448, 16), (448, 1), 448 * 448 + 16),
        # An accumulator counts among the next 32: the unit is 2^3 there too.
        ((256, *[0] * 31, 7), (256, *[0] * 31, 1), 65536),
        # One after the other cancels, and what was cut does not come back.
        ((256, 7, *[0] * 30, -256), (256, 1, *[0] * 30, 256), 0),
        ((0,), (448,), 0),
        ((float("nan"),), (1,), float("nan")),
    ],
)
def test_sums_by_hand(left: tuple[float, ...], right: tuple[float, ...], want: float) -> None:
    a, b = torch.zeros(2, 64), torch.zeros(1, 64)
    a[1, : len(left)], b[0, : len(right)] = torch.tensor(left), torch.tensor(right)
    got = in_torch(a.to(E4M3), b.to(E4M3))
    torch.testing.assert_close(got, torch.tensor([[0.0], [want]]), rtol=0, atol=0, equal_nan=True)
