"""DeepGEMM's calls in fp8 on a `Problem`: operands that the caller has quantized, results written over NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mega_moe import deep_gemm as face
from mega_moe._backends.plain.quantize import quantize_rows, quantize_weight
from mega_moe.testing import Gradients, Problem

Pair = tuple[Tensor, Tensor]


def pair(weight: Tensor) -> Pair:
    """Codes and scales of ``weight [E, N, K]``."""
    codes, scales = zip(*(quantize_weight(own) for own in weight), strict=True)
    return torch.stack(codes), torch.stack(scales)


def turned(weight: Pair) -> Pair:
    """The same with N and K exchanged."""
    codes, scales = weight
    return codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()


def fill(buffer: face.SymmBuffer, problem: Problem) -> None:
    """x, ids and weights of ``problem`` in the first rows, and what no token uses in the others."""
    tokens = len(problem.x)
    assert buffer.x is not None
    assert buffer.x_sf is not None
    assert buffer.topk_idx is not None
    assert buffer.topk_weights is not None
    codes, scales = quantize_rows(problem.x)
    nan = float("nan")
    for view, unused, rows in (
        (buffer.x.view(torch.uint8), 0x7F, codes.view(torch.uint8)),
        (buffer.x_sf, nan, scales),
        (buffer.topk_idx, 10**6, problem.topk_idx),
        (buffer.topk_weights, nan, problem.topk_weights),
    ):
        view.fill_(unused)
        view[:tokens] = rows


def forward(buffer: face.SymmBuffer, problem: Problem, **options: Any) -> Tensor:
    fill(buffer, problem)
    y = torch.full_like(problem.x, float("nan"))
    face.fp8_mega_moe(y, pair(problem.w_gate_up), pair(problem.w_down), buffer, **options)
    return y


def backward(
    buffer: face.SymmBuffer, problem: Problem, dw: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Tensor, ...]:
    """dx, dtopk, dw1, dw2."""
    fill(buffer, problem)
    nan = float("nan")
    dx, dtopk = torch.full_like(problem.x, nan), torch.full_like(problem.topk_weights, nan)
    dw1, dw2 = (torch.full_like(w, nan, dtype=dw) for w in (problem.w_gate_up, problem.w_down))
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    face.fp8_mega_moe_backward(
        dx, dw1, dw2, dtopk, problem.dy, problem.x, l1, turned(l1), turned(l2), buffer, **options
    )
    return dx, dtopk, dw1, dw2


def bytes_taken(call: Callable[[], None]) -> int:
    """Memory of the GPU that a call takes at its peak, besides what was there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def both(buffer: face.SymmBuffer, problem: Problem, **options: Any) -> Gradients:
    y = forward(buffer, problem, **options)
    return Gradients(y, *backward(buffer, problem, **options))
