"""The calls, with DeepGEMM's argument order. Every one is collective over the buffer's group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mega_moe.api import moe, route
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, check_activation

_BF16, _FP32 = (torch.bfloat16,), (torch.float32,)
_Weights = TypeVar("_Weights")

_INTERLEAVED = (
    "got False, want True: DeepGEMM's kernels take gate and up rows interleaved by 8, these take them in natural order "
    "[gate; up], so weights that were interleaved elsewhere would give wrong results"
)


def transform_weights_for_mega_moe(
    l1_weights: _Weights, l2_weights: _Weights, activation: str = "swiglu", *, l1_natural_layout: bool = True
) -> tuple[_Weights, _Weights]:
    """The weights as they are: natural ``[gate; up]`` rows are what the calls take."""
    check_activation(activation)
    _check_natural("l1_natural_layout", l1_natural_layout)
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
        _check_call(sym_buffer, "bf16xbf16", activation, (shared_l1_weights, shared_l2_weights))
        _check_natural("l1_natural_layout", l1_natural_layout)
        _check_weights(sym_buffer, l1_weights, l2_weights)
        _tensor("y", y, sym_buffer, _BF16, (None, sym_buffer.hidden))
        _check_tokens("y", y, sym_buffer)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            _tensor(
                "cumulative_local_expert_recv_stats",
                stats,
                sym_buffer,
                (torch.int32,),
                (sym_buffer.moe.num_local_experts,),
            )

    _checked(sym_buffer, check)
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
        _check_call(sym_buffer, "bf16xbf16", activation, shared)
        _check_natural("l1_natural_layout", l1_natural_layout)
        _check_natural("dw_natural_layout", dw_natural_layout)
        _check_weights(sym_buffer, l1_weights, l2_weights)
        _tensor("dy", dy, sym_buffer, _BF16, (None, sym_buffer.hidden))
        _check_tokens("dy", dy, sym_buffer)
        tokens = dy.shape[0]
        _tensor("dx", dx, sym_buffer, _BF16, (tokens, sym_buffer.hidden))
        _tensor("dtopk", dtopk, sym_buffer, _FP32, (tokens, sym_buffer.num_topk))
        _tensor("dw1", dw1, sym_buffer, _BF16 + _FP32, tuple(l1_weights.shape))
        _tensor("dw2", dw2, sym_buffer, _BF16 + _FP32, tuple(l2_weights.shape))
        if activation_clamp is not None and not activation_clamp > 0:
            raise ValueError(f"activation_clamp: got {activation_clamp}, want None or a number > 0")

    _checked(sym_buffer, check)
    x, ids, weights = sym_buffer.staged(dy.shape[0])
    clamp = None if activation_clamp is None else float(activation_clamp)
    call = (x, ids, weights, l1_weights, l2_weights)
    with torch.no_grad():
        # The operator adds with one rounding: into zeros that is what an overwritten gradient holds.
        into = (dw1.zero_(), dw2.zero_())
        made = torch.ops.mega_moe.backward_into(
            dy.contiguous(), *call, *into, sym_buffer.moe.handle, clamp, [True] * 4
        )
        dx.copy_(made[0])
        dtopk.copy_(made[1])


def fp8_mega_moe(
    y: Tensor,
    l1_weights: tuple[Tensor, Tensor],
    l2_weights: tuple[Tensor, Tensor],
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
) -> None:
    """Refused with the reason: no backend reads an x that the caller has quantised."""
    _no_fp8(sym_buffer, "fp8_mega_moe")


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
    """Refused with the reason, as `fp8_mega_moe`."""
    _no_fp8(sym_buffer, "fp8_mega_moe_backward")


def _no_fp8(sym_buffer: SymmBuffer, name: str) -> None:
    from mega_moe._base.errors import BackendRefusedError

    def check() -> None:
        _check_call(sym_buffer, "fp8xfp8", "swiglu", ())
        raise ValueError(
            f"{name}: backend {sym_buffer.moe.backend} quantises by itself and reads no given scales"
        )

    try:
        _checked(sym_buffer, check)
    except ValueError as error:
        if sym_buffer.mma_type != "fp8xfp8":
            raise
        reasons = "; ".join(sym_buffer.moe.explanation.verdict("fused").reasons)
        raise BackendRefusedError(f"{error}{f'; fused: {reasons}' if reasons else ''}") from None


def _checked(sym_buffer: SymmBuffer, check: Callable[[], None]) -> None:
    """Let a fault of this rank end the other ranks' call too."""
    try:
        check()
    except (ValueError, TypeError) as error:
        if isinstance(sym_buffer, SymmBuffer) and sym_buffer.buffer is not None:
            sym_buffer.moe.refuse(error)
        raise


def _check_call(sym_buffer: Any, mma_type: str, activation: str, shared: tuple[Tensor | None, ...]) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        raise TypeError(
            f"sym_buffer: got {type(sym_buffer).__name__}, want what get_symm_buffer_for_mega_moe of mega_moe returns"
        )
    sym_buffer.staged(0)
    if sym_buffer.mma_type != mma_type:
        raise ValueError(f"sym_buffer: its mma_type is {sym_buffer.mma_type}, this call wants {mma_type}")
    check_activation(activation)
    if any(tensor is not None for tensor in shared):
        raise ValueError("shared weights: got a tensor, want None: shared experts are no part of this layer")


def _check_natural(name: str, value: bool) -> None:
    if not value:
        raise ValueError(f"{name}: {_INTERLEAVED}")


def _check_weights(buffer: SymmBuffer, l1: Tensor, l2: Tensor) -> None:
    experts, hidden, inner = buffer.moe.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    _tensor("l1_weights", l1, buffer, _BF16, (experts, 2 * inner, hidden))
    _tensor("l2_weights", l2, buffer, _BF16, (experts, hidden, inner))


def _check_tokens(name: str, rows: Tensor, buffer: SymmBuffer) -> None:
    if rows.shape[0] > buffer.num_max_tokens_per_rank:
        raise ValueError(
            f"{name}: got {rows.shape[0]} tokens, the buffer was built for {buffer.num_max_tokens_per_rank} per rank"
        )


def _tensor(
    name: str, value: Any, buffer: SymmBuffer, dtypes: tuple[torch.dtype, ...], want: tuple[int | None, ...]
) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want a Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got {value.dtype}, want {' or '.join(map(str, dtypes))}")
    if value.device != buffer.moe.device:
        raise ValueError(f"{name}: got a tensor on {value.device}, the buffer is on {buffer.moe.device}")
    got = tuple(value.shape)
    if len(got) != len(want) or any(w is not None and g != w for g, w in zip(got, want)):
        shown = ", ".join("T" if w is None else str(w) for w in want)
        raise ValueError(f"{name}: got shape {got}, want ({shown})")
