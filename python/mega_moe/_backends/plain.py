"""One layer in plain torch: dispatch, the arithmetic on local experts, combine. All plain backends share it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.arithmetic import Arithmetic, Experts, Payload, Wanted
from mega_moe._backends.control import Control
from mega_moe._backends.dense import add_into
from mega_moe._backends.request import Request
from mega_moe._backends.routing import ReceivePlan, SendPlan, inverse, receive_plan, send_plan, take
from mega_moe._backends.staging import Staged, Stager
from mega_moe._backends.transport import Transport
from mega_moe._base.activation import KINDS, Activation
from mega_moe._base.errors import MegaMoEError, PeerError
from mega_moe._base.layer import Gradients, LayerInputs, Needs

_PHASES = ("no call", "forward", "backward")
_FORWARD, _BACKWARD = 1, 2
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Header(NamedTuple):
    """What ranks tell one another before a call; ``counts`` follow it. All int64."""

    call: int
    refused: int
    phase: int
    dtype: int
    activation: int
    clamp: int
    alpha: int
    needs: int


class _Tables(NamedTuple):
    send: SendPlan
    receive: ReceivePlan
    weight: Tensor


@dataclass
class PlainExecutor:
    """Forward and backward of one buffer. Every public call is collective over the group."""

    request: Request
    arithmetic: Arithmetic
    stager: Stager
    control: Control
    transport: Transport

    def __post_init__(self) -> None:
        self._call = 0

    def forward(
        self, inputs: LayerInputs, activation: Activation, saved_rows: int | None = None
    ) -> tuple[Tensor, None]:
        if saved_rows is not None:
            raise MegaMoEError("this backend saves no gate and up for the backward")
        quantize = self.arithmetic.quantized_dispatch
        staged, counts, _ = self._begin(_FORWARD, inputs, activation, 0, quantize)
        arrived, tables = self._dispatch(staged, counts, staged.x)
        experts = Experts(inputs.w_gate_up, inputs.w_down, tables.receive.counts, activation)
        o = self.arithmetic.forward(arrived, tables.weight, experts)
        return self._combine(o, tables, inputs.x.shape, inputs.topk_idx.shape[1]), None

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
    ) -> Gradients:
        if saved_gate_up is not None:
            raise MegaMoEError("this backend saves no gate and up, and was given some")
        x, topk_idx, topk_weights, w_gate_up, w_down = inputs
        mask = sum(1 << bit for bit, need in enumerate(needs) if need)
        # Rows travel in the inputs' dtype: the weight gradients read them so, and quantizing on arrival is the same.
        staged, counts, union = self._begin(_BACKWARD, inputs, activation, mask, False)
        arrived, tables = self._dispatch(staged, counts, (*staged.x, dy))
        # A rank computes the rows' gradients for every rank that asked, the weights' for itself.
        wanted = Wanted(bool(union & 1), bool(union & 2), needs.w_gate_up, needs.w_down, dw_dtype)
        experts = Experts(w_gate_up, w_down, tables.receive.counts, activation)
        grads = self.arithmetic.backward(arrived[0], arrived[1], tables.weight, experts, wanted)
        dx = dtopk = None
        if grads.dx is not None:
            dx = self._combine(grads.dx, tables, x.shape, topk_idx.shape[1])
        if grads.dw is not None:
            pairs = torch.zeros(topk_idx.numel(), dtype=grads.dw.dtype, device=x.device)
            pairs[tables.send.pair] = self._return(grads.dw, tables)
            dtopk = pairs.view(topk_idx.shape).to(topk_weights.dtype)
        return add_into(
            into,
            Gradients(
                dx if needs.x else None,
                dtopk if needs.topk_weights else None,
                grads.dw_gate_up,
                grads.dw_down,
            ),
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.arithmetic.dtypes

    @property
    def stages_by(self) -> str:
        return self.stager.name

    @property
    def weight_copies(self) -> None:
        return None

    @property
    def given_codes(self) -> None:
        return None

    def refuse(self, error: Exception, num_tokens: int = 0) -> None:
        """Tell the other ranks, which are at or on their way to this call, why this rank does not take part."""
        if self.control.size > 1:
            self._agree(Header(self._next(), 1, _FORWARD, 0, 0, 0, 0, 0), torch.zeros(0), error)

    def _next(self) -> int:
        self._call += 1
        return self._call

    def _begin(
        self,
        phase: int,
        inputs: LayerInputs,
        activation: Activation,
        needs: int,
        quantize: bool,
    ) -> tuple[Staged, Tensor, int]:
        """Stage the inputs and agree on the call -> staged, counts ``[R, E]`` on the CPU, union of needs."""
        x, topk_idx, topk_weights = inputs[:3]
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                "this backend sizes its exchange on the host and cannot be captured into a CUDA graph; "
                "only the forward of the fused backend can"
            )
        refusal: Exception | None = None
        if x.shape[0] > self.request.max_tokens_per_rank:
            refusal = ValueError(
                f"x: got {x.shape[0]} tokens, the buffer was built for max_tokens_per_rank="
                f"{self.request.max_tokens_per_rank}"
            )
            topk_idx, topk_weights, x = topk_idx[:0], topk_weights[:0], x[:0]
        staged = self.stager.stage(x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous(), quantize)
        experts = self.request.num_experts
        counts = torch.bincount(staged.topk_idx.reshape(-1) + 1, minlength=experts + 1)[1:]
        *totals, flag, pair, value = torch.cat((counts, staged.bad)).tolist()  # the only wait for the device
        if flag and refusal is None:
            token, slot = divmod(pair, topk_idx.shape[1])
            refusal = ValueError(
                f"topk_idx[{token}, {slot}]: got expert {value}, want -1 or 0 to {experts - 1}"
            )
        header = Header(
            self._next(),
            int(refusal is not None),
            phase,
            _DTYPES.index(x.dtype),
            KINDS.index(activation.kind),
            _bits(activation.clamp),
            _bits(activation.alpha),
            needs,
        )
        return staged, *self._agree(header, torch.tensor(totals, dtype=torch.int64), refusal)

    def _agree(self, header: Header, counts: Tensor, refusal: Exception | None) -> tuple[Tensor, int]:
        what = f"{_PHASES[header.phase]} call {header.call}"
        row = torch.zeros(len(header) + self.request.num_experts, dtype=torch.int64)
        row[: len(header)] = torch.tensor(header)
        row[len(header) : len(header) + counts.numel()] = counts
        rows = self.control.exchange(row, what)
        headers = [Header(*values) for values in rows[:, : len(header)].tolist()]
        if any(h.refused for h in headers):
            reasons = self.control.gather(refusal and f"{type(refusal).__name__}: {refusal}", what)
            if refusal is not None:
                raise refusal
            refusals = "; ".join(f"rank {r}: {why}" for r, why in enumerate(reasons) if why)
            raise PeerError(f"rank {self.control.rank}: {what} was refused by {refusals}")
        shown: dict[str, Callable[[int], object]] = {
            "phase": _PHASES.__getitem__,
            "call": int,
            "dtype": _DTYPES.__getitem__,
            "activation": KINDS.__getitem__,
            "clamp": _number,
            "alpha": _number,
        }
        for name, show in shown.items():
            values = [getattr(h, name) for h in headers]
            if len(set(values)) > 1:
                got = ", ".join(f"rank {r}: {show(v)}" for r, v in enumerate(values))
                raise PeerError(f"rank {self.control.rank}: ranks disagree on the {name} of {what}: {got}")
        union = 0
        for h in headers:
            union |= h.needs
        return rows[:, len(header) :], union

    def _dispatch(self, staged: Staged, counts: Tensor, payload: Payload) -> tuple[Payload, _Tables]:
        send = send_plan(staged.topk_idx, counts, self.control.rank)
        top_k = max(staged.topk_idx.shape[1], 1)
        token = send.pair // top_k
        source = counts.view(len(counts), len(counts), -1)[:, self.control.rank].sum(1).tolist()

        def travel(rows: Tensor) -> Tensor:
            return self.transport.exchange(rows, send.splits, source)

        receive = receive_plan(travel(token), counts, self.control.rank)
        weight = take(travel(staged.topk_weights.reshape(-1)[send.pair]), receive.order)
        arrived = tuple(take(travel(take(part, token)), receive.order) for part in payload)
        return arrived, _Tables(send, receive, weight)

    def _return(self, rows: Tensor, tables: _Tables) -> Tensor:
        """Rows in canonical order on the experts' ranks -> rows in the order this rank sent them."""
        back = take(rows, inverse(tables.receive.order))
        return self.transport.exchange(back, tables.receive.splits, tables.send.splits)

    def _combine(self, rows: Tensor, tables: _Tables, shape: torch.Size, top_k: int) -> Tensor:
        """Sum each token's rows in slot order, wide, rounded once; a token without rows is exactly zero."""
        tokens, hidden = shape
        returned, pair = self._return(rows, tables), tables.send.pair
        if len(pair) == tokens * top_k:
            slots = take(returned, inverse(pair))
        else:
            slots = rows.new_zeros(tokens * top_k, hidden).index_copy_(0, pair, returned)
        return self.arithmetic.sum_slots(slots.view(tokens, top_k, hidden)).to(rows.dtype)


def _bits(number: float | None) -> int:
    # The bits of a double, so that ranks agree on the exact number; those of a NaN stand for none.
    bits: int = struct.unpack("q", struct.pack("d", math.nan if number is None else number))[0]
    return bits


def _number(bits: int) -> float | None:
    number: float = struct.unpack("d", struct.pack("q", bits))[0]
    return None if math.isnan(number) else number
