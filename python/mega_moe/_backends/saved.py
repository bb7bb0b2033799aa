"""Gate and up of a call, which the fused forward can save for the backward: how many rows there is room for.

A rank's rows depend on the routing of all ranks, which the host does not know when it allocates. So the room is a
multiple of what a balanced routing gives; the backward computes gate and up again of the rows that lie beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mega_moe._backends.symmetric import Shape
from mega_moe._backends.tables import PAD_ROWS

# Parts that make a share of 1. Whole numbers, so that a compiler with a symbolic number of tokens can follow.
_PARTS = 1024


def check_share(share: float) -> float:
    """``save_gate_up`` of a buffer as a number."""
    if not isinstance(share, (int, float)):
        raise TypeError(f"save_gate_up: got {type(share).__name__}, want a number >= 0")
    if not 0 <= share < math.inf:
        raise ValueError(f"save_gate_up: got {share}, want a number >= 0")
    return float(share)


@dataclass(frozen=True)
class SavedRows:
    """Room for gate and up on one rank, by the tokens of a call."""

    parts: int  # share of a balanced routing's rows, in 1024ths; 0: nothing is saved
    top_k: int
    rows_of_others: int  # at most, of the tokens of the other ranks
    rows_of_chunk: int  # at most
    padding: int  # slots besides the rows of each chunk

    @classmethod
    def of(cls, shape: Shape, share: float) -> SavedRows:
        local = shape.num_local_experts
        own = shape.max_tokens * shape.top_k
        every = own * shape.num_ranks
        limit, _ = shape.chunk_limits()
        return cls(math.ceil(share * _PARTS), shape.top_k, every - own, limit, local * PAD_ROWS)

    @property
    def share(self) -> float:
        return self.parts / _PARTS

    def slots(self, num_tokens: int) -> int:
        """Rows of the tensor, padding included, for a call of ``num_tokens`` on this rank; a multiple of 128.

        At a share of 1 that is every row of a routing that gives this rank ``num_tokens`` top_k rows, and in a group of
        one rank of any routing.
        """
        if self.parts == 0:
            return 0
        own = num_tokens * self.top_k
        rows = min(self.parts * own // _PARTS, own + self.rows_of_others)
        # The rows of two neighbouring chunks exceed what one may hold.
        chunks = 2 * (rows // (self.rows_of_chunk + 1)) + 1
        return -(-rows // PAD_ROWS) * PAD_ROWS + chunks * self.padding
