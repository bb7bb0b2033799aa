"""Routing tables in plain torch: who receives which row, in chunks of bounded size, in the canonical order.

The routing kernel builds these on the device; here they come from stable sorts, on any device, to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.fused.memory import BLOCK_TOKENS, PAD_ROWS


class Tables(NamedTuple):
    """Everything that a rank knows of a routing. C chunks, E_local experts, M rows, U resident tokens.

    ``chunks [C, 7]``: first token, end token, first slot, padded rows, rows, first resident, residents.
    ``expert_rows``, ``expert_slots``, ``pull_starts``, ``push_starts`` ``[C, E_local]``: an expert's rows, its first
    slot, and its first entry of each list. ``source [M]`` = token | rank << 20 | slot << 25 of each row, in slot order,
    and ``slot [M]`` where it lies. ``slot_list [M]``: slots of the resident tokens, tokens by (token, rank), slots as
    in top-k. ``pull_list [U]`` by (chunk, first local expert, token, rank) and ``push_list [U]`` by last local expert
    hold token | rank << 20 | (rows - 1) << 25 | position in slot_list << 32. ``source`` to ``push_list`` are int64.
    """

    chunks: Tensor
    expert_rows: Tensor
    expert_slots: Tensor
    pull_starts: Tensor
    push_starts: Tensor
    source: Tensor
    slot: Tensor
    slot_list: Tensor
    pull_list: Tensor
    push_list: Tensor
    counts: Tensor  # int32 [3 * E_local + 2]: rows by expert, residents by first and by last expert, rows, residents
    tokens: Tensor  # int32 [R]


def plain_tables(
    ids: Sequence[Tensor], rank: int, num_experts: int, limit: int, most_in_one: int = 0
) -> Tables:
    """Tables of ``rank`` from ``ids``: one ``[T, K]`` integer tensor per rank, -1 for masked slots.

    ``limit``: rows of a chunk at most, unless a single block has more. ``most_in_one``: so many rows in all are one
    chunk, whatever ``limit`` is.
    """
    num_ranks, top_k, device = len(ids), ids[0].shape[1], ids[0].device
    num_local = num_experts // num_ranks
    most = max(len(own) for own in ids)
    # [token, rank, slot], flattened, is the canonical order.
    grid = torch.full((most, num_ranks, top_k), -1, dtype=torch.int64, device=device)
    for r, own in enumerate(ids):
        grid[: len(own), r] = own
    local = grid - rank * num_local
    held = (grid >= 0) & (local >= 0) & (local < num_local)
    token, source_rank, slot = held.nonzero().unbind(1)
    expert = local[held]
    in_chunk = len(token) if len(token) <= most_in_one else limit
    cuts = _cuts(token // BLOCK_TOKENS, (most + BLOCK_TOKENS - 1) // BLOCK_TOKENS, in_chunk)
    num_chunks = len(cuts) - 1
    bounds = torch.tensor(cuts[1:], device=device) * BLOCK_TOKENS

    def chunk_of(tokens: Tensor) -> Tensor:
        return torch.bucketize(tokens, bounds, right=True).clamp(max=num_chunks - 1)

    key = chunk_of(token) * num_local + expert
    rows = torch.bincount(key, minlength=num_chunks * num_local).view(num_chunks, num_local)
    padded = (rows + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS
    rows_before = rows.sum(1).cumsum(0) - rows.sum(1)
    first_slot = (rows_before + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS
    first_slot += torch.arange(num_chunks, device=device) * num_local * PAD_ROWS
    expert_slots = first_slot[:, None] + padded.cumsum(1) - padded
    order = torch.argsort(key, stable=True)
    sorted_key = key[order]
    begins = rows.view(-1).cumsum(0) - rows.view(-1)
    where = expert_slots.view(-1)[sorted_key] + torch.arange(len(order), device=device) - begins[sorted_key]
    slot_list = torch.empty_like(where)
    slot_list[order] = where

    resident_rows = held.sum(2)
    resident = resident_rows > 0
    lowest = local.masked_fill(~held, num_local).amin(2)[resident]
    highest = local.masked_fill(~held, -1).amax(2)[resident]
    resident_token, resident_rank = resident.nonzero().unbind(1)
    count = resident_rows[resident]
    entry = resident_token | resident_rank << 20 | (count - 1) << 25 | (count.cumsum(0) - count) << 32
    resident_chunk = chunk_of(resident_token)
    lists, starts, by_expert = [], [], []
    for end in (lowest, highest):
        resident_key = resident_chunk * num_local + end
        lists.append(entry[torch.argsort(resident_key, stable=True)])
        number = torch.bincount(resident_key, minlength=num_chunks * num_local)
        starts.append((number.cumsum(0) - number).view(num_chunks, num_local))
        by_expert.append(number.view(num_chunks, num_local))
    residents = by_expert[0].sum(1)
    first_token = torch.tensor(cuts[:-1], device=device) * BLOCK_TOKENS
    chunks = torch.stack(
        (
            first_token,
            bounds.clamp(max=most),
            first_slot,
            padded.sum(1),
            rows.sum(1),
            residents.cumsum(0) - residents,
            residents,
        ),
        dim=1,
    )
    totals = torch.stack((rows.sum(), residents.sum()))
    counts = torch.cat((rows.sum(0), by_expert[0].sum(0), by_expert[1].sum(0), totals))
    source = (token | source_rank << 20 | slot << 25)[order]
    return Tables(
        chunks.int(),
        rows.int(),
        expert_slots.int(),
        starts[0].int(),
        starts[1].int(),
        source,
        where,
        slot_list,
        lists[0],
        lists[1],
        counts.int(),
        torch.tensor([len(own) for own in ids], dtype=torch.int32, device=device),
    )


def _cuts(block: Tensor, num_blocks: int, limit: int) -> list[int]:
    """Blocks at which chunks start, and the end: each chunk is the longest run of blocks within ``limit`` rows."""
    cuts, rows = [0], 0
    for index, count in enumerate(torch.bincount(block, minlength=num_blocks).tolist()):
        if rows + count > limit and index > cuts[-1]:
            cuts.append(index)
            rows = 0
        rows += count
    return [*cuts, num_blocks]
