"""The layer written once more, in fp64 and straight from its definition, sharing no code with the backends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._base.activation import Activation, as_activation


class Gradients(NamedTuple):
    """fp64 results of one forward and backward."""

    y: Tensor
    dx: Tensor
    dtopk: Tensor
    dw_gate_up: Tensor
    dw_down: Tensor


def fp64_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation_clamp: float | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``y [T, H]`` in fp64 with all experts given (``w_gate_up [E, 2I, H]``); differentiable by autograd."""
    clamp = as_activation(activation, activation_clamp).clamp
    x, w_gate_up, w_down = x.double(), w_gate_up.double(), w_down.double()
    valid = topk_idx >= 0
    weights = torch.where(valid, topk_weights.double(), 0.0)
    y = torch.zeros_like(x)
    for expert in range(w_gate_up.shape[0]):
        gate, up = (x @ w_gate_up[expert].T).chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        out = (torch.nn.functional.silu(gate) * up) @ w_down[expert].T
        y = y + ((topk_idx == expert) * weights).sum(1, keepdim=True) * out
    return y


def fp64_moe_grads(
    dy: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation_clamp: float | None = None,
    activation: Activation | None = None,
) -> Gradients:
    """y and all gradients in fp64, by autograd through `fp64_moe`."""
    leaves = [t.detach().double().requires_grad_() for t in (x, topk_weights, w_gate_up, w_down)]
    with torch.enable_grad():
        y = fp64_moe(leaves[0], topk_idx, leaves[1], leaves[2], leaves[3], activation_clamp, activation)
        grads = torch.autograd.grad(y, leaves, dy.double())
    return Gradients(y.detach(), *grads)
