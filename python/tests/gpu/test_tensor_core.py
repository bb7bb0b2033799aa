"""The emulation of the tensor core's sums against the device's own, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_moe._backends.plain.quantize import E4M3, E4M3_MAX

from ._tensor_core import in_torch, on_gpu

ROWS, COLUMNS = 144, 80


@pytest.fixture
def hopper(cuda_device: torch.device) -> torch.device:
    # Asked here and not while tests are collected: that would make a CUDA context.
    found = torch.cuda.get_device_capability(cuda_device)
    if found != (9, 0):
        pytest.skip(f"compute capability is {found[0]}.{found[1]}, these are the sums of one of 9.0")
    return cuda_device


def random_codes(device: torch.device, kind: str, rows: int, length: int, seed: int) -> Tensor:
    made = torch.Generator(device).manual_seed(seed)
    if kind == "normal":
        values = torch.randn(rows, length, generator=made, device=device) * 100
        return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    # The least ones are 0, denormal, or of the exponent next to these.
    most = {"any": 127, "least": 16}[kind]
    codes = torch.randint(0, most, (rows, length), generator=made, device=device, dtype=torch.uint8)
    signs = torch.randint(0, 2, (rows, length), generator=made, device=device, dtype=torch.uint8)
    return (codes | signs << 7).view(E4M3)


@pytest.mark.parametrize("length", [32, 64, 128])
@pytest.mark.parametrize("left", ["normal", "any", "least"])
@pytest.mark.parametrize("right", ["normal", "any", "least"])
def test_every_bit_is_that_of_the_device(hopper: torch.device, left: str, right: str, length: int) -> None:
    one = torch.ones((), device=hopper)
    for seed in range(4):
        a = random_codes(hopper, left, ROWS, length, 2 * seed)
        b = random_codes(hopper, right, COLUMNS, length, 2 * seed + 1)
        got = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32, use_fast_accum=True)
        assert torch.equal(on_gpu(a, b), got)
        assert torch.equal(in_torch(a, b), got)


def test_a_number_that_is_none_stays_in_its_row(hopper: torch.device) -> None:
    a, b = (random_codes(hopper, "any", 40, 128, seed) for seed in (0, 1))
    clean = on_gpu(a, b)
    a.view(torch.uint8)[7, 100] = 127
    for got in (on_gpu(a, b), in_torch(a, b)):
        assert bool(got[7].isnan().all())
        assert torch.equal(torch.cat([got[:7], got[8:]]), torch.cat([clean[:7], clean[8:]]))


def test_parts_of_larger_matrices(hopper: torch.device) -> None:
    a, b = (random_codes(hopper, "normal", rows, 384, rows) for rows in (17, 33))
    part = slice(128, 256)
    assert torch.equal(on_gpu(a[:, part], b[:, part]), in_torch(a[:, part], b[:, part]))
