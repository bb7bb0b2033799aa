"""The reference arithmetic: a loop over experts on any device, with every rounding of every precision emulated.

GEMMs accumulate in fp64 and are then rounded to fp32, so a result does not depend on the BLAS at hand, on TF32
switches or on which other rows are in the batch. fp64 inputs stay fp64 and have no such promise: they are for accuracy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.plain import quantize
from mega_moe._backends.plain.activation import activate, activate_backward, rounded_sigmoid, wide
from mega_moe._backends.plain.arithmetic import Arithmetic, Experts, Payload
from mega_moe._base.layer import Gradients, Needs


class _Gemm:
    """Operands in the inputs' own dtype."""

    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        """Round a wide operand to what the GEMM reads, along its contraction."""
        return (value.to(dtype),)

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        """``rows [M, K]`` times ``weight [N, K]`` transposed -> wide ``[M, N]``."""
        return (rows[0].double() @ weight.double().T).to(wide(weight.dtype))


class _BlockwiseGemm(_Gemm):
    """e4m3 operands, 1 x 128 scales for rows and 128 x 128 scales for weights."""

    def __init__(self, power_of_two: bool, block_gemm: quantize.BlockGemm) -> None:
        self._power_of_two, self._block_gemm = power_of_two, block_gemm

    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        return quantize.quantize_rows(value, self._power_of_two)

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        columns = quantize.quantize_weight(weight, self._power_of_two)
        product = quantize.scaled_gemm((rows[0], rows[1]), columns, self._block_gemm)
        return product.to(wide(weight.dtype))


class ReferenceArithmetic(Arithmetic):
    dtypes = (torch.bfloat16, torch.float32, torch.float64)

    def __init__(
        self,
        precision: str,
        dw_precision: str = "bf16",
        *,
        power_of_two: bool = False,
        block_gemm: quantize.BlockGemm = quantize.exact_block_gemm,
        recompute: str | None = None,
    ) -> None:
        """``recompute``: precision of gate and up in the backward, if not the backward's own."""
        blockwise = _BlockwiseGemm(power_of_two, block_gemm)
        self._forward = blockwise if precision == "fp8" else _Gemm()
        self._backward = _Gemm() if precision == "bf16" else blockwise
        self._recompute = _Gemm() if recompute == "bf16" else None
        self._dw_in_fp8, self._power_of_two = dw_precision == "fp8", power_of_two
        self._block_gemm = block_gemm

    def payload(self, x: Tensor) -> Payload:
        return self._forward.encode(x, x.dtype)

    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        dtype, gemm = experts.down.dtype, self._forward
        out = torch.empty(weight.shape[0], experts.down.shape[1], dtype=dtype, device=weight.device)
        for expert, rows in _blocks(experts.counts):
            z = gemm.multiply(tuple(part[rows] for part in x), experts.gate_up[expert]).to(dtype)
            h = activate(z, experts.activation, rounded_sigmoid) * weight[rows, None].to(wide(dtype))
            out[rows] = gemm.multiply(gemm.encode(h, dtype), experts.down[expert]).to(dtype)
        return out

    def backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, needs: Needs, dw_dtype: torch.dtype
    ) -> Gradients:
        dtype, gemm = experts.down.dtype, self._backward
        recompute = self._recompute or gemm
        dx = torch.empty_like(x) if needs.x else None
        dw = torch.empty(weight.shape[0], dtype=wide(dtype), device=x.device) if needs.topk_weights else None
        # Zeros: an expert without rows has a gradient of exactly zero.
        dw1 = x.new_zeros(experts.gate_up.shape, dtype=dw_dtype) if needs.w_gate_up else None
        dw2 = x.new_zeros(experts.down.shape, dtype=dw_dtype) if needs.w_down else None
        for expert, rows in _blocks(experts.counts):
            gate_up, down = experts.gate_up[expert], experts.down[expert]
            z = recompute.multiply(recompute.encode(x[rows], dtype), gate_up).to(dtype)
            dh = gemm.multiply(gemm.encode(dy[rows], dtype), down.T)
            grads = activate_backward(z, weight[rows], dh, experts.activation, rounded_sigmoid)
            if dw is not None:
                dw[rows] = grads.dw
            if dx is not None:
                dx[rows] = gemm.multiply(gemm.encode(grads.dz, dtype), gate_up.T).to(dtype)
            if dw1 is not None:
                # The e4m3 GEMM reads dz before it is rounded, as dgrad does.
                dz = grads.dz if self._dw_in_fp8 else grads.dz.to(dtype)
                dw1[expert] = self._outer(dz, x[rows], dtype).to(dw_dtype)
            if dw2 is not None:
                dw2[expert] = self._outer(dy[rows], grads.h.to(dtype), dtype).to(dw_dtype)
        return Gradients(dx, dw, dw1, dw2)

    def _outer(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """``left [M, A]``, ``right [M, B]`` -> ``left^T right [A, B]``, wide."""
        if self._dw_in_fp8:
            product = quantize.wgrad_gemm(left, right, self._power_of_two, self._block_gemm)
            return product.to(wide(dtype))
        return (left.double().T @ right.double()).to(wide(dtype))

    def sum_slots(self, rows: Tensor) -> Tensor:
        # One after another: a reduction kernel may split the slots by how many tokens there are.
        total = rows.new_zeros((rows.shape[0], rows.shape[2]), dtype=wide(rows.dtype))
        for slot in rows.unbind(1):
            total += slot
        return total


def _blocks(counts: list[int]) -> list[tuple[int, slice]]:
    blocks, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            blocks.append((expert, slice(start, start + count)))
        start += count
    return blocks
