"""The engine `deep_ep`: the buffer of an installed DeepEP 2, bf16 rows over NVLink and RDMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.dispatched.protocol import DispatchedTokens

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class _Route(NamedTuple):
    handle: Any
    num_tokens: int  # T of this rank
    num_received: int  # N
    num_allocated: int  # rows that DeepEP holds for N


class DeepEpDispatcher:
    """DeepEP sizes what it receives for the worst case instead of waiting for the device; the ranks know N already."""

    def __init__(self, module: Any, group: Any, rank: int, request: Request) -> None:
        self._rank, self._request = rank, request
        self._id_dtype = getattr(module, "topk_idx_t", torch.int64)
        # The class was renamed; the calls below are the same.
        buffer = getattr(module, "EPBuffer", None) or module.ElasticBuffer
        self._buffer = buffer(
            group,
            num_max_tokens_per_rank=request.max_tokens_per_rank,
            hidden=request.hidden,
            num_topk=request.top_k,
            deterministic=True,
            allow_multiple_reduction=False,  # one rounding of a sum
        )

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sizes: Sequence[Sequence[int]]
    ) -> DispatchedTokens:
        received, local = sum(row[self._rank] for row in sizes), self._request.num_local_experts
        rows, ids, weights, handle, _ = self._buffer.dispatch(
            some_rows(x),
            topk_idx=some_rows(topk_idx, -1).to(self._id_dtype),
            topk_weights=some_rows(topk_weights),
            num_experts=self._request.num_experts,
            do_cpu_sync=False,
        )
        route = _Route(handle, len(x), received, len(rows))
        ids = ids[:received].masked_fill((ids[:received] < 0) | (ids[:received] >= local), -1)
        return DispatchedTokens(rows[:received], ids, weights[:received], route)

    def dispatch_again(self, rows: Tensor, route: _Route) -> Tensor:
        again, *_ = self._buffer.dispatch(
            some_rows(rows), handle=route.handle, num_experts=self._request.num_experts
        )
        return again[: route.num_received]  # type: ignore[no-any-return]

    def combine(
        self, rows: Tensor | None, weights: Tensor | None, route: _Route
    ) -> tuple[Tensor | None, Tensor | None]:
        def allocated(part: Tensor) -> Tensor:
            whole = part.new_zeros(route.num_allocated, part.shape[1])
            whole[: route.num_received] = part
            return whole

        if rows is None:
            assert weights is not None
            sent = weights.new_zeros(route.num_allocated, self._request.hidden, dtype=torch.bfloat16)
        else:
            sent = allocated(rows)
        x, factors, _ = self._buffer.combine(
            sent, route.handle, topk_weights=None if weights is None else allocated(weights)
        )
        return (
            None if rows is None else x[: route.num_tokens],
            None if weights is None else factors[: route.num_tokens],
        )


def some_rows(rows: Tensor, padding: int = 0) -> Tensor:
    """``rows``, or one of ``padding`` where there are none: an empty tensor has no address. Its token goes nowhere."""
    return rows.contiguous() if len(rows) else rows.new_full((1, *rows.shape[1:]), padding)
