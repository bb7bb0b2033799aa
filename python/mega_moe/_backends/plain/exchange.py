"""Rows between the ranks: who receives which, in the canonical order by (expert, token, source rank, slot)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mega_moe._base.errors import PeerError


class SendPlan(NamedTuple):
    """Rows this rank sends, ordered by (expert, token, slot), hence by destination rank.

    ``pair [P]`` = token * k + slot of each row; ``splits`` = rows per destination rank.
    """

    pair: Tensor
    splits: list[int]


class ReceivePlan(NamedTuple):
    """Rows this rank receives: ``order [M]`` sorts them from arrival to canonical order, None where they are sorted.

    ``counts`` rows per local expert, ``splits`` rows per source rank.
    """

    order: Tensor | None
    counts: list[int]
    splits: list[int]


def send_plan(topk_idx: Tensor, counts: Tensor, rank: int) -> SendPlan:
    """``topk_idx [T, K]`` with -1 for masked slots; ``counts [R, E]`` (CPU) rows of every rank for every expert."""
    flat = topk_idx.reshape(-1)
    # Masked slots sort before expert 0 and are cut off; the stable sort leaves (token, slot) order inside an expert.
    order = torch.argsort(flat, stable=True)
    num_ranks = counts.shape[0]
    splits = counts[rank].view(num_ranks, -1).sum(1).tolist()
    return SendPlan(order[flat.numel() - sum(splits) :], splits)


def receive_plan(tokens: Tensor, counts: Tensor, rank: int) -> ReceivePlan:
    """``tokens [M]``: source token of each arrived row; arrival order is (source rank, expert, token, slot)."""
    num_ranks = counts.shape[0]
    mine = counts.view(num_ranks, num_ranks, -1)[:, rank]
    if num_ranks == 1:
        return ReceivePlan(None, mine[0].tolist(), [tokens.numel()])
    num_local = mine.shape[1]
    # Built on the CPU, where the counts are: repeat_interleave with counts on the device would synchronize again.
    expert = torch.arange(num_local, device="cpu").repeat(num_ranks).repeat_interleave(mine.reshape(-1))
    key = expert.to(tokens.device, non_blocking=True) * (1 << 32) + tokens
    return ReceivePlan(torch.argsort(key, stable=True), mine.sum(0).tolist(), mine.sum(1).tolist())


def inverse(order: Tensor | None) -> Tensor | None:
    """The permutation that undoes ``order``."""
    if order is None:
        return None
    result = torch.empty_like(order)
    result[order] = torch.arange(order.numel(), device=order.device)
    return result


def take(rows: Tensor, order: Tensor | None) -> Tensor:
    """``rows[order]``; None leaves them as they are."""
    if order is None:
        return rows
    # Indexing has no kernel for e4m3 on every device; bytes do.
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8)[order].view(rows.dtype)
    return rows[order]


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Rows ``[sum(sent), ...]`` grouped by destination -> rows ``[sum(received), ...]`` grouped by source.

    By NCCL for CUDA tensors, gloo for CPU tensors; without a ``group`` what is sent is what arrives.
    """
    if group is None:
        return rows
    rows = rows.contiguous()
    out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    # As bytes: gloo has no bf16 or e4m3 all-to-all. No view with -1: a rank may have no rows.
    into, wire = (t.flatten(1).view(torch.uint8) if t.dim() > 1 else t for t in (out, rows))
    try:
        dist.all_to_all_single(into, wire, received, sent, group=group)
    except RuntimeError as error:
        # All ranks had agreed on the call, so one of them died or failed in the middle of it.
        raise PeerError(
            f"rank {dist.get_rank(group)}: rows from or to the other ranks did not arrive: {error}"
        ) from error
    return out
