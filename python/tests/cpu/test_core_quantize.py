"""The quantizer alone, against e4m3 written out by hand and at the edges of fp32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mega_moe._backends.plain.quantize import (
    E4M3,
    quantize_rows,
    quantize_weight,
    scaled_gemm,
    wgrad_gemm,
)
from mega_moe.testing import relative_l2

LARGEST = 448.0


def e4m3(code: int) -> float:
    """Value of an e4m3 code: bias 7, 3 bits of mantissa, no infinities."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


TABLE = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def nearest_code(value: Tensor) -> Tensor:
    """Code of the nearest e4m3 number, ties to even, by looking at all of them; beyond the largest: the largest."""
    size = value.double().abs().reshape(-1, 1)
    distance = (TABLE[:127] - size).abs()
    odd = torch.arange(127) % 2  # of two equally near codes exactly one is even
    code = torch.where(distance == distance.amin(1, keepdim=True), odd, 2).argmin(1)
    return (code + 128 * value.reshape(-1).signbit()).to(torch.uint8).view(value.shape)


def scale_of(amax: float) -> float:
    quotient = torch.tensor(amax, dtype=torch.float32).double() / LARGEST
    return float(quotient.float()) or 1.0  # the fp64 quotient, rounded, is the true fp32 division


def row(*values: float) -> Tensor:
    return torch.tensor([list(values) + [0.0] * (128 - len(values))])


def test_codes_are_the_nearest() -> None:
    # A scale of one, and every e4m3 number, every middle of two, and the fp32 neighbours of both.
    points = torch.cat((TABLE[:127], (TABLE[:126] + TABLE[1:127]) / 2)).float()
    points = torch.cat(
        (points, points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(0.0)))
    )
    points = torch.cat((points, -points)).clamp(-LARGEST, LARGEST)
    blocks = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
    rows = torch.cat((torch.full((len(blocks), 1), LARGEST), blocks), 1)
    codes, scales = quantize_rows(rows)
    assert codes.dtype == E4M3
    assert torch.equal(scales, torch.ones(len(blocks), 1))
    assert torch.equal(codes.view(torch.uint8), nearest_code(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_by_blocks_of_their_own(dtype: torch.dtype) -> None:
    value = torch.randn(40, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    value *= 2.0 ** torch.arange(-20, 20)[:, None]
    value[7, 128:256] = 0
    codes, scales = quantize_rows(value)
    assert (codes.shape, scales.shape, scales.dtype) == ((40, 384), (40, 3), torch.float32)
    for token in range(40):
        for block in range(3):
            part = value[token, block * 128 : block * 128 + 128].float()
            scale = scale_of(float(part.abs().max()))
            assert float(scales[token, block]) == scale
            got = codes[token, block * 128 : block * 128 + 128].view(torch.uint8)
            assert torch.equal(got, nearest_code(part / scale))


def test_weights_by_square_blocks() -> None:
    value = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    value[128:, :128] = 0
    codes, scales = quantize_weight(value)
    assert scales.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            part = value[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].float()
            scale = scale_of(float(part.abs().max()))
            assert float(scales[i, j]) == scale
            got = codes[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].contiguous().view(torch.uint8)
            assert torch.equal(got, nearest_code(part / scale))


def test_a_transposed_weight_has_the_same_codes() -> None:
    value = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    (codes, scales), (turned, turned_scales) = quantize_weight(value), quantize_weight(value.T)
    assert torch.equal(turned.view(torch.uint8), codes.T.contiguous().view(torch.uint8))
    assert torch.equal(turned_scales, scales.T)


@pytest.mark.parametrize(
    "amax", [447.0, 448.0, 449.0, 448 * 2.0**5, 448 * (1 + 2**-20), 2.0**-120, 1e-38, 3e38, 3.4028235e38]
)
def test_no_scale_saturates_or_overflows(amax: float) -> None:
    codes, scales = quantize_rows(row(amax, -amax, amax / 2))
    assert float(scales) == scale_of(amax) > 0
    back = codes.double() * scales.double()
    assert back.isfinite().all()
    assert codes[0, :2].float().tolist() == [LARGEST, -LARGEST]
    assert relative_l2(back[0, :3], torch.tensor([amax, -amax, amax / 2])) <= 2**-4


@pytest.mark.parametrize("amax", [1e-40, 1e-42])
def test_a_denormal_scale_keeps_its_value(amax: float) -> None:
    codes, scales = quantize_rows(row(amax, -amax, amax / 2))
    assert float(scales) == scale_of(amax) < 1
    back = codes.double() * scales.double()
    assert (
        relative_l2(back[0, :3], torch.tensor([amax, -amax, amax / 2])) <= 0.25
    )  # the scale has few bits itself


@pytest.mark.parametrize("amax", [3e-43, 1e-43, 1.4e-45])
def test_a_block_too_small_for_any_scale_is_zero(amax: float) -> None:
    codes, scales = quantize_rows(row(amax, -amax, amax / 2))
    assert float(scales) == 1
    assert torch.equal(codes.float().abs(), torch.zeros(1, 128))


def test_blocks_of_zeros_have_scale_one() -> None:
    for codes, scales in (quantize_rows(torch.zeros(3, 256)), quantize_weight(torch.zeros(256, 128))):
        assert torch.equal(scales, torch.ones_like(scales))
        assert torch.count_nonzero(codes.view(torch.uint8)) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_number_spoils_its_own_block(value: float) -> None:
    rows = torch.ones(3, 256)
    clean_codes, clean_scales = quantize_rows(rows)
    rows[1, 5] = value
    codes, scales = quantize_rows(rows)
    kept = torch.ones(3, 2, dtype=torch.bool)
    kept[1, 0] = False
    assert torch.equal(scales[kept], clean_scales[kept])
    blocks, clean_blocks = (c.view(torch.uint8).view(3, 2, 128) for c in (codes, clean_codes))
    assert torch.equal(blocks[kept], clean_blocks[kept])
    back = (codes.float().view(3, 2, 128) * scales[..., None])[~kept]
    assert not back.isfinite().any()


def test_no_rows() -> None:
    codes, scales = quantize_rows(torch.empty(0, 256, dtype=torch.bfloat16))
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((0, 256), E4M3, (0, 2), torch.float32)


def test_product_of_dequantized_operands() -> None:
    rng = torch.Generator().manual_seed(0)
    a = quantize_rows(torch.randn(9, 384, generator=rng))
    b = quantize_weight(torch.randn(256, 384, generator=rng))
    wide_a = a[0].double() * a[1].double().repeat_interleave(128, 1)
    wide_b = b[0].double() * b[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    got = scaled_gemm(a, b)
    assert got.dtype == torch.float32
    assert relative_l2(got, wide_a @ wide_b.T) <= 2e-7


def test_powers_of_two() -> None:
    """The smallest that no code needs to be clamped for; zeros, denormals, Inf and NaN as without."""
    amax = torch.tensor([0.0, 2.0**-133, 3.5e-40, 1.0, 448.0, 449.0, 448.0 * 2**7, 3e38, math.inf, math.nan])
    value = torch.zeros(len(amax), 128)
    value[:, 5] = amax
    plain, rounded = (quantize_rows(value, p)[1].flatten() for p in (False, True))
    finite = amax.isfinite()
    mantissa, _ = torch.frexp(rounded[finite].double())
    assert bool((mantissa == 0.5).all())
    assert bool((rounded >= plain)[finite].all())
    assert bool((rounded[finite].double() / 2 < plain[finite].double()).all())
    assert rounded[0] == 1
    assert rounded[4] == 1
    assert rounded[5] == 2
    assert rounded[8] == math.inf
    assert rounded[9].isnan()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 300])
def test_gradient_product_by_blocks_of_rows(rows: int, power_of_two: bool) -> None:
    def rounded(scale: float) -> float:
        return 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale

    made = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, columns, generator=made) for columns in (256, 128))
    want = torch.zeros(256, 128, dtype=torch.float64)
    for start in range(0, rows, 128):
        a, b = left[start : start + 128], right[start : start + 128]
        scale_a = torch.tensor([rounded(scale_of(float(column.abs().max()))) for column in a.T]).float()
        scale_b = torch.tensor(rounded(scale_of(float(b.abs().max())))).float()
        code_a, code_b = ((v / s).to(E4M3).double() for v, s in ((a, scale_a), (b, scale_b)))
        want += (code_a * scale_a).T @ (code_b * scale_b)
    got = wgrad_gemm(left, right, power_of_two)
    assert (got.shape, got.dtype) == ((256, 128), torch.float32)
    assert relative_l2(got, want) <= 1e-6 if rows else torch.equal(got.double(), want)


def test_gradient_product_of_rows_that_are_not_numbers() -> None:
    left, right = torch.ones(200, 256), torch.ones(200, 128)
    left[150, 3] = math.nan
    got = wgrad_gemm(left, right)
    assert got[3].isnan().all()
    assert not got[[*range(3), *range(4, 256)]].isnan().any()
