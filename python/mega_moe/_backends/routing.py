"""What `mega_moe.route` returns for one call, as views of the int32 tensor that a launch fills."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Load statistics of one call, int32 on the buffer's device. E_local experts of this rank, R ranks.

    A call that could not be served holds -1 everywhere and a ``status`` that is not 0; a call with an expert id out of
    range has a status too, and counts without that slot.
    """

    tokens_per_expert: Tensor
    """``[E_local]``: rows that each local expert gets from all ranks."""
    tokens_per_rank: Tensor
    """``[R]``: tokens of each rank in this call."""
    residents_by_first: Tensor
    """``[E_local]``: tokens, each with one of its experts here, by the lowest: what arrives for it."""
    residents_by_last: Tensor
    """``[E_local]``: the same by the highest: what leaves after it."""
    num_rows: Tensor
    """``[]``: sum of tokens_per_expert."""
    num_residents: Tensor
    """``[]``: tokens that have an expert here; what travels, since a token travels once to a rank."""
    num_chunks: Tensor
    """``[]``: chunks of rows that the call is split into."""
    status: Tensor
    """``[]``: 0, or the kind of fault that the next call or ``buffer.check()`` raises."""


def routing_of(summary: Tensor, num_ranks: int, num_local: int) -> Routing:
    """Views of ``summary``: status, chunks, tokens by rank, rows, residents by first and by last, rows, residents."""
    head, tokens, rows, first, last, totals = summary.split(
        [2, num_ranks, num_local, num_local, num_local, 2]
    )
    return Routing(rows, tokens, first, last, totals[0], totals[1], head[1], head[0])


def add_received(routing: Routing, received: Tensor) -> None:
    """Adds the rows of each local expert to ``received [E_local]``; nothing where the call was not served."""
    received.add_(routing.tokens_per_expert.clamp_min(0))


def new_summary(num_ranks: int, num_local: int, device: torch.device) -> Tensor:
    """What a launch fills, not initialized."""
    return torch.empty(2 + num_ranks + 3 * num_local + 2, dtype=torch.int32, device=device)
