"""Routing statistics in plain torch, for every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_moe._backends.group import Control
from mega_moe._backends.routing import Routing, routing_of

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class TorchRouter:
    """Plain operators and the control group; a bad id raises in the call itself."""

    name = "torch"

    def __init__(self, request: Request, control: Control) -> None:
        self._request = request
        self._control = control
        self._call = 0

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        experts = self._request.num_experts
        ids = topk_idx.to(torch.int64)
        wrong = ((ids < -1) | (ids >= experts)).nonzero()
        error = None
        if len(wrong):
            token, slot = wrong[0].tolist()
            error = ValueError(
                f"topk_idx[{token}, {slot}]: got expert {int(ids[token, slot])}, want -1 or 0 to {experts - 1}"
            )
        everyone = self._exchange(ids, error)
        num_local = self._request.num_local_experts
        local = torch.cat(everyone) - self._control.rank * num_local
        held = (local >= 0) & (local < num_local)
        resident = held.any(1)
        first = local.masked_fill(~held, num_local).amin(1)[resident]
        last = local.masked_fill(~held, -1).amax(1)[resident]
        rows, by_first, by_last = (torch.bincount(e, minlength=num_local) for e in (local[held], first, last))
        parts = [
            ids.new_tensor([0, 1, *map(len, everyone)]),
            *(rows, by_first, by_last),
            torch.stack((rows.sum(), resident.sum())),
        ]
        return routing_of(torch.cat(parts).int(), self._control.size, num_local)

    def refuse(self, error: Exception) -> None:
        """Let the other ranks raise PeerError for the call that this rank answers with ``error``."""
        if self._control.size > 1:
            self._agree(0, error)

    def check(self) -> None:
        """Nothing is left to report: a call raises what it meets."""

    def _exchange(self, ids: Tensor, error: Exception | None) -> list[Tensor]:
        """Ids of every rank, on the device of ``ids``."""
        sizes = self._agree(len(ids), error)
        if self._control.size == 1:
            return [ids]
        row = torch.full((max(sizes), ids.shape[1]), -1, dtype=torch.int64, device="cpu")
        row[: len(ids)] = ids.cpu()
        rows = self._control.exchange(row.reshape(-1), f"routing call {self._call}")
        return [
            theirs.view(row.shape)[:size].to(ids.device) for theirs, size in zip(rows, sizes, strict=True)
        ]

    def _agree(self, num_tokens: int, error: Exception | None) -> list[int]:
        """Tokens of every rank; raises when one refuses the call."""
        self._call += 1
        return self._control.gather_errors(error, f"routing call {self._call}", num_tokens)
