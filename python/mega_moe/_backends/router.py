"""Routing of one call: what every router offers, and the one in plain torch, which serves every device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mega_moe._backends.control import Control
from mega_moe._backends.request import Request
from mega_moe._backends.summary import Routing, routing_of
from mega_moe._backends.tables import Tables, plain_tables
from mega_moe._base.errors import PeerError


class Router(Protocol):
    name: str

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing: ...

    def refuse(self, error: Exception, num_tokens: int) -> None:
        """Let the other ranks raise PeerError for the call that this rank answers with ``error``."""
        ...

    def check(self) -> None: ...

    def close(self) -> None:
        """Wait until nothing uses the memory any more."""
        ...


class TorchRouter:
    """Plain operators and the control group; a bad id raises in the call itself."""

    name = "torch"

    def __init__(self, request: Request, control: Control, limit: int | None = None) -> None:
        self._request = request
        self._control = control
        self._limit = limit
        self._call = 0

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        tables = self.tables(topk_idx)
        zero = torch.tensor([0, len(tables.chunks)], dtype=torch.int32, device=topk_idx.device)
        summary = torch.cat((zero, tables.tokens, tables.counts))
        return routing_of(summary, self._request.num_ranks, self._request.num_local_experts)

    def tables(self, topk_idx: Tensor) -> Tables:
        """Collective. The tables of this rank, on the ids' device."""
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
        limit = self._request.num_ranks * len(max(everyone, key=len)) * ids.shape[1]
        if self._limit is not None:
            limit = self._limit
        return plain_tables(everyone, self._control.rank, experts, limit)

    def refuse(self, error: Exception, num_tokens: int) -> None:
        if self._control.size > 1:
            self._agree(0, error)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _exchange(self, ids: Tensor, error: Exception | None) -> list[Tensor]:
        sizes = self._agree(len(ids), error)
        if self._control.size == 1:
            return [ids]
        most = max(sizes)
        row = torch.full((most, ids.shape[1]), -1, dtype=torch.int64)
        row[: len(ids)] = ids.cpu()
        rows = self._control.exchange(row.reshape(-1), f"routing call {self._call}")
        return [
            theirs.view(row.shape)[:size].to(ids.device) for theirs, size in zip(rows, sizes, strict=True)
        ]

    def _agree(self, num_tokens: int, error: Exception | None) -> list[int]:
        """Tokens of every rank; raises when one refuses the call."""
        self._call += 1
        what = f"routing call {self._call}"
        reason = error and f"{type(error).__name__}: {error}"
        gathered = self._control.gather((num_tokens, reason), what)
        if error is not None:
            raise error
        refused = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in enumerate(gathered) if why)
        if refused:
            raise PeerError(f"rank {self._control.rank}: {what} was refused by {refused}")
        return [size for size, _ in gathered]
