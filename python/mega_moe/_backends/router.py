"""Routing of one call: the kernel where it can run, plain torch elsewhere, with the same values."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mega_moe._backends import faults
from mega_moe._backends.chain import in_order
from mega_moe._backends.control import Control
from mega_moe._backends.request import Request
from mega_moe._backends.symmetric import (
    Shape,
    SymmetricMemory,
    allocate,
    broken_canaries,
    symmetric_layout,
    workspace_layout,
    write_canaries,
)
from mega_moe._backends.tables import BLOCK_TOKENS, PAD_ROWS, Tables, plain_tables
from mega_moe._base import env
from mega_moe._base.errors import MegaMoEError, PeerError
from mega_moe._ops import library

_WORDS = 2  # of a summary before the tokens: status, chunks


class Routing(NamedTuple):
    """Load statistics of one call, int32 on the buffer's device. E_local experts of this rank, R ranks.

    A call that could not be served holds -1 everywhere and a ``status`` that is not 0; a call with an expert id out of
    range has a status too, and counts without that slot.
    """

    tokens_per_expert: Tensor
    """``[E_local]``: rows that each local expert gets from all ranks."""
    tokens_per_rank: Tensor
    """``[R]``: tokens of each rank in this call."""
    residents_by_first: Tensor
    """``[E_local]``: tokens, each with one of its experts here, by the lowest: what arrives for it."""
    residents_by_last: Tensor
    """``[E_local]``: the same by the highest: what leaves after it."""
    num_rows: Tensor
    """``[]``: sum of tokens_per_expert."""
    num_residents: Tensor
    """``[]``: tokens that have an expert here; what travels, since a token travels once to a rank."""
    num_chunks: Tensor
    """``[]``: pieces in which the call is worked off."""
    status: Tensor
    """``[]``: 0, or the kind of fault that the next call or ``buffer.check()`` raises."""


def routing_of(summary: Tensor, num_ranks: int, num_local: int) -> Routing:
    """Views of what a launch reports."""
    status, chunks = summary[0], summary[1]
    tokens, first, last, totals = (
        summary[_WORDS : _WORDS + num_ranks],
        _WORDS + num_ranks + num_local,
        _WORDS + num_ranks + 2 * num_local,
        _WORDS + num_ranks + 3 * num_local,
    )
    return Routing(
        summary[_WORDS + num_ranks : first],
        tokens,
        summary[first:last],
        summary[last:totals],
        summary[totals],
        summary[totals + 1],
        chunks,
        status,
    )


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

    @property
    def staging(self) -> Tensor | None:
        """The staging area inside the buffer, where there is one."""
        ...


class TorchRouter:
    """Plain operators and the control group; a bad id raises in the call itself."""

    name = "torch"
    staging = None

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
        told = self._control.gather((num_tokens, reason), what)
        if error is not None:
            raise error
        refused = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why)
        if refused:
            raise PeerError(f"rank {self._control.rank}: {what} was refused by {refused}")
        return [size for size, _ in told]


class KernelRouter:
    """The routing kernel of one rank on its memory. Launches never wait for the device."""

    name = "kernel"

    def __init__(
        self,
        shape: Shape,
        rank: int,
        symmetric: SymmetricMemory,
        *,
        num_sms: int,
        arrival_timeout: float,
        progress_timeout: float,
        lane: int = 0,
    ) -> None:
        device = symmetric.memory.device
        self.shape = shape
        self._rank = rank
        self._symmetric = symmetric
        self._workspace = allocate(workspace_layout(shape).total, device)
        self._record = torch.zeros(faults.RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self._no_weights = torch.empty(0, shape.top_k, device=device)
        self._no_ids = torch.empty(0, shape.top_k, dtype=torch.int64, device=device)
        self._num_sms = num_sms
        self._limits = faults.Limits(
            shape.num_ranks,
            shape.top_k,
            -(-shape.max_tokens // BLOCK_TOKENS),
            arrival_timeout,
            progress_timeout,
        )
        self._lane = lane
        self._device = device
        self._lost: str | None = None
        if shape.canaries:
            write_canaries(symmetric.memory, symmetric_layout(shape))
            write_canaries(self._workspace, workspace_layout(shape))
        # The stream that launches need not be the one that zeroed the memory.
        torch.cuda.synchronize(device)

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The symmetric part and the workspace, uint8."""
        return self._symmetric.memory, self._workspace

    @property
    def staging(self) -> Tensor:
        return symmetric_layout(self.shape).view(self._symmetric.memory, "staging", torch.uint8)

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        pending = self._take_pending()
        summary = self._launch(topk_idx.contiguous(), topk_weights, 0)
        if pending is not None:
            # After the launch, and not instead of it: the other ranks wait for this call, which did nothing wrong.
            raise pending
        if env.debug() and not torch.cuda.is_current_stream_capturing():
            self.check()
        return routing_of(summary, self.shape.num_ranks, self.shape.num_local_experts)

    def refuse(self, error: Exception, num_tokens: int) -> None:
        if self.shape.num_ranks > 1 and self._lost is None:
            self._launch(self._no_ids, None, num_tokens if num_tokens > self.shape.max_tokens else 1)

    def check(self) -> None:
        """Wait for the device and raise what its launches reported."""
        torch.cuda.synchronize(self._device)
        pending = self._take_pending()
        if pending is not None:
            raise pending
        if self.shape.canaries:
            parts = (
                (self.memory[0], symmetric_layout(self.shape)),
                (self._workspace, workspace_layout(self.shape)),
            )
            broken = [gap for memory, layout in parts for gap in broken_canaries(memory, layout)]
            if broken:
                raise MegaMoEError(f"a kernel wrote between the parts of the buffer, at bytes {broken}")

    def close(self) -> None:
        # The allocator may hand the memory to another stream at once.
        torch.cuda.synchronize(self._device)

    def tables(self, routing: Routing) -> Tables:
        """Copies of the tables of the last launch, whose result ``routing`` is. Synchronises with the device."""
        torch.cuda.synchronize(self._device)
        layout, shape = workspace_layout(self.shape), self.shape
        num_local = shape.num_local_experts
        chunks, rows, residents = (
            int(v) for v in (routing.num_chunks, routing.num_rows, routing.num_residents)
        )

        def table(name: str, columns: int) -> Tensor:
            return (
                layout.view(self._workspace, name, torch.int32)[: chunks * columns]
                .view(chunks, columns)
                .clone()
            )

        def entries(name: str, dtype: torch.dtype, count: int) -> Tensor:
            return layout.view(self._workspace, name, dtype)[:count].to(torch.int64)

        expert_rows, expert_slots = table("expert_rows", num_local), table("expert_slots", num_local)
        count = expert_rows.view(-1).to(torch.int64)
        begins = count.cumsum(0) - count
        slot = torch.arange(rows, device=count.device) - begins.repeat_interleave(count)
        slot += expert_slots.view(-1).to(torch.int64).repeat_interleave(count)
        source = layout.view(self._workspace, "slots", torch.int64)[slot] & 0xFFFFFFFF
        counts = torch.cat(
            (
                routing.tokens_per_expert,
                routing.residents_by_first,
                routing.residents_by_last,
                torch.stack((routing.num_rows, routing.num_residents)),
            )
        )
        return Tables(
            table("chunk_table", 8)[:, :7].contiguous(),
            expert_rows,
            expert_slots,
            table("pull_starts", num_local),
            table("push_starts", num_local),
            source,
            slot,
            entries("slot_list", torch.int32, rows),
            entries("pull_list", torch.int64, residents),
            entries("push_list", torch.int64, residents),
            counts,
            routing.tokens_per_rank.clone(),
        )

    def weights(self, tables: Tables) -> Tensor:
        """``[M]`` fp32: routing weight of each row of ``tables``, in slot order."""
        slots = workspace_layout(self.shape).view(self._workspace, "slots", torch.int64)
        return (slots[tables.slot] >> 32).to(torch.int32).view(torch.float32)

    def limit(self) -> int:
        """Rows of a chunk at most, as ``plain_tables`` takes it."""
        shape = self.shape
        most = shape.max_tokens * shape.num_ranks * shape.top_k
        if not shape.pool_rows:
            return most
        return shape.pool_rows - shape.num_local_experts * (PAD_ROWS - 1)

    def _launch(self, topk_idx: Tensor, topk_weights: Tensor | None, refused_tokens: int) -> Tensor:
        shape = self.shape
        length = _WORDS + shape.num_ranks + 3 * shape.num_local_experts + 2
        summary = torch.empty(length, dtype=torch.int32, device=self._device)
        weights = self._no_weights if topk_weights is None else topk_weights.contiguous()
        with torch.cuda.device(self._device), in_order(self._device, self._lane):
            library.require().route(
                topk_idx,
                weights,
                summary,
                self._symmetric.addresses,
                self._workspace.data_ptr(),
                self._record.data_ptr(),
                shape.max_tokens,
                shape.num_experts,
                shape.hidden,
                shape.pool_rows,
                shape.quantise,
                shape.home,
                shape.canaries,
                self._rank,
                self._num_sms,
                int(self._limits.arrival * 1e9),
                int(self._limits.progress * 1e9),
                refused_tokens,
                topk_weights is not None,
            )
        return summary

    def _take_pending(self) -> Exception | None:
        """What the launches have reported so far, without waiting for the device; raises when the ranks are lost."""
        if self._lost is not None:
            raise MegaMoEError(f"the ranks of this buffer lost one another earlier: {self._lost}")
        words = self._record.tolist()
        if not words[0]:
            return None
        error = faults.decode(words, self._limits)
        if faults.is_fatal(faults.Record(*words)):
            self._lost = str(error)
            raise error
        self._record.zero_()
        return error
