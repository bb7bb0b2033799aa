"""The calls in bf16, with DeepGEMM's argument order. Every one is collective over the buffer's group."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from mega_moe._base.activation import as_activation
from mega_moe._ops import flops
from mega_moe.deep_gemm.checks import (
    BF16,
    check_call,
    check_natural,
    check_results,
    check_rows,
    check_shared,
    check_stats,
    check_tensor,
    refusing,
)
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, check_activation

_Weights = TypeVar("_Weights")


def transform_weights_for_mega_moe(
    l1_weights: _Weights, l2_weights: _Weights, activation: str = "swiglu", *, l1_natural_layout: bool = True
) -> tuple[_Weights, _Weights]:
    """The weights as they are: natural ``[gate; up]`` rows are what the calls take."""
    check_activation(activation)
    check_natural(l1_natural_layout=l1_natural_layout)
    return l1_weights, l2_weights


def transform_weights_for_mega_moe_sm90(
    l1_weights: _Weights,
    l2_weights: _Weights,
    shared_l1_weights: None = None,
    shared_l2_weights: None = None,
    *,
    l1_natural_layout: bool = True,
) -> tuple[_Weights, _Weights]:
    """As `transform_weights_for_mega_moe`; shared weights are refused."""
    check_shared(shared_l1_weights, shared_l2_weights)
    return transform_weights_for_mega_moe(l1_weights, l2_weights, l1_natural_layout=l1_natural_layout)


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    l1_natural_layout: bool = True,
) -> None:
    """Writes y ``[T, H]`` bf16 from the first T rows of the buffer.

    Args:
        y: overwritten; its number of rows is T. How it is written: see `bf16_mega_moe_backward`.
        l1_weights: ``[E_local, 2I, H]`` bf16, I gate rows then I up rows.
        l2_weights: ``[E_local, H, I]`` bf16.
        sym_buffer: with x, topk_idx and topk_weights filled.
        shared_l1_weights, shared_l2_weights: refused unless None.
        cumulative_local_expert_recv_stats: int32 ``[E_local]``, to which the rows that each expert got are added.
        activation_clamp: see `mega_moe.moe`.
        fast_math: no effect; results do not depend on it.
        l1_natural_layout: False is refused.

    Raises:
        ValueError, TypeError: a bad argument on this rank, before anything runs; the other ranks raise PeerError.
    """
    with refusing(sym_buffer):
        check_call(sym_buffer, "bf16xbf16", activation, shared_l1_weights, shared_l2_weights)
        check_natural(l1_natural_layout=l1_natural_layout)
        _check_weights(sym_buffer, l1_weights, l2_weights)
        check_rows("y", y, sym_buffer)
        check_stats(cumulative_local_expert_recv_stats, sym_buffer)
        act = as_activation(None, activation_clamp)
        inputs = (*sym_buffer.staged(y.shape[0]), l1_weights, l2_weights)
    if not torch.compiler.is_compiling():
        flops.register()
    with torch.no_grad():
        torch.ops.mega_moe.run_out(
            *inputs, y, cumulative_local_expert_recv_stats, sym_buffer.moe._live().handle, *act.arguments()
        )


def bf16_mega_moe_backward(
    dx: Tensor,
    dw1: Tensor,
    dw2: Tensor,
    dtopk: Tensor,
    dy: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    shared_dw1_weights: Tensor | None = None,
    shared_dw2_weights: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    dw_natural_layout: bool = True,
    *,
    l1_natural_layout: bool = True,
) -> None:
    """Overwrites all four gradients of the call whose x, ids and weights are staged in the buffer again.

    The fused kernels write straight into the caller's tensors. One that is not contiguous, not aligned to 16 bytes or
    in the memory of an operand, and the bf16 one of dw1 and dw2 where the other is fp32, is copied from temporary
    memory instead.

    Args:
        dx: ``[T, H]`` bf16.
        dw1, dw2: as the weights, bf16 or fp32: sums over the tokens of all ranks, in natural row order.
        dtopk: ``[T, K]`` fp32.
        dy: ``[T, H]`` bf16.
        l1_weights, l2_weights, sym_buffer, activation_clamp: as in the forward call.
        shared_l1_weights, shared_l2_weights, shared_dw1_weights, shared_dw2_weights: refused unless None.
        fast_math: no effect.
        dw_natural_layout, l1_natural_layout: False is refused.

    Raises:
        ValueError, TypeError: a bad argument on this rank, before anything runs. On the other ranks dx and dtopk are
            then NaN, dw1 and dw2 of no use, and their next call or ``sym_buffer.moe.check()`` raises PeerError.
    """
    with refusing(sym_buffer):
        shared = shared_l1_weights, shared_l2_weights, shared_dw1_weights, shared_dw2_weights
        check_call(sym_buffer, "bf16xbf16", activation, *shared)
        check_natural(l1_natural_layout=l1_natural_layout, dw_natural_layout=dw_natural_layout)
        _check_weights(sym_buffer, l1_weights, l2_weights)
        check_results(sym_buffer, dy, dx, dtopk, dw1, dw2)
        act = as_activation(None, activation_clamp)
        inputs = (*sym_buffer.staged(dy.shape[0]), l1_weights, l2_weights)
    if not torch.compiler.is_compiling():
        flops.register()
    with torch.no_grad():
        torch.ops.mega_moe.backward_out(
            dy.contiguous(), *inputs, dx, dtopk, dw1, dw2, sym_buffer.moe._live().handle, *act.arguments()
        )


def _check_weights(buffer: SymmBuffer, l1: Tensor, l2: Tensor) -> None:
    experts, hidden, inner = buffer.moe.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    check_tensor("l1_weights", l1, buffer, BF16, (experts, 2 * inner, hidden))
    check_tensor("l2_weights", l2, buffer, BF16, (experts, hidden, inner))
