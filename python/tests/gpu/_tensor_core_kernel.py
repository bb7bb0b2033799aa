"""`_tensor_core.in_torch` in Triton. Imported where there is a GPU alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exponents(codes, none: tl.constexpr):
    bits = codes.to(tl.int32)
    return tl.where((bits & 127) == 0, none, tl.maximum((bits >> 3) & 15, 1) - 7)


@triton.jit
def towards_zero(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def product(
    a,
    b,
    out,
    rows,
    columns,
    length: tl.constexpr,
    step: tl.constexpr,
    kept: tl.constexpr,
    none: tl.constexpr,
    tile: tl.constexpr,
):
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    column = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    sums = tl.zeros((tile, tile), tl.float32)
    for start in range(0, length, step):
        k = start + tl.arange(0, step)
        of_a = tl.load(a + row[:, None] * length + k[None, :], mask=row[:, None] < rows, other=0)
        of_b = tl.load(b + column[:, None] * length + k[None, :], mask=column[:, None] < columns, other=0)
        left = of_a.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        right = of_b.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        both = exponents(of_a, none)[:, None, :] + exponents(of_b, none)[None, :, :]
        of_sums = ((sums.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        most = tl.maximum(tl.max(both, axis=2), tl.where(sums == 0, none, of_sums))
        unit = tl.where(most < none // 2, 0, most - kept)
        down = power_of_two(-unit)
        products = left[:, None, :] * right[None, :, :] * down[:, :, None]
        total = tl.sum(towards_zero(products), axis=2) + towards_zero(sums * down)
        total = total * power_of_two(unit)
        sums = (total.to(tl.int32, bitcast=True) & -(1 << (23 - kept))).to(tl.float32, bitcast=True)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out + row[:, None] * columns + column[None, :], sums, mask=inside)
