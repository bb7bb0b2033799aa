"""How many rows of activations the fused kernels keep at once: a pure function, so that memory is known beforehand.

A rank works its rows off in chunks of whole blocks of 128 tokens, and the pools of x, h and o hold the padded rows of a
chunk. The library keeps one set of pools where a chunk can hold every routing, else two: rows that fit into both
together are one chunk, more are chunks that fill the two in turn.
"""

from __future__ import annotations

from mega_moe._backends.request import Request
from mega_moe._backends.tables import BLOCK_TOKENS, PAD_ROWS

# Below that an expert's weights, read once a chunk, cost more than the rows that they serve.
_ROWS_PER_EXPERT = 2048
# Fewer rows than that do not fill a GPU, whatever the number of experts.
_FEWEST_ROWS = 32768


def pool_rows(request: Request) -> int:
    """Padded rows of a chunk, a multiple of 128.

    A balanced routing gives a rank T K rows. A chunk takes half of them and a sixteenth of that more, so that such a
    routing is one chunk in both pools; but not less than 2048 rows an expert, 32768 rows, and one block of 128 tokens
    of every rank, which is never split. Beside them each expert may pad its rows to 128. Where two such pools would
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


def _padded(rows: int) -> int:
    return -(-rows // PAD_ROWS) * PAD_ROWS
