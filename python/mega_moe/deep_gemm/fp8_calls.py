"""The calls in fp8, with DeepGEMM's argument order. Every one is collective over the buffer's group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mega_moe._backends.fused.prequantized import PrequantizedLayer, QuantizedWeight
from mega_moe._backends.routing import add_received
from mega_moe._base.activation import as_activation
from mega_moe._base.errors import BackendRefusedError
from mega_moe._base.types import positive_int
from mega_moe.deep_gemm.checks import (
    BF16,
    check_call,
    check_pair,
    check_results,
    check_rows,
    check_stats,
    check_tensor,
    refusing,
)
from mega_moe.deep_gemm.symm_buffer import SymmBuffer

# Rows, columns and contraction that share a scale: those of x, and both of a weight.
_RECIPE = (128, 128, 128)


def fp8_mega_moe(
    y: Tensor,
    l1_weights: tuple[Tensor, Tensor],
    l2_weights: tuple[Tensor, Tensor],
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
    *,
    shared_l1_weights: None = None,
    shared_l2_weights: None = None,
) -> None:
    """Writes y ``[T, H]`` bf16 from the first T rows of the buffer, whose x is e4m3 with scales alongside it.

    Args:
        y: overwritten; its number of rows is T. How it is written: see `bf16_mega_moe_backward`.
        l1_weights: e4m3 codes ``[E_local, 2I, H]``, I gate rows then I up rows, and fp32 scales
            ``[E_local, 2I / 128, H / 128]``.
        l2_weights: e4m3 codes ``[E_local, H, I]`` and fp32 scales ``[E_local, H / 128, I / 128]``.
        sym_buffer: of mma_type fp8xfp8, with x, x_sf, topk_idx and topk_weights filled: an element of x is its code
            times the scale of its 128.
        cumulative_local_expert_recv_stats: int32 ``[E_local]``, to which the rows that each expert got are added.
        recipe: refused unless (128, 128, 128).
        activation_clamp: see `mega_moe.moe`.
        fast_math: no effect; results do not depend on it.
        num_tokens_bound: at least T; no effect besides, as the kernel is the same for any T.
        shared_l1_weights, shared_l2_weights: refused unless None.

    Raises:
        BackendRefusedError: the backend of the buffer is not ``fused``, with every reason.
        ValueError, TypeError: a bad argument on this rank, before anything runs. On the other ranks y is then NaN, and
            their next call or ``sym_buffer.moe.check()`` raises PeerError.
    """

    with refusing(sym_buffer):
        check_call(sym_buffer, "fp8xfp8", activation, shared_l1_weights, shared_l2_weights)
        given = _prequantized(sym_buffer, "fp8_mega_moe")
        _check_recipe(recipe)
        hidden, inner = sym_buffer.hidden, sym_buffer.intermediate_hidden
        check_pair("l1_weights", l1_weights, sym_buffer, 2 * inner, hidden)
        check_pair("l2_weights", l2_weights, sym_buffer, hidden, inner)
        check_rows("y", y, sym_buffer)
        _check_bound(num_tokens_bound, y.shape[0])
        check_stats(cumulative_local_expert_recv_stats, sym_buffer)
        act = as_activation(None, activation_clamp)
        _, ids, weights = sym_buffer.staged(y.shape[0])
    with torch.no_grad():
        l1, l2 = QuantizedWeight(*l1_weights), QuantizedWeight(*l2_weights)
        _, routing = given.forward(ids, weights, l1, l2, act, y)
        if cumulative_local_expert_recv_stats is not None:
            add_received(routing, cumulative_local_expert_recv_stats)
    increment_version(y)


def fp8_mega_moe_backward(
    dx: Tensor,
    dw1: Tensor,
    dw2: Tensor,
    dtopk: Tensor,
    dy: Tensor,
    x: Tensor,
    l1: tuple[Tensor, Tensor],
    l1_t: tuple[Tensor, Tensor],
    l2_t: tuple[Tensor, Tensor],
    sym_buffer: SymmBuffer,
    activation_clamp: float | None = None,
) -> None:
    """Overwrites all four gradients of the call whose ids and weights are in the buffer.

    x and dy come in bf16, since the weights' gradients read them so, and are quantized by the kernel. The call leaves
    nothing of use in the buffer's x and x_sf. How results are written: see `bf16_mega_moe_backward`.

    Args:
        dx: ``[T, H]`` bf16.
        dw1: ``[E_local, 2I, H]`` bf16 or fp32, the sum over the tokens of all ranks, gate rows first.
        dw2: ``[E_local, H, I]`` bf16 or fp32.
        dtopk: ``[T, K]`` fp32.
        dy, x: ``[T, H]`` bf16.
        l1: as l1_weights of `fp8_mega_moe`.
        l1_t: the same with rows and columns exchanged: codes ``[E_local, H, 2I]``, scales ``[E_local, H / 128,
            2I / 128]``. A scale that is not the one of l1 makes the results NaN.
        l2_t: l2_weights of `fp8_mega_moe` likewise: codes ``[E_local, I, H]``, scales ``[E_local, I / 128, H / 128]``.
        sym_buffer: with topk_idx and topk_weights filled.
        activation_clamp: as in the forward call.

    Raises:
        BackendRefusedError, ValueError, TypeError: as `fp8_mega_moe`. On the other ranks dx and dtopk are then NaN, dw1
            and dw2 of no use.
    """

    with refusing(sym_buffer):
        check_call(sym_buffer, "fp8xfp8", "swiglu")
        given = _prequantized(sym_buffer, "fp8_mega_moe_backward")
        hidden, inner = sym_buffer.hidden, sym_buffer.intermediate_hidden
        check_pair("l1", l1, sym_buffer, 2 * inner, hidden)
        check_pair("l1_t", l1_t, sym_buffer, hidden, 2 * inner)
        check_pair("l2_t", l2_t, sym_buffer, inner, hidden)
        check_results(sym_buffer, dy, dx, dtopk, dw1, dw2)
        check_tensor("x", x, sym_buffer, BF16, (dy.shape[0], hidden))
        act = as_activation(None, activation_clamp)
        _, ids, weights = sym_buffer.staged(dy.shape[0])
    with torch.no_grad():
        copies = QuantizedWeight(*l1), QuantizedWeight(*l1_t), QuantizedWeight(*l2_t)
        given.backward(dy, x, ids, weights, *copies, act, (dx, dtopk, dw1, dw2))
    increment_version((dx, dtopk, dw1, dw2))


def _prequantized(sym_buffer: SymmBuffer, name: str) -> PrequantizedLayer:
    given = sym_buffer.moe._live().prequantized
    if given is None:
        refused = f"{name}: backend {sym_buffer.moe.backend} quantizes by itself and reads no given scales"
        reasons = "; ".join(sym_buffer.moe.explanation.verdict("fused").reasons)
        raise BackendRefusedError(f"{refused}{f'; fused: {reasons}' if reasons else ''}")
    return given


def _check_recipe(recipe: Any) -> None:
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) != _RECIPE:
        raise ValueError(
            f"recipe: got {recipe!r}, want {_RECIPE}: scales of 1 x 128 of x and of 128 x 128 of the weights"
        )


def _check_bound(bound: Any, tokens: int) -> None:
    if bound is not None and positive_int("num_tokens_bound", bound, zero=True) < tokens:
        raise ValueError(f"num_tokens_bound: got {bound}, want at least the {tokens} tokens of y")
