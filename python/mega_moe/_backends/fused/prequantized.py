"""The fused layer in fp8 on operands that the caller has quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.layer import KernelLayer
from mega_moe._backends.fused.memory import dense
from mega_moe._backends.fused.weight_copies import WeightCopy
from mega_moe._backends.routing import Routing
from mega_moe._base.activation import Activation
from mega_moe._base.layer import LayerInputs, Outputs


class QuantizedWeight(NamedTuple):
    """A quantized weight ``[E, N, K]``."""

    codes: Tensor  # e4m3 [E, N, K]
    scales: Tensor  # fp32 [E, N / 128, K / 128]


class PrequantizedLayer:
    """Calls on the memory of ``kernels``, whose mode is fp8 in both directions.

    The caller fills the first rows of ``x`` e4m3 ``[max_tokens, H]`` and of ``x_scales`` fp32 ``[max_tokens, H / 128]``
    before each forward. A backward, and a forward of an x in bf16, stage theirs there too.
    """

    def __init__(self, kernels: KernelRank) -> None:
        self._kernels = kernels
        self._layer = KernelLayer(kernels)
        self.x, self.x_scales = kernels.staged_codes()

    def forward(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: QuantizedWeight,
        w_down: QuantizedWeight,
        activation: Activation,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """-> y ``[T, H]`` bf16 of the first T staged rows, T being that of ``topk_idx``, and the routing.

        y is ``out`` if given.
        """
        with self._kernels.refuse_peers_on_oom():
            gate_up = WeightCopy(dense(w_gate_up.codes), None, dense(w_gate_up.scales))
            down = WeightCopy(dense(w_down.codes), None, dense(w_down.scales))
            x = self.x[: len(topk_idx)]
            inputs = LayerInputs(x, dense(topk_idx), dense(topk_weights), w_gate_up.codes, w_down.codes)
            y, summary = self._layer.forward(inputs, activation, copies=(gate_up, down), out=out)
            return y, self._kernels.routing(summary)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: QuantizedWeight,
        w_gate_up_t: QuantizedWeight,
        w_down_t: QuantizedWeight,
        activation: Activation,
        out: Outputs,
    ) -> None:
        """Overwrites ``out``: dx bf16, dtopk fp32, and the weights' in bf16 or fp32.

        dy and x bf16 ``[T, H]``; the weights are those that the GEMMs read, ``_t`` with N and K exchanged. The kernel
        reads one set of scale factors for both copies of w_gate_up: a block in which they differ makes the results NaN.
        """
        with self._kernels.refuse_peers_on_oom():
            scales_t = w_gate_up_t.scales.transpose(1, 2)
            scales = w_gate_up.scales.masked_fill(w_gate_up.scales != scales_t, torch.nan)
            gate_up = WeightCopy(dense(w_gate_up.codes), dense(w_gate_up_t.codes), dense(scales))
            down = WeightCopy(None, dense(w_down_t.codes), dense(w_down_t.scales.transpose(1, 2)))
            # Of the weights the shapes alone are read, which are those of their gradients.
            inputs = LayerInputs(dense(x), dense(topk_idx), dense(topk_weights), *out[2:])
            self._layer.backward(dense(dy), inputs, activation, copies=(gate_up, down), out=out)
