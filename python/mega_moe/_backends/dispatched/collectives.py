"""The engine `nccl`: all-to-all of torch.distributed, by NCCL for CUDA tensors and by gloo for those on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.dispatched.protocol import DispatchedTokens
from mega_moe._backends.plain.activation import wide
from mega_moe._backends.plain.exchange import all_to_all


class _Route(NamedTuple):
    token: Tensor  # [P]: of each row that this rank sent, by (destination rank, token)
    num_tokens: int
    sent: list[int]  # rows, by destination
    received: list[int]  # rows, by source


class CollectiveDispatcher:
    """Rows arrive in the order (source rank, token); the sums of ranks are added in rank order."""

    def __init__(self, rank: int, num_local_experts: int, group: Any) -> None:
        self._rank, self._num_local, self._group = rank, num_local_experts, group

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sizes: Sequence[Sequence[int]]
    ) -> DispatchedTokens:
        sent, received = list(sizes[self._rank]), [row[self._rank] for row in sizes]
        visits = visited_ranks(topk_idx, len(sizes), self._num_local)
        # The number of pairs is known: nonzero would wait for the device to tell it.
        pairs = torch.argsort(visits.T.reshape(-1).to(torch.uint8), stable=True, descending=True)[: sum(sent)]
        token, rank = pairs % max(len(x), 1), pairs // max(len(x), 1)
        ids = topk_idx[token] - rank[:, None] * self._num_local
        ids = ids.masked_fill((ids < 0) | (ids >= self._num_local), -1).to(torch.int32)
        route = _Route(token, len(x), sent, received)
        return DispatchedTokens(
            self._out(x[token], route), self._out(ids, route), self._out(topk_weights[token], route), route
        )

    def dispatch_again(self, rows: Tensor, route: _Route) -> Tensor:
        return self._out(rows[route.token], route)

    def combine(
        self, rows: Tensor | None, weights: Tensor | None, route: _Route
    ) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if rows is None else self._sum(rows, route),
            None if weights is None else self._sum(weights, route),
        )

    def _out(self, rows: Tensor, route: _Route) -> Tensor:
        return self._travel(rows, route.sent, route.received)

    def _sum(self, rows: Tensor, route: _Route) -> Tensor:
        back = self._travel(rows, route.received, route.sent)
        total = rows.new_zeros(route.num_tokens, rows.shape[1], dtype=wide(rows.dtype))
        # A rank sends one row for a token at most, so no element is added to twice at once.
        for part, token in zip(back.split(route.sent), route.token.split(route.sent)):
            total.index_add_(0, token, part.to(total.dtype))
        return total.to(rows.dtype)

    def _travel(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return all_to_all(rows, sent, received, self._group)


def visited_ranks(topk_idx: Tensor, num_ranks: int, num_local_experts: int) -> Tensor:
    """Global ids ``[T, K]``, -1 for masked -> bool ``[T, R]``: whether the rank holds one of the token's experts."""
    owner = topk_idx.div(num_local_experts, rounding_mode="floor")
    return (owner[:, :, None] == torch.arange(num_ranks, device=owner.device)).any(1)
