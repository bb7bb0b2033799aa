"""One layer in plain torch: dispatch, the arithmetic on local experts, combine. All backends but fused share it."""

from __future__ import annotations

import functools
import hashlib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.group import Control
from mega_moe._backends.plain.activation import wide
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
from mega_moe._base.errors import MegaMoEError, PeerError
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class _Call(NamedTuple):
    """What the ranks have agreed on. Expert ids int64, -1 for masked; weights wide; ``counts [R, E]`` on the CPU."""

    topk_idx: Tensor
    topk_weights: Tensor
    counts: Tensor
    needs: int  # of any rank


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
        self._call = 0

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
        call = self._begin("forward", inputs, activation, 0)
        arrived, tables = self._dispatch(call, self.arithmetic.payload(inputs.x.contiguous()))
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
        call = self._begin("backward", inputs, activation, mask)
        # Rows travel in the inputs' dtype: wgrad reads them so, and quantizing on arrival gives the same codes.
        arrived, tables = self._dispatch(call, (x.contiguous(), dy))
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
        if self.control.size > 1:
            self._agree({"phase": "forward"}, 0, torch.zeros(self.request.num_experts, device="cpu"), error)

    def _begin(self, phase: str, inputs: LayerInputs, activation: Activation, needs: int) -> _Call:
        x, topk_idx, topk_weights = inputs[:3]
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                "this backend sizes its exchange on the host and cannot be captured into a CUDA graph; "
                "only the forward of the fused backend can"
            )
        experts, most = self.request.num_experts, self.request.max_tokens_per_rank
        ids = topk_idx.to(torch.int64)
        wrong = (ids < -1) | (ids >= experts)
        ids = ids.masked_fill(wrong, -1)
        counts = torch.bincount(ids.reshape(-1) + 1, minlength=experts + 1)[1:]
        *totals, num_wrong = torch.cat((counts, wrong.sum()[None])).tolist()  # the only wait for the device
        refusal: Exception | None = None
        if x.shape[0] > most:
            refusal = ValueError(
                f"x: got {x.shape[0]} tokens, the buffer was built for max_tokens_per_rank={most}"
            )
        elif num_wrong:
            token, slot = wrong.nonzero()[0].tolist()
            refusal = ValueError(
                f"topk_idx[{token}, {slot}]: got expert {int(topk_idx[token, slot])}, want -1 or 0 to {experts - 1}"
            )
        call = {"phase": phase, "dtype": x.dtype, "activation": activation.kind}
        call |= {"clamp": activation.clamp, "alpha": activation.alpha}
        everyone, union = self._agree(call, needs, torch.tensor(totals, device="cpu"), refusal)
        return _Call(ids, topk_weights.to(wide(x.dtype)), everyone, union)

    def _agree(
        self, call: dict[str, Any], needs: int, counts: Tensor, refusal: Exception | None
    ) -> tuple[Tensor, int]:
        """Rows for each expert by rank, and the union of needs; raises where a rank refuses or runs another call."""
        self._call += 1
        what = f"{call['phase']} call {self._call}"
        call["call"] = self._call
        digest = int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:7], "big")
        head = torch.tensor([int(refusal is not None), digest, needs], device="cpu")
        row = torch.cat((head, counts.to(torch.int64)))
        rows = self.control.exchange(row, what)
        refused, digests, everyones_needs = rows[:, :3].T.tolist()
        if any(refused):
            self.control.gather_errors(refusal, what)
        if len(set(digests)) > 1:
            calls = self.control.gather(call, what)
            name = next(name for name in call if len({other[name] for other in calls}) > 1)
            got = ", ".join(f"rank {rank}: {other[name]}" for rank, other in enumerate(calls))
            raise PeerError(f"rank {self.control.rank}: ranks disagree on the {name} of {what}: {got}")
        return rows[:, 3:], functools.reduce(operator.or_, everyones_needs)

    def _dispatch(self, call: _Call, payload: Payload) -> tuple[Payload, _Tables]:
        counts, rank = call.counts, self.control.rank
        send = send_plan(call.topk_idx, counts, rank)
        token = send.pair // max(call.topk_idx.shape[1], 1)
        source = counts.view(len(counts), len(counts), -1)[:, rank].sum(1).tolist()

        def travel(rows: Tensor) -> Tensor:
            return all_to_all(rows, send.splits, source, self.group)

        receive = receive_plan(travel(token), counts, rank)
        weight = take(travel(call.topk_weights.reshape(-1)[send.pair]), receive.order)
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
