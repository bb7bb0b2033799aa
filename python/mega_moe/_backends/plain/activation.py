"""The activation with the routing weight, forward and backward, elementwise in fp32 (fp64 for fp64 inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._base.activation import Activation


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of elementwise steps and of sums over slots for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded_sigmoid(gate: Tensor) -> Tensor:
    """The fp32 sigmoid, rounded from fp64: the same for a number wherever it stands.

    torch's own, on a CPU, differs by an ulp between the body of a vector loop and its end, so that a token's value
    would depend on the tokens alongside it.
    """
    return torch.sigmoid(gate.double()).to(gate.dtype)


def activate(
    z: Tensor, activation: Activation, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """``z [M, 2I] = [gate | up]`` -> ``a [M, I]``, wide: `Activation` says what of."""
    clamp = activation.clamp
    gate, up = z.chunk(2, dim=-1)
    gate = gate.to(wide(z.dtype))
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.to(gate.dtype).clamp(-clamp, clamp)
    # Without a clamp up is still narrow: the product widens it as it reads.
    return gate * sigmoid(gate) * up


class ActivationGrads(NamedTuple):
    """Wide results of the backward: ``h [M, I]`` before rounding, ``dz [M, 2I]`` before rounding, ``dw [M]``."""

    h: Tensor
    dz: Tensor
    dw: Tensor


def activate_backward(
    z: Tensor,
    weight: Tensor,
    dh: Tensor,
    activation: Activation,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> ActivationGrads:
    """From ``z [M, 2I]``, routing weights ``[M]`` and ``dh [M, I]`` (gradient of h = a * w)."""
    dtype, clamp = wide(z.dtype), activation.clamp
    gate_in, up_in = z.chunk(2, dim=-1)
    gate_in = gate_in.to(dtype)
    gate, up = gate_in, up_in
    if clamp is not None:
        up_in = up_in.to(dtype)
        gate, up = gate_in.clamp(max=clamp), up_in.clamp(-clamp, clamp)
    share = sigmoid(gate)
    silu = gate * share
    a = silu * up
    column = weight.to(dtype)[:, None]
    da = dh * column
    dgate = da * up * (share * (1 + gate * (1 - share)))
    dup = da * silu
    if clamp is not None:
        dgate = torch.where(gate_in <= clamp, dgate, 0)
        dup = torch.where(up_in.abs() <= clamp, dup, 0)
    return ActivationGrads(a * column, torch.cat((dgate, dup), dim=-1), (dh * a).sum(-1))
