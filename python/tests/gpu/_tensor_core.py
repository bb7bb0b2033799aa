"""The sums of Hopper's tensor core over e4m3 products, bit for bit.

One instruction adds 32 products to an accumulator. All 33 are cut to multiples of 2^(m - 13), towards zero, where m is
the largest exponent among them, a product's being the sum of its operands'; their sum is cut to 13 bits after the
leading one, towards zero again. `test_tensor_core` holds it against the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.plain.quantize import BlockGemm, exact_block_gemm

STEP = 32
BITS = 13
_NONE = -1000  # the exponent of a zero; with that of another operand still below the half of it
_ELEMENTS = 1 << 25  # of products at once
_TILE = 16  # rows and columns of one program


def block_product_of(device: torch.device) -> BlockGemm:
    """As the kernels' products on a GPU; exact elsewhere, where nothing runs that would sum like this."""
    return on_gpu if device.type == "cuda" else exact_block_gemm


def on_gpu(a: Tensor, b: Tensor) -> Tensor:
    """`in_torch` as one kernel: a large layer has 10^11 products."""
    from ._tensor_core_kernel import product  # there may be no Triton where there is no GPU

    a, b = a.contiguous(), b.contiguous()
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    if out.numel():
        grid = tuple(-(-extent // _TILE) for extent in out.shape)
        codes = (part.view(torch.uint8) for part in (a, b))
        with torch.cuda.device(a.device):
            product[grid](*codes, out, *out.shape, a.shape[1], STEP, BITS, _NONE, _TILE)
    return out


def in_torch(a: Tensor, b: Tensor) -> Tensor:
    """Codes e4m3 ``[M, K]`` and ``[N, K]`` -> fp32 ``[M, N]``, K a multiple of 32: one accumulator, from zero."""
    rows = max(1, _ELEMENTS // (STEP * max(b.shape[0], 1)))
    return torch.cat([_product_of(part, b) for part in a.split(rows)])


def _product_of(a: Tensor, b: Tensor) -> Tensor:
    left, right = a.float(), b.float()
    left_exponent, right_exponent = _exponents(a), _exponents(b)
    sums = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], STEP):
        step = slice(start, start + STEP)
        products = left[:, None, step] * right[None, :, step]
        exponents = left_exponent[:, None, step] + right_exponent[None, :, step]
        most = torch.maximum(exponents.amax(-1), _exponents_of_sums(sums))
        unit = torch.where(most < _NONE // 2, 0, most - BITS)
        # fp32 holds every product, and 33 of fewer than 16 bits in one unit.
        scaled = torch.ldexp(products, -unit[..., None]).trunc().sum(-1)
        scaled += torch.ldexp(sums, -unit).trunc()
        sums = (torch.ldexp(scaled, unit).view(torch.int32) & -(1 << (23 - BITS))).view(torch.float32)
    return sums


def _exponents(codes: Tensor) -> Tensor:
    bits = codes.view(torch.uint8).to(torch.int32)
    exponents = ((bits >> 3) & 15).clamp_min(1) - 7
    return torch.where(bits & 127 == 0, _NONE, exponents)


def _exponents_of_sums(value: Tensor) -> Tensor:
    return torch.where(value == 0, _NONE, torch.frexp(value).exponent - 1)
