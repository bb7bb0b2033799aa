"""The backend's calls: agree, dispatch, the experts of one rank, combine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_moe._backends.dispatched.collectives import visited_ranks
from mega_moe._backends.dispatched.protocol import DispatchedTokens, Dispatcher
from mega_moe._backends.group import Control
from mega_moe._backends.plain.activation import wide
from mega_moe._backends.plain.agreement import Agreement, Call
from mega_moe._base.activation import Activation
from mega_moe._base.errors import MegaMoEError
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs
from mega_moe._ops.registry import Executor

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request
    from mega_moe._backends.fused.launch import KernelRank


@dataclass
class DispatchedExecutor:
    """Every call is collective, and keeps nothing for the backward, which dispatches x once more.

    ``experts`` serves this rank's experts with local ids, at most ``capacity`` tokens a call; more are several calls.
    ``kernels``: of the experts, where they are the fused ones.
    """

    request: Request
    control: Control
    dispatcher: Dispatcher
    experts: Executor
    capacity: int
    kernels: KernelRank | None = None

    def __post_init__(self) -> None:
        ranks, local = self.control.size, self.request.num_local_experts
        self._agreement = Agreement(
            self.request, self.control, ranks, lambda ids: visited_ranks(ids, ranks, local).sum(0)
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.experts.dtypes

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
        tokens = self._dispatch(self._begin("forward", inputs, activation, 0), inputs)
        outputs = [
            self.experts.forward(part, activation, received=received)[0]
            for part in self._parts(tokens, inputs)
        ]
        y, _ = self.dispatcher.combine(_joined(outputs), None, tokens.route)
        assert y is not None
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
        call = self._begin(
            "backward", inputs, activation, sum(1 << bit for bit, need in enumerate(needs) if need)
        )
        tokens = self._dispatch(call, inputs)
        dys = self.dispatcher.dispatch_again(dy.contiguous(), tokens.route).split(self.capacity)
        parts = list(self._parts(tokens, inputs))
        # A rank computes the tokens' gradients for every rank that asked, the weights' for itself.
        asked = needs._replace(x=bool(call.needs & 1), topk_weights=bool(call.needs & 2))
        sums = into if len(parts) == 1 else self._sums(inputs, needs, dw_dtype)
        made = [
            self.experts.backward(rows, part, activation, asked, dw_dtype, into=sums)
            for rows, part in zip(dys, parts, strict=True)
        ]
        dx = dtopk = None
        if asked.x or asked.topk_weights:
            dx, dtopk = self.dispatcher.combine(
                _joined([g.dx for g in made]), _joined([g.dtopk for g in made]), tokens.route
            )
        got = made[0]._replace(
            dx=dx if needs.x else None,
            dtopk=dtopk.to(inputs.topk_weights.dtype) if dtopk is not None and needs.topk_weights else None,
        )
        if sums is None or sums is into:
            return got.copy_into(out)
        gate_up, down = (s.to(dw_dtype) if need else None for s, need in zip(sums, needs[2:], strict=True))
        got = got._replace(dw_gate_up=gate_up, dw_down=down)
        return got.copy_into(out) if into is None else got.add_into(into)

    def refuse(self, error: Exception, num_tokens: int = 0) -> None:
        """Let the other ranks, which are at or on their way to this call, raise PeerError with ``error``."""
        self._agreement.refuse(error)

    def _begin(self, phase: str, inputs: LayerInputs, activation: Activation, needs: int) -> Call:
        lost: Exception | None = None
        if self.kernels is not None:
            try:
                lost = self.kernels.take_pending()
            except MegaMoEError as error:
                lost = error
        return self._agreement.begin(phase, inputs, activation, needs, lost)

    def _dispatch(self, call: Call, inputs: LayerInputs) -> DispatchedTokens:
        weights = inputs.topk_weights.to(wide(inputs.x.dtype))
        return self.dispatcher.dispatch(
            inputs.x.contiguous(), call.topk_idx, weights.contiguous(), call.counts.tolist()
        )

    def _parts(self, tokens: DispatchedTokens, inputs: LayerInputs) -> Iterator[LayerInputs]:
        """What the experts serve in one call each; one of no tokens where none came."""
        split = (t.split(self.capacity) for t in (tokens.x, tokens.topk_idx, tokens.topk_weights))
        for x, topk_idx, topk_weights in zip(*split, strict=True):
            yield LayerInputs(x, topk_idx, topk_weights, inputs.w_gate_up, inputs.w_down)

    @staticmethod
    def _sums(inputs: LayerInputs, needs: Needs, dw_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros for the weights' gradients of several calls, so wide that they are rounded once."""
        dtype = torch.promote_types(dw_dtype, torch.float32)
        gate_up, down = (
            torch.zeros(w.shape if need else 0, dtype=dtype, device=w.device)
            for w, need in zip(inputs[3:], needs[2:], strict=True)
        )
        return gate_up, down


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One after another; None where nobody asked."""
    made = [part for part in parts if part is not None]
    if len(made) < 2:
        return made[0] if made else None
    return torch.cat(made)
