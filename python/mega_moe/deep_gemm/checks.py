"""What every call of this face asks of its arguments; each refusal names argument, got and wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mega_moe._base.errors import BackendRefusedError
from mega_moe._base.types import SCALE_BLOCK
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, check_activation

BF16, FP32, E4M3 = (torch.bfloat16,), (torch.float32,), (torch.float8_e4m3fn,)

_INTERLEAVED = (
    "got False, want True: DeepGEMM's kernels take gate and up rows interleaved by 8, these take them in natural order "
    "[gate; up], so weights that were interleaved elsewhere would give wrong results"
)


@contextlib.contextmanager
def refusing(sym_buffer: Any) -> Iterator[None]:
    """Around the checks of a call: a fault of this rank ends the other ranks' call too."""
    try:
        yield
    except (ValueError, TypeError, BackendRefusedError) as error:
        if isinstance(sym_buffer, SymmBuffer) and sym_buffer.buffer is not None:
            sym_buffer.moe._refuse(error)
        raise


def check_call(sym_buffer: Any, mma_type: str, activation: str, *shared: Any) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        raise TypeError(
            f"sym_buffer: got {type(sym_buffer).__name__}, want what get_symm_buffer_for_mega_moe of mega_moe returns"
        )
    if sym_buffer.mma_type != mma_type:
        raise ValueError(f"sym_buffer: its mma_type is {sym_buffer.mma_type}, this call wants {mma_type}")
    check_activation(activation)
    check_shared(*shared)


def check_shared(*shared: Any) -> None:
    names = "shared_l1_weights", "shared_l2_weights", "shared_dw1_weights", "shared_dw2_weights"
    for name, value in zip(names, shared):
        if value is not None:
            raise ValueError(
                f"{name}: got {type(value).__name__}, want None: shared experts are no part of this layer, compute "
                "them alongside it"
            )


def check_natural(**natural: bool) -> None:
    for name, value in natural.items():
        if not value:
            raise ValueError(f"{name}: {_INTERLEAVED}")


def check_results(
    buffer: SymmBuffer, dy: Tensor, dx: Tensor, dtopk: Tensor, dw1: Tensor, dw2: Tensor
) -> None:
    """Those of a backward, and dy, which gives T."""
    experts, hidden, inner = buffer.moe.num_local_experts, buffer.hidden, buffer.intermediate_hidden
    check_rows("dy", dy, buffer)
    tokens = dy.shape[0]
    check_tensor("dx", dx, buffer, BF16, (tokens, hidden))
    check_tensor("dtopk", dtopk, buffer, FP32, (tokens, buffer.num_topk))
    check_tensor("dw1", dw1, buffer, BF16 + FP32, (experts, 2 * inner, hidden))
    check_tensor("dw2", dw2, buffer, BF16 + FP32, (experts, hidden, inner))


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


def check_rows(name: str, rows: Tensor, buffer: SymmBuffer) -> None:
    """bf16 ``[T, H]``, T within the buffer's capacity."""
    check_tensor(name, rows, buffer, BF16, (None, buffer.hidden))
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
    got = value.shape
    if len(got) != len(want) or any(w is not None and g != w for g, w in zip(got, want)):
        shown = ", ".join("T" if w is None else str(w) for w in want)
        raise ValueError(f"{name}: got shape {tuple(got)}, want ({shown})")
