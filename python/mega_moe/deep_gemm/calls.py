"""The calls in bf16, with DeepGEMM's argument order. Every one is collective over the buffer's group."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from mega_moe._base.activation import as_activation
from mega_moe.api import moe, route
from mega_moe.deep_gemm.checks import (
    BF16,
    FP32,
    check_call,
    check_natural,
    check_stats,
    check_tensor,
    check_tokens,
    check_weights,
    checked,
)
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, check_activation

_Weights = TypeVar("_Weights")


def transform_weights_for_mega_moe(
    l1_weights: _Weights, l2_weights: _Weights, activation: str = "swiglu", *, l1_natural_layout: bool = True
) -> tuple[_Weights, _Weights]:
    """The weights as they are: natural ``[gate; up]`` rows are what the calls take."""
    check_activation(activation)
    check_natural("l1_natural_layout", l1_natural_layout)
    return l1_weights, l2_weights


def transform_weights_for_mega_moe_sm90(
    l1_weights: _Weights, l2_weights: _Weights, activation: str = "swiglu", *, l1_natural_layout: bool = True
) -> tuple[_Weights, _Weights]:
    """As `transform_weights_for_mega_moe`."""
    return transform_weights_for_mega_moe(
        l1_weights, l2_weights, activation, l1_natural_layout=l1_natural_layout
    )


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
        y: overwritten; its number of rows is T.
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

    def check() -> None:
        check_call(sym_buffer, "bf16xbf16", activation, (shared_l1_weights, shared_l2_weights))
        check_natural("l1_natural_layout", l1_natural_layout)
        check_weights(sym_buffer, l1_weights, l2_weights)
        check_tensor("y", y, sym_buffer, BF16, (None, sym_buffer.hidden))
        check_tokens("y", y, sym_buffer)
        check_stats(cumulative_local_expert_recv_stats, sym_buffer)

    checked(sym_buffer, check)
    x, ids, weights = sym_buffer.staged(y.shape[0])
    with torch.no_grad():
        y.copy_(
            moe(
                x,
                ids,
                weights,
                l1_weights,
                l2_weights,
                buffer=sym_buffer.moe,
                activation_clamp=activation_clamp,
            )
        )
        # Counting is collective and the argument is each rank's own: with several ranks all of them count.
        if cumulative_local_expert_recv_stats is not None or sym_buffer.moe.num_ranks > 1:
            counts = route(ids, buffer=sym_buffer.moe).tokens_per_expert
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)


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
    shared = (shared_l1_weights, shared_l2_weights, shared_dw1_weights, shared_dw2_weights)

    def check() -> None:
        check_call(sym_buffer, "bf16xbf16", activation, shared)
        check_natural("l1_natural_layout", l1_natural_layout)
        check_natural("dw_natural_layout", dw_natural_layout)
        check_weights(sym_buffer, l1_weights, l2_weights)
        check_tensor("dy", dy, sym_buffer, BF16, (None, sym_buffer.hidden))
        check_tokens("dy", dy, sym_buffer)
        tokens = dy.shape[0]
        check_tensor("dx", dx, sym_buffer, BF16, (tokens, sym_buffer.hidden))
        check_tensor("dtopk", dtopk, sym_buffer, FP32, (tokens, sym_buffer.num_topk))
        check_tensor("dw1", dw1, sym_buffer, BF16 + FP32, tuple(l1_weights.shape))
        check_tensor("dw2", dw2, sym_buffer, BF16 + FP32, tuple(l2_weights.shape))
        as_activation(None, activation_clamp)

    checked(sym_buffer, check)
    x, ids, weights = sym_buffer.staged(dy.shape[0])
    act = as_activation(None, activation_clamp)
    call = (x, ids, weights, l1_weights, l2_weights)
    with torch.no_grad():
        # The operator adds with one rounding: into zeros that is what an overwritten gradient holds.
        into = (dw1.zero_(), dw2.zero_())
        made = torch.ops.mega_moe.backward_into(
            dy.contiguous(), *call, *into, sym_buffer.moe._live().handle, *act.arguments(), [True] * 4, None
        )
        dx.copy_(made[0])
        dtopk.copy_(made[1])
