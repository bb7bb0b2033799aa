"""torch's grouped GEMMs, and plain torch operators where it has none, so that it runs everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_moe._backends.plain.activation import activate, activate_backward
from mega_moe._backends.plain.arithmetic import Arithmetic, Experts, Payload
from mega_moe._base.layer import Gradients, Needs


class GroupedArithmetic(Arithmetic):
    dtypes = (torch.bfloat16, torch.float32)

    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        z = _by_weight(x[0], experts.gate_up.transpose(1, 2), experts.counts)
        h = (activate(z, experts.activation) * weight[:, None]).to(z.dtype)
        return _by_weight(h, experts.down.transpose(1, 2), experts.counts)

    def backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, needs: Needs, dw_dtype: torch.dtype
    ) -> Gradients:
        counts, dtype = experts.counts, experts.down.dtype
        z = _by_weight(x, experts.gate_up.transpose(1, 2), counts)
        grads = activate_backward(z, weight, _by_weight(dy, experts.down, counts), experts.activation)
        dz = grads.dz.to(dtype)
        return Gradients(
            _by_weight(dz, experts.gate_up, counts) if needs.x else None,
            grads.dw if needs.topk_weights else None,
            _by_rows(dz, x, counts).to(dw_dtype) if needs.w_gate_up else None,
            _by_rows(dy, grads.h.to(dtype), counts).to(dw_dtype) if needs.w_down else None,
        )


def _by_weight(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows ``[M, K]`` of each expert times its ``weight [E, K, N]`` -> ``[M, N]``."""
    if _has_grouped_gemm(rows) and rows.shape[0]:
        return F.grouped_mm(rows, weight, offs=_ends(counts, rows.device))
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, (part, into) in enumerate(zip(rows.split(counts), out.split(counts))):
        torch.mm(part, weight[expert], out=into)
    return out


def _by_rows(left: Tensor, right: Tensor, counts: list[int]) -> Tensor:
    """``left [M, A]``, ``right [M, B]`` -> ``[E, A, B]``: left^T right over the rows of each expert, 0 without rows."""
    if _has_grouped_gemm(left) and left.shape[0]:
        out = F.grouped_mm(left.T, right, offs=_ends(counts, left.device))
        # The grouped GEMM skips an empty group and leaves its output as the allocator gave it.
        empty = [expert for expert, count in enumerate(counts) if not count]
        if empty:
            out[torch.tensor(empty, device=out.device)] = 0
        return out
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    for expert, (a, b) in enumerate(zip(left.split(counts), right.split(counts))):
        if a.shape[0]:
            torch.mm(a.T, b, out=out[expert])
    return out


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device="cpu").cumsum(0).to(device, torch.int32)


def _has_grouped_gemm(rows: Tensor) -> bool:
    # torch's grouped GEMM is a kernel for bf16 on compute capability 9.0 and later; elsewhere it is a loop, as here.
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )
