"""One layer in plain torch: dispatch, the arithmetic on local experts, combine. All backends but fused share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.group import Control
from mega_moe._backends.plain.activation import wide
from mega_moe._backends.plain.agreement import Agreement, Call
from mega_moe._backends.plain.arithmetic import Arithmetic, Experts, Payload
from mega_moe._backends.plain.exchange import (
    ReceivePlan,
    SendPlan,
    all_to_all,
    inverse,
    receive_plan,
    send_plan,
    take,
)
from mega_moe._base.activation import Activation
from mega_moe._base.errors import MegaMoEError
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class _Tables(NamedTuple):
    send: SendPlan
    receive: ReceivePlan
    weight: Tensor


@dataclass
class PlainExecutor:
    """Forward and backward of one buffer. Every public call is collective over the group."""

    request: Request
    arithmetic: Arithmetic
    control: Control
    group: Any = None

    def __post_init__(self) -> None:
        self._agreement = Agreement(self.request, self.control, self.request.num_experts, self._count)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.arithmetic.dtypes

    def forward(
        self,
        inputs: LayerInputs,
        activation: Activation,
        saved_rows: int | None = None,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if saved_rows is not None:
            raise MegaMoEError("this backend saves no gate and up for the backward")
        call = self._agreement.begin("forward", inputs, activation, 0)
        arrived, tables = self._dispatch(call, inputs, self.arithmetic.payload(inputs.x.contiguous()))
        experts = Experts(inputs.w_gate_up, inputs.w_down, tables.receive.counts, activation)
        o = self.arithmetic.forward(arrived, tables.weight, experts)
        y = self._combine(o, tables, inputs.x.shape, inputs.topk_idx.shape[1])
        if received is not None:
            received.add_(torch.tensor(tables.receive.counts, dtype=received.dtype, device=received.device))
        return (y if out is None else out.copy_(y)), None

    def backward(
        self,
        dy: Tensor,
        inputs: LayerInputs,
        activation: Activation,
        needs: Needs,
        dw_dtype: torch.dtype,
        *,
        saved_gate_up: Tensor | None = None,
        into: tuple[Tensor, Tensor] | None = None,
        out: Outputs | None = None,
    ) -> Gradients:
        if saved_gate_up is not None:
            raise MegaMoEError("this backend saves no gate and up, and was given some")
        x, topk_idx, topk_weights, w_gate_up, w_down = inputs
        mask = sum(1 << bit for bit, need in enumerate(needs) if need)
        call = self._agreement.begin("backward", inputs, activation, mask)
        # Rows travel in the inputs' dtype: wgrad reads them so, and quantizing on arrival gives the same codes.
        arrived, tables = self._dispatch(call, inputs, (x.contiguous(), dy))
        # A rank computes the rows' gradients for every rank that asked, the weights' for itself.
        of_rows = needs._replace(x=bool(call.needs & 1), topk_weights=bool(call.needs & 2))
        experts = Experts(w_gate_up, w_down, tables.receive.counts, activation)
        grads = self.arithmetic.backward(arrived[0], arrived[1], tables.weight, experts, of_rows, dw_dtype)
        dx = dtopk = None
        if grads.dx is not None:
            dx = self._combine(grads.dx, tables, x.shape, topk_idx.shape[1])
        if grads.dtopk is not None:
            pairs = torch.zeros(topk_idx.numel(), dtype=grads.dtopk.dtype, device=x.device)
            pairs[tables.send.pair] = self._return(grads.dtopk, tables)
            dtopk = pairs.view(topk_idx.shape).to(topk_weights.dtype)
        made = Gradients(
            dx if needs.x else None,
            dtopk if needs.topk_weights else None,
            grads.dw_gate_up,
            grads.dw_down,
        )
        return made.copy_into(out) if into is None else made.add_into(into)

    def refuse(self, error: Exception, num_tokens: int = 0) -> None:
        """Let the other ranks, which are at or on their way to this call, raise PeerError with ``error``."""
        self._agreement.refuse(error)

    def _count(self, ids: Tensor) -> Tensor:
        """Rows for each expert."""
        return torch.bincount(ids.reshape(-1) + 1, minlength=self.request.num_experts + 1)[1:]

    def _dispatch(self, call: Call, inputs: LayerInputs, payload: Payload) -> tuple[Payload, _Tables]:
        counts, rank = call.counts, self.control.rank
        send = send_plan(call.topk_idx, counts, rank)
        token = send.pair // max(call.topk_idx.shape[1], 1)
        source = counts.view(len(counts), len(counts), -1)[:, rank].sum(1).tolist()

        def travel(rows: Tensor) -> Tensor:
            return all_to_all(rows, send.splits, source, self.group)

        receive = receive_plan(travel(token), counts, rank)
        weights = inputs.topk_weights.to(wide(inputs.x.dtype))
        weight = take(travel(weights.reshape(-1)[send.pair]), receive.order)
        arrived = tuple(take(travel(take(part, token)), receive.order) for part in payload)
        return arrived, _Tables(send, receive, weight)

    def _return(self, rows: Tensor, tables: _Tables) -> Tensor:
        """Rows in canonical order on the experts' ranks -> rows in the order this rank sent them."""
        back = take(rows, inverse(tables.receive.order))
        return all_to_all(back, tables.receive.splits, tables.send.splits, self.group)

    def _combine(self, rows: Tensor, tables: _Tables, shape: torch.Size, top_k: int) -> Tensor:
        """Sum each token's rows in slot order, wide, rounded once; a token without rows is exactly zero."""
        tokens, hidden = shape
        returned, pair = self._return(rows, tables), tables.send.pair
        if len(pair) == tokens * top_k:
            slots = take(returned, inverse(pair))
        else:
            slots = rows.new_zeros(tokens * top_k, hidden).index_copy_(0, pair, returned)
        return self.arithmetic.sum_slots(slots.view(tokens, top_k, hidden)).to(rows.dtype)
