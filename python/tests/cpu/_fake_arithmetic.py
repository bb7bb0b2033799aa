"""The arithmetic of the reference on operands that are e4m3 already, as the fake kernels are given them."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.plain.activation import activate, rounded_sigmoid
from mega_moe._backends.plain.arithmetic import Experts, Payload
from mega_moe._backends.plain.quantize import quantize_rows, scaled_gemm
from mega_moe._backends.plain.reference import ReferenceArithmetic
from mega_moe._base.layer import Gradients, Needs


class OfCopies(ReferenceArithmetic):
    """The fp8 forward on weights that are e4m3 copies already, and on an x that may be: ``found``."""

    def __init__(self, *scales: Tensor, power_of_two: bool, found: Payload | None = None) -> None:
        super().__init__("fp8", power_of_two=power_of_two)
        self._scales, self._found = scales, found

    def payload(self, x: Tensor) -> Payload:
        return super().payload(x) if self._found is None else self._found

    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        blocks, start = [], 0
        for expert, count in enumerate(experts.counts):
            rows = slice(start, start := start + count)
            gate_up, down = (
                (codes[expert], scales[expert])
                for codes, scales in zip((experts.gate_up, experts.down), self._scales, strict=True)
            )
            z = scaled_gemm((x[0][rows], x[1][rows]), gate_up).bfloat16()
            h = activate(z, experts.activation, rounded_sigmoid) * weight[rows, None]
            blocks.append(scaled_gemm(quantize_rows(h, self._power_of_two), down).bfloat16())
        return torch.cat(blocks)


class BackwardOfCopies(ReferenceArithmetic):
    """The fp8 backward on e4m3 copies of the weights: all of w_gate_up, and the transposed one of w_down."""

    def __init__(self, *copies: Tensor, dw_precision: str, power_of_two: bool) -> None:
        super().__init__("fp8", dw_precision, power_of_two=power_of_two)
        self._copies = copies
        self._expert = -1

    def backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, needs: Needs, dw_dtype: torch.dtype
    ) -> Gradients:
        """Expert by expert, so that `multiply` knows whose copies it reads."""
        parts, start = [], 0
        for expert, count in enumerate(experts.counts):
            rows = slice(start, start := start + count)
            self._backward = _Copied(*(copy[expert] for copy in self._copies), self._power_of_two)
            one = Experts(
                experts.gate_up[expert][None], experts.down[expert][None], [count], experts.activation
            )
            parts.append(super().backward(x[rows], dy[rows], weight[rows], one, needs, dw_dtype))
        return Gradients(
            *(None if own[0] is None else torch.cat([p for p in own if p is not None]) for own in zip(*parts))
        )


class _Copied:
    """Products of one expert, known by their extents: I, 2 I and H differ."""

    def __init__(
        self,
        gate_up: Tensor,
        gate_up_t: Tensor,
        gate_up_sf: Tensor,
        down_t: Tensor,
        down_sf: Tensor,
        power_of_two: bool,
    ):
        self._power_of_two = power_of_two
        pairs = ((gate_up, gate_up_sf), (gate_up_t, gate_up_sf.T), (down_t, down_sf.T))
        self._by_extents = {tuple(codes.shape): (codes, scales) for codes, scales in pairs}
        assert len(self._by_extents) == 3

    def encode(self, value: Tensor, dtype: torch.dtype) -> Payload:
        return quantize_rows(value, self._power_of_two)

    def multiply(self, rows: Payload, weight: Tensor) -> Tensor:
        return scaled_gemm((rows[0], rows[1]), self._by_extents[tuple(weight.shape)])
