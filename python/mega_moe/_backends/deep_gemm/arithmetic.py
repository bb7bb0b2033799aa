"""DeepGEMM's grouped GEMMs on rows that are padded for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.deep_gemm.library import Gemms
from mega_moe._backends.plain.activation import activate, activate_backward
from mega_moe._backends.plain.arithmetic import Arithmetic, Experts, Payload
from mega_moe._base.layer import Gradients, Needs


class _Layout(NamedTuple):
    """Where the M rows lie among P padded ones: each expert's start on a multiple of the alignment."""

    place: Tensor  # [M] int64
    group: Tensor  # [P] int32, -1 for padding
    padding: Tensor  # [P - M] int64
    sizes: list[int]  # padded rows of each expert
    sizes_tensor: Tensor  # the same, int32 on the device


class DeepGemmArithmetic(Arithmetic):
    """Rows are padded once on the way in; what the GEMMs leave in padded rows is never read as a number."""

    dtypes = (torch.bfloat16,)

    def __init__(self, gemms: Gemms) -> None:
        self._gemms = gemms

    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        if not len(weight):
            return x[0].new_empty(0, experts.down.shape[1])
        layout = self._layout(experts.counts, weight.device)
        z = self._nt(_pad(x[0], layout), experts.gate_up, layout)
        # A padded row has weight 0 or holds NaN; either stays in its own row.
        h = (activate(z, experts.activation) * _pad(weight, layout)[:, None]).to(z.dtype)
        return self._nt(h, experts.down, layout)[layout.place]

    def backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, needs: Needs, dw_dtype: torch.dtype
    ) -> Gradients:
        gate_up, down = experts.gate_up, experts.down
        if not len(weight):
            return Gradients(
                torch.empty_like(x) if needs.x else None,
                weight.new_empty(0) if needs.topk_weights else None,
                torch.zeros_like(gate_up, dtype=dw_dtype) if needs.w_gate_up else None,
                torch.zeros_like(down, dtype=dw_dtype) if needs.w_down else None,
            )
        layout = self._layout(experts.counts, weight.device)
        x, dy = _pad(x, layout), _pad(dy, layout)
        z = self._nt(x, gate_up, layout)
        dh = self._nn(dy, down, layout)
        grads = activate_backward(z, _pad(weight, layout), dh, experts.activation)
        # Padded rows are part of the contraction of dW: there they must be zeros.
        dz = grads.dz.to(z.dtype).index_fill_(0, layout.padding, 0)
        dx = self._nn(dz, gate_up, layout)[layout.place] if needs.x else None
        dw1 = self._tn(dz, x, layout).to(dw_dtype) if needs.w_gate_up else None
        dw2 = None
        if needs.w_down:
            h = grads.h.to(z.dtype).index_fill_(0, layout.padding, 0)
            dw2 = self._tn(dy, h, layout).to(dw_dtype)
        return Gradients(dx, grads.dw[layout.place] if needs.topk_weights else None, dw1, dw2)

    def _layout(self, counts: list[int], device: torch.device) -> _Layout:
        # On the CPU, where the counts are, and copied over in one go each.
        rows = torch.tensor(counts, device="cpu")
        sizes = (rows + self._gemms.alignment - 1) // self._gemms.alignment * self._gemms.alignment
        starts = sizes.cumsum(0) - sizes
        before = rows.cumsum(0) - rows
        expert = torch.arange(len(counts), device="cpu").repeat_interleave(rows)
        place = starts[expert] + torch.arange(len(expert), device="cpu") - before[expert]
        group = torch.full((int(sizes.sum()),), -1, dtype=torch.int32, device="cpu")
        group[place] = expert.to(torch.int32)
        padding = (group < 0).nonzero()[:, 0]
        return _Layout(
            place.to(device),
            group.to(device),
            padding.to(device),
            sizes.tolist(),
            sizes.to(device, torch.int32),
        )

    def _nt(self, rows: Tensor, weight: Tensor, layout: _Layout) -> Tensor:
        """Rows of each expert times its ``weight [E, N, K]`` transposed."""
        out = rows.new_empty(len(rows), weight.shape[1])
        self._gemms.rows_nt(rows, weight, out, layout.group)
        return out

    def _nn(self, rows: Tensor, weight: Tensor, layout: _Layout) -> Tensor:
        """Rows of each expert times its ``weight [E, K, N]``."""
        out = rows.new_empty(len(rows), weight.shape[2])
        self._gemms.rows_nn(rows, weight, out, layout.group)
        return out

    def _tn(self, left: Tensor, right: Tensor, layout: _Layout) -> Tensor:
        """``left^T right`` over the rows of each expert, fp32 ``[E, A, B]``, 0 without rows."""
        # On Hopper this GEMM only accumulates, onto its last argument.
        out = left.new_zeros(len(layout.sizes), left.shape[1], right.shape[1], dtype=torch.float32)
        self._gemms.groups_tn(left, right, out, layout.sizes, layout.sizes_tensor, out)
        return out


def _pad(rows: Tensor, layout: _Layout) -> Tensor:
    """Rows at their padded places, zeros between them."""
    padded = rows.new_zeros(len(layout.group), *rows.shape[1:])
    padded[layout.place] = rows
    return padded
