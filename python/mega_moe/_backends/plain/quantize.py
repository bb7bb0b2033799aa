"""Blockwise e4m3 quantization, bit for bit as the kernels do it.

scale = amax / 448 in fp32 (448 is the largest e4m3 number), 1 where that is zero; code = e4m3(value / scale), a true
fp32 division, rounded to nearest even. A scale may be denormal, unless its reciprocal is wanted. NaN and Inf make
their own block NaN. With ``power_of_two`` a scale is rounded up to the next power of two. For operands of a weight's
gradient kernels multiply by fp32(1 / scale) instead: ``by_reciprocal``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mega_moe._base.types import SCALE_BLOCK

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
_LEAST_WITH_RECIPROCAL = 2.0**-126  # a denormal's may be beyond fp32


def _codes(blocks: Tensor, scale: Tensor, by_reciprocal: bool) -> Tensor:
    quotient = blocks * (torch.ones_like(scale) / scale) if by_reciprocal else blocks / scale
    # The clamp only acts on a denormal scale, too coarse to keep amax / scale at 448 or below; it lets NaN through.
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _scale(amax: Tensor, power_of_two: bool, by_reciprocal: bool) -> Tensor:
    # A divisor tensor: torch turns division by a Python number into a multiplication by its reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    # Also of a block so small that fp32 holds no scale for it (amax below 3.2e-43): 0 / 0 would make it NaN.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if by_reciprocal:
        scale = scale.clamp_min(_LEAST_WITH_RECIPROCAL)
    if not power_of_two:
        return scale
    # fp64, in which no fp32 number is denormal.
    mantissa, exponent = torch.frexp(scale.double())
    above = torch.ldexp(torch.ones_like(mantissa), exponent).float()
    return torch.where((mantissa == 0.5) | ~scale.isfinite(), scale, above)


def quantize_rows(
    value: Tensor, power_of_two: bool = False, by_reciprocal: bool = False
) -> tuple[Tensor, Tensor]:
    """``value [M, K]`` in 1 x 128 blocks along K -> codes e4m3 ``[M, K]``, scales fp32 ``[M, K / 128]``."""
    rows, columns = value.shape
    blocks = value.float().view(rows, columns // SCALE_BLOCK, SCALE_BLOCK)
    if rows == 0:
        return value.to(E4M3), blocks.new_empty(0, columns // SCALE_BLOCK)
    scale = _scale(blocks.abs().amax(-1, keepdim=True), power_of_two, by_reciprocal)
    return _codes(blocks, scale, by_reciprocal).view(rows, columns), scale.squeeze(-1)


def quantize_weight(
    weight: Tensor, power_of_two: bool = False, by_reciprocal: bool = False
) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` in 128 x 128 blocks -> codes e4m3 ``[N, K]``, scales fp32 ``[N / 128, K / 128]``."""
    n, k = weight.shape
    blocks = weight.float().view(n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
    scale = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True), power_of_two, by_reciprocal)
    return _codes(blocks, scale, by_reciprocal).view(n, k), scale[:, 0, :, 0]


BlockGemm = Callable[[Tensor, Tensor], Tensor]
"""Codes e4m3 ``[M, 128]`` and ``[N, 128]`` -> fp32 ``[M, N]``, one times the other transposed."""


def exact_block_gemm(a: Tensor, b: Tensor) -> Tensor:
    # fp64 holds each sum without rounding.
    return (a.double() @ b.double().T).float()


def wgrad_gemm(
    rows: Tensor,
    columns: Tensor,
    power_of_two: bool = False,
    block_gemm: BlockGemm = exact_block_gemm,
) -> Tensor:
    """fp32 ``[A, B] = rows^T columns`` of ``rows [M, A]`` and ``columns [M, B]``, both quantized along M.

    Of blocks of 128 of the M, the last one filled up with zeros, ``rows`` has a scale for each column and ``columns``
    one for 128 columns, as the operands of `scaled_gemm` have. ``power_of_two`` rounds both.
    """
    missing = -rows.shape[0] % SCALE_BLOCK
    left, right = (torch.nn.functional.pad(v, (0, 0, 0, missing)).T.contiguous() for v in (rows, columns))
    a = quantize_rows(left, power_of_two, by_reciprocal=True)
    b = quantize_weight(right, power_of_two, by_reciprocal=True)
    return scaled_gemm(a, b, block_gemm)


def scaled_gemm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], block_gemm: BlockGemm = exact_block_gemm
) -> Tensor:
    """fp32 ``[M, N] = a b^T`` of row-quantized ``a [M, K]`` and block-quantized ``b [N, K]``.

    Each 128 columns of K give a partial product, which is scaled and added to the fp32 sum by fused multiply-adds in
    ascending K: the promotion of the kernels.
    """
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    total = torch.zeros(a_codes.shape[0], b_codes.shape[0], dtype=torch.float32, device=a_codes.device)
    per_column = b_scale.repeat_interleave(SCALE_BLOCK, 0)
    for block in range(a_codes.shape[1] // SCALE_BLOCK):
        columns = slice(block * SCALE_BLOCK, (block + 1) * SCALE_BLOCK)
        partial = block_gemm(a_codes[:, columns], b_codes[:, columns])
        # fp64 holds the product of two fp32 numbers, and rounds its sum with a third far below what fp32 keeps.
        scale = (a_scale[:, block, None] * per_column[None, :, block]).double()
        total = (scale * partial.double() + total.double()).float()
    return total
