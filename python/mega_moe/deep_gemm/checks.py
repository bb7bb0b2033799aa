"""What every call of this face asks of its arguments; each refusal names argument, got and wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mega_moe._base.errors import BackendRefusedError
from mega_moe._base.types import SCALE_BLOCK
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, check_activation

BF16, FP32, E4M3 = (torch.bfloat16,), (torch.float32,), (torch.float8_e4m3fn,)
_Found = TypeVar("_Found")

_INTERLEAVED = (
    "got False, want True: DeepGEMM's kernels take gate and up rows interleaved by 8, these take them in natural order "
    "[gate; up], so weights that were interleaved elsewhere would give wrong results"
)


def checked(sym_buffer: SymmBuffer, check: Callable[[], _Found]) -> _Found:
    """What ``check`` returns; a fault of this rank ends the other ranks' call too."""
    try:
        return check()
    except (ValueError, TypeError, BackendRefusedError) as error:
        if isinstance(sym_buffer, SymmBuffer) and sym_buffer.buffer is not None:
            sym_buffer.moe._refuse(error)
        raise


def check_call(sym_buffer: Any, mma_type: str, activation: str, shared: tuple[Tensor | None, ...]) -> None:
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


def check_natural(name: str, value: bool) -> None:
    if not value:
        raise ValueError(f"{name}: {_INTERLEAVED}")


def check_weights(buffer: SymmBuffer, l1: Tensor, l2: Tensor) -> None:
    experts, hidden, inner = buffer.moe.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    check_tensor("l1_weights", l1, buffer, BF16, (experts, 2 * inner, hidden))
    check_tensor("l2_weights", l2, buffer, BF16, (experts, hidden, inner))


def check_pair(name: str, pair: Any, buffer: SymmBuffer, rows: int, columns: int) -> None:
    """A quantized weight of every expert of this rank: codes ``[E_local, rows, columns]`` and its scales."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} of them" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise TypeError(f"{name}: got {got}, want a pair of tensors (e4m3 codes, fp32 scales)")
    experts = buffer.moe.num_local_experts
    check_tensor(f"{name}[0]", pair[0], buffer, E4M3, (experts, rows, columns))
    blocks = (experts, rows // SCALE_BLOCK, columns // SCALE_BLOCK)
    check_tensor(f"{name}[1]", pair[1], buffer, FP32, blocks)


def check_stats(stats: Any, buffer: SymmBuffer) -> None:
    if stats is not None:
        shape = (buffer.moe.num_local_experts,)
        check_tensor("cumulative_local_expert_recv_stats", stats, buffer, (torch.int32,), shape)


def check_tokens(name: str, rows: Tensor, buffer: SymmBuffer) -> None:
    if rows.shape[0] > buffer.num_max_tokens_per_rank:
        raise ValueError(
            f"{name}: got {rows.shape[0]} tokens, the buffer was built for {buffer.num_max_tokens_per_rank} per rank"
        )


def check_tensor(
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
