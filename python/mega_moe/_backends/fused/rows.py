"""How many rows of activations the fused kernels hold, known before any call.

Chunks: a rank works its rows off in chunks of whole blocks of 128 tokens, and the pools of x, h and o hold the padded
rows of a chunk. The library keeps one set of pools where a chunk can hold every routing, else two as a double buffer:
rows that fit into both together are one chunk, more are chunks that alternate between the two.

Saved gate and up: a rank's rows depend on the routing of all ranks, which the host does not know when it allocates. So
the room is a multiple of what a balanced routing gives; the backward recomputes gate and up of the rows beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_moe._backends.fused.memory import BLOCK_TOKENS, PAD_ROWS, Shape

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request

# Below that an expert's weights, read once a chunk, cost more than the rows that they serve.
_ROWS_PER_EXPERT = 2048
# Fewer rows than that do not fill a GPU, whatever the number of experts.
_FEWEST_ROWS = 32768
# Parts that make a share of 1. Whole numbers, so that a compiler with a symbolic number of tokens can follow.
_PARTS = 1024


def pool_rows(request: Request) -> int:
    """Padded rows of a chunk, a multiple of 128.

    A balanced routing gives a rank T K rows. A chunk takes half of them and a sixteenth of that more, so that such a
    routing is one chunk in both pools; but not less than 2048 rows an expert, 32768 rows, and one block of 128 tokens
    of every rank, which is never split. Besides, each expert may pad its rows to 128. Where two such pools would
    hold all rows that can come, there is one that does.
    """
    tokens, slots, ranks = request.max_tokens_per_rank, request.top_k, request.num_ranks
    local = request.num_local_experts
    half = -(-17 * tokens * slots // 32)
    # Pools of no more than one block would not be joined.
    block = min(tokens, BLOCK_TOKENS) * ranks * slots + PAD_ROWS
    rows = max(half, _ROWS_PER_EXPERT * local, _FEWEST_ROWS, block) + PAD_ROWS * local
    every = largest_pool_rows(request)
    return every if 2 * rows >= every else _padded(rows)


def largest_pool_rows(request: Request) -> int:
    """Padded rows of a chunk that holds every routing."""
    every = request.max_tokens_per_rank * request.num_ranks * request.top_k
    return _padded(every + (PAD_ROWS - 1) * request.num_local_experts)


def expert_pool_rows(request: Request, tokens: int) -> int:
    """`pool_rows` of the same routing, for experts at EP=1 that take up to ``tokens`` tokens of all ranks in a call."""
    every = tokens * request.top_k + (PAD_ROWS - 1) * request.num_local_experts
    return min(pool_rows(request), _padded(every))


def _padded(rows: int) -> int:
    return -(-rows // PAD_ROWS) * PAD_ROWS


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

    parts: int = 0  # share of a balanced routing's rows, in 1024ths; 0: nothing is saved
    top_k: int = 0
    rows_of_others: int = 0  # at most, of the tokens of the other ranks
    rows_of_chunk: int = 0  # at most
    padding: int = 0  # slots besides the rows of each chunk

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
