"""The reference arithmetic: a loop over experts on any device, with every rounding of every precision emulated.

Products accumulate in fp64 and are then rounded to fp32, so a result does not depend on the BLAS at hand, on TF32
switches or on which other rows are in the batch. fp64 inputs stay fp64 and have no such promise: they are for accuracy.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mega_moe._backends import quantize
from mega_moe._backends.arithmetic import Payload, RowGrads
from mega_moe._backends.swiglu import activate, activate_backward, rounded_sigmoid, wide


class _Product(Protocol):
    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        """Round a wide operand to what the product reads, along its contraction."""
        ...

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        """``rows [M, K]`` times ``weight [N, K]`` transposed -> wide ``[M, N]``."""
        ...


class _Exact:
    """Operands in the inputs' own dtype."""

    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        return (value.to(dtype),)

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        return (rows[0].double() @ weight.double().T).to(wide(weight.dtype))


class _Blockwise:
    """e4m3 operands, 1 x 128 scales for rows and 128 x 128 scales for weights."""

    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        return quantize.quantize_rows(value)

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        return quantize.scaled_product((rows[0], rows[1]), quantize.quantize_weight(weight)).to(
            wide(weight.dtype)
        )


class ReferenceArithmetic:
    dtypes = (torch.bfloat16, torch.float32, torch.float64)

    def __init__(self, precision: str) -> None:
        self.quantized_dispatch = precision == "fp8"
        self._forward: _Product = _Blockwise() if precision == "fp8" else _Exact()
        self._backward: _Product = _Exact() if precision == "bf16" else _Blockwise()

    def forward(
        self,
        x: Payload,
        weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        counts: list[int],
        clamp: float | None,
    ) -> Tensor:
        dtype, product = w_gate_up.dtype, self._forward
        out = torch.empty(weight.shape[0], w_down.shape[1], dtype=dtype, device=weight.device)
        for expert, rows in _blocks(counts):
            z = product.multiply(tuple(part[rows] for part in x), w_gate_up[expert]).to(dtype)
            h = activate(z, clamp, rounded_sigmoid) * weight[rows, None].to(wide(dtype))
            out[rows] = product.multiply(product.encode(h, dtype), w_down[expert]).to(dtype)
        return out

    def backward(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        counts: list[int],
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
    ) -> RowGrads:
        need_dx, need_dw, need_gate_up, need_down = needs
        dtype, product = w_gate_up.dtype, self._backward
        dx = torch.empty_like(x) if need_dx else None
        dw = torch.empty(weight.shape[0], dtype=wide(dtype), device=x.device) if need_dw else None
        # Zeros: an expert without rows has a gradient of exactly zero.
        dw1 = torch.zeros(w_gate_up.shape, dtype=dw_dtype, device=x.device) if need_gate_up else None
        dw2 = torch.zeros(w_down.shape, dtype=dw_dtype, device=x.device) if need_down else None
        for expert, rows in _blocks(counts):
            z = product.multiply(product.encode(x[rows], dtype), w_gate_up[expert]).to(dtype)
            dh = product.multiply(product.encode(dy[rows], dtype), w_down[expert].T)
            grads = activate_backward(z, weight[rows], dh, clamp, rounded_sigmoid)
            dz = grads.dz.to(dtype)
            if dw is not None:
                dw[rows] = grads.dw
            if dx is not None:
                dx[rows] = product.multiply(product.encode(grads.dz, dtype), w_gate_up[expert].T).to(dtype)
            if dw1 is not None:
                dw1[expert] = _outer(dz, x[rows]).to(dw_dtype)
            if dw2 is not None:
                dw2[expert] = _outer(dy[rows], grads.h.to(dtype)).to(dw_dtype)
        return RowGrads(dx, dw, dw1, dw2)

    def sum_slots(self, rows: Tensor) -> Tensor:
        # One after another: a reduction kernel may split the slots by how many tokens there are.
        total = rows.new_zeros((rows.shape[0], rows.shape[2]), dtype=wide(rows.dtype))
        for slot in rows.unbind(1):
            total += slot
        return total


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """``left [M, A]``, ``right [M, B]`` -> ``left^T right [A, B]``, wide."""
    return (left.double().T @ right.double()).to(wide(left.dtype))


def _blocks(counts: list[int]) -> list[tuple[int, slice]]:
    blocks, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            blocks.append((expert, slice(start, start + count)))
        start += count
    return blocks
