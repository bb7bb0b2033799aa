"""The tensors of one call of the layer, under the names that they keep from `mega_moe.moe` to the kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerInputs(NamedTuple):
    """T tokens of this rank, K slots each, and its E_local experts."""

    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K] int32 or int64, -1 masks a slot
    topk_weights: Tensor  # [T, K]
    w_gate_up: Tensor  # [E_local, 2I, H], gate rows first
    w_down: Tensor  # [E_local, H, I]


class Needs(NamedTuple):
    """Which gradients a backward computes."""

    x: bool = True
    topk_weights: bool = True
    w_gate_up: bool = True
    w_down: bool = True


# The caller's memory for dx, dtopk, dw_gate_up and dw_down.
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


class Gradients(NamedTuple):
    """Those of `LayerInputs`; None for one that nobody needs, or that went into a buffer of the caller's."""

    dx: Tensor | None = None  # [T, H]
    dtopk: Tensor | None = None  # [T, K]
    dw_gate_up: Tensor | None = None  # [E_local, 2I, H]
    dw_down: Tensor | None = None  # [E_local, H, I]

    def add_into(self, buffers: tuple[Tensor, Tensor] | None) -> Gradients:
        """Adds the weights' gradients to the caller's ``buffers``, where there are any -> the others."""
        if buffers is None:
            return self
        for buffer, gradient in zip(buffers, self[2:], strict=True):
            if gradient is not None:
                buffer.add_(gradient)
        return Gradients(self.dx, self.dtopk)

    def copy_into(self, out: Outputs | None) -> Gradients:
        """Overwrites ``out``, where there is any, with those that lie elsewhere -> gradients that lie there."""
        if out is None:
            return self
        for result, gradient in zip(out, self, strict=True):
            if gradient is not None and gradient is not result:
                result.copy_(gradient)
        return Gradients(*out)
