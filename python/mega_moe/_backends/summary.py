"""What a launch reports of the routing that it worked off: load statistics, as views of one int32 tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORDS = 2  # before the tokens of each rank: status, chunks


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
    """``[]``: pieces in which the call is worked off."""
    status: Tensor
    """``[]``: 0, or the kind of fault that the next call or ``buffer.check()`` raises."""


def routing_of(summary: Tensor, num_ranks: int, num_local: int) -> Routing:
    """Views of what a launch reports."""
    status, chunks = summary[0], summary[1]
    tokens, first, last, totals = (
        summary[_WORDS : _WORDS + num_ranks],
        _WORDS + num_ranks + num_local,
        _WORDS + num_ranks + 2 * num_local,
        _WORDS + num_ranks + 3 * num_local,
    )
    return Routing(
        summary[_WORDS + num_ranks : first],
        tokens,
        summary[first:last],
        summary[last:totals],
        summary[totals],
        summary[totals + 1],
        chunks,
        status,
    )


def new_summary(num_ranks: int, num_local: int, device: torch.device) -> Tensor:
    """What a launch fills, not initialised."""
    return torch.empty(_WORDS + num_ranks + 3 * num_local + 2, dtype=torch.int32, device=device)
