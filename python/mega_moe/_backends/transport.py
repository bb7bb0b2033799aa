"""Rows between the ranks of a group, with the splits that the routing tables give."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mega_moe._base.errors import PeerError


class Transport(Protocol):
    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows ``[sum(sent), ...]`` grouped by destination -> rows ``[sum(received), ...]`` grouped by source."""
        ...


class LocalTransport:
    """One rank: what is sent is what arrives."""

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows


class GroupTransport:
    """One all-to-all of ``group`` (NCCL for CUDA tensors, gloo for CPU tensors)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        # As bytes: gloo has no bf16 or e4m3 all-to-all. No view with -1: a rank may have no rows.
        into, wire = (t.flatten(1).view(torch.uint8) if t.dim() > 1 else t for t in (out, rows))
        try:
            dist.all_to_all_single(into, wire, received, sent, group=self._group)
        except RuntimeError as error:
            # All ranks had agreed on the call, so one of them died or failed in the middle of it.
            rank = dist.get_rank(self._group)
            raise PeerError(
                f"rank {rank}: rows from or to the other ranks did not arrive: {error}"
            ) from error
        return out
