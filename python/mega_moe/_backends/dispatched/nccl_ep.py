"""The engine `nccl_ep`: NCCL EP's high-throughput kernels in their flat layout, of an installed nccl-extensions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.dispatched.deep_ep import some_rows
from mega_moe._backends.dispatched.protocol import DispatchedTokens

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class _Route(NamedTuple):
    num_tokens: int  # T of this rank
    num_rows: int  # N, 1 where it is 0
    keep: Tensor  # ids that the handle was made from


class NcclEpDispatcher:
    """Outputs are as large as the ranks have agreed, by NCCL EP's eager mode, without a wait for the device."""

    def __init__(self, ep: Any, comm: Any, rank: int, request: Request) -> None:
        self._ep, self._rank, self._request = ep, rank, request
        self._group = ep.Group.create(
            comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT,
                num_experts=request.num_experts,
                max_dispatch_tokens_per_rank=request.max_tokens_per_rank,
                max_token_bytes=2 * request.hidden,
            ),
        )
        self._live = [self._group]  # what is destroyed with this object, the last first
        weakref.finalize(self, _destroy, self._live)

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sizes: Sequence[Sequence[int]]
    ) -> DispatchedTokens:
        ep, top_k = self._ep, topk_idx.shape[1]
        # Where nothing comes one row of padding is left as it is made here.
        num_rows = max(1, sum(row[self._rank] for row in sizes))
        routed = some_rows(topk_idx, -1)
        layout = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
        if len(self._live) == 1:
            made = self._group.create_handle(
                ep.Layout.FLAT, ep.Tensor(routed), layout_info=layout, stream=_stream(x)
            )
            self._live.append(made)
        else:
            self._live[-1].update(ep.Tensor(routed), layout_info=layout, stream=_stream(x))
        rows = x.new_empty(num_rows, x.shape[1])
        ids, weights = topk_idx.new_full((num_rows, top_k), -1), topk_weights.new_empty(num_rows, top_k)
        self._live[-1].dispatch(
            ep.DispatchInputs(
                tokens=ep.Tensor(some_rows(x)), topk_weights=ep.Tensor(some_rows(topk_weights))
            ),
            ep.DispatchOutputs(
                tokens=ep.Tensor(rows), topk_weights=ep.Tensor(weights), topk_idx=ep.Tensor(ids)
            ),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.FWD),
            stream=_stream(x),
        )
        return DispatchedTokens(rows, ids, weights, _Route(len(x), num_rows, routed))

    def dispatch_again(self, rows: Tensor, route: _Route) -> Tensor:
        ep = self._ep
        again = rows.new_empty(route.num_rows, rows.shape[1])
        self._live[-1].dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(some_rows(rows))),
            ep.DispatchOutputs(tokens=ep.Tensor(again)),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=_stream(rows),
        )
        return again

    def combine(
        self, rows: Tensor | None, weights: Tensor | None, route: _Route
    ) -> tuple[Tensor | None, Tensor | None]:
        ep, hidden = self._ep, self._request.hidden
        device = (weights if rows is None else rows).device  # type: ignore[union-attr]
        sent = (
            rows
            if rows is not None
            else torch.zeros(route.num_rows, hidden, dtype=torch.bfloat16, device=device)
        )
        x = sent.new_empty(max(1, route.num_tokens), hidden)
        given, taken, direction = (
            {"tokens": ep.Tensor(sent.contiguous())},
            {"tokens": ep.Tensor(x)},
            ep.PassDir.FWD,
        )
        factors = None
        if weights is not None:
            factors = weights.new_empty(len(x), weights.shape[1])
            given["topk_weights"], taken["topk_weights"] = ep.Tensor(weights.contiguous()), ep.Tensor(factors)
            direction = ep.PassDir.BWD
        self._live[-1].combine(
            ep.CombineInputs(**given),
            ep.CombineOutputs(**taken),
            config=ep.CombineConfig(pass_direction=direction),
            stream=_stream(sent),
        )
        return (
            None if rows is None else x[: route.num_tokens],
            None if factors is None else factors[: route.num_tokens],
        )


def _stream(near: Tensor) -> int:
    return torch.cuda.current_stream(near.device).cuda_stream if near.is_cuda else 0


def _destroy(live: list[Any]) -> None:
    while live:
        live.pop().destroy()
