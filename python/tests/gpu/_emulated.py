"""The forward of all ranks with the kernel's rounding points, in plain torch on any device.

g, u, h and o are rounded to bf16, in fp8 h to e4m3 instead, as x before it, and sums of e4m3 products on a GPU are the
tensor core's; a rank sums its rows of a token in slot
order and rounds the sum once for the way back; the token's own rank sums what the ranks sent in their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mega_moe._backends.plain.arithmetic import Experts
from mega_moe._backends.plain.quantize import quantize_rows
from mega_moe._backends.plain.reference import ReferenceArithmetic
from mega_moe._base.activation import Activation

from ._forward import Layer
from ._tensor_core import block_product_of


def slot_outputs(layer: Layer, precision: str = "bf16", power_of_two: bool = False) -> list[Tensor]:
    """``o [T, K, H]`` bf16 of each rank's tokens; zero in masked slots."""
    one = layer.as_one_rank()
    x, ids, weights = one.x[0], one.ids[0], one.weights[0]
    token, slot = (ids >= 0).nonzero().unbind(1)
    expert = ids[token, slot]
    order = torch.sort(expert, stable=True).indices
    token, slot = token[order], slot[order]
    counts = expert.bincount(minlength=layer.num_experts).tolist()
    clamp = None if layer.clamp is None or math.isinf(layer.clamp) else layer.clamp
    outputs = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    rows = tuple(part[token] for part in (quantize_rows(x, power_of_two) if precision == "fp8" else (x,)))
    arithmetic = ReferenceArithmetic(
        precision, power_of_two=power_of_two, block_gemm=block_product_of(layer.device)
    )
    outputs[token, slot] = arithmetic.forward(
        rows, weights[token, slot], Experts(layer.gate_up, layer.down, counts, Activation(clamp=clamp))
    )
    return list(outputs.split([len(own) for own in layer.x]))


def combined(layer: Layer, outputs: list[Tensor]) -> list[Tensor]:
    """``y [T, H]`` bf16 of each rank from the outputs of its slots."""
    own = layer.num_experts // layer.num_ranks
    results = []
    for rows, ids in zip(outputs, layer.ids, strict=True):
        sums = []
        for rank in range(layer.num_ranks):
            part = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
            for slot in range(rows.shape[1]):
                here = (ids[:, slot] >= rank * own) & (ids[:, slot] < (rank + 1) * own)
                part += torch.where(here[:, None], rows[:, slot].float(), 0.0)
            sums.append(part.bfloat16().float() if layer.num_ranks > 1 else part)
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        results.append(total.bfloat16())
    return results


def emulated(layer: Layer, precision: str = "bf16", power_of_two: bool = False) -> list[Tensor]:
    return combined(layer, slot_outputs(layer, precision, power_of_two))
