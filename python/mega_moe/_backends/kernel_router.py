"""The routing kernel of one rank, and its tables as plain tensors for whoever compares them."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.summary import Routing, routing_of
from mega_moe._backends.symmetric import workspace_layout
from mega_moe._backends.tables import Tables


class KernelRouter:
    """A `Router`: the routing kernel on the memory of ``kernels``. Launches never wait for the device."""

    name = "kernel"

    def __init__(self, kernels: KernelRank) -> None:
        self._kernels = kernels
        self.shape = kernels.shape

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The symmetric part and the workspace, uint8."""
        return self._kernels.memory

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        summary = self._kernels.route(topk_idx, topk_weights)
        return routing_of(summary, self.shape.num_ranks, self.shape.num_local_experts)

    def refuse(self, error: Exception, num_tokens: int) -> None:
        self._kernels.refuse(num_tokens)

    def check(self) -> None:
        """Wait for the device and raise what its launches reported."""
        self._kernels.check()

    def close(self) -> None:
        self._kernels.close()

    def tables(self, routing: Routing) -> Tables:
        """Copies of the tables of the last launch, whose result ``routing`` is. Synchronises with the device."""
        torch.cuda.synchronize(self._kernels.device)
        layout, shape = workspace_layout(self.shape), self.shape
        num_local = shape.num_local_experts
        chunks, rows, residents = (
            int(v) for v in (routing.num_chunks, routing.num_rows, routing.num_residents)
        )

        def table(name: str, columns: int) -> Tensor:
            return (
                layout.view(self._kernels.memory[1], name, torch.int32)[: chunks * columns]
                .view(chunks, columns)
                .clone()
            )

        def entries(name: str, dtype: torch.dtype, count: int) -> Tensor:
            return layout.view(self._kernels.memory[1], name, dtype)[:count].to(torch.int64)

        expert_rows, expert_slots = table("expert_rows", num_local), table("expert_slots", num_local)
        count = expert_rows.view(-1).to(torch.int64)
        begins = count.cumsum(0) - count
        slot = torch.arange(rows, device=count.device) - begins.repeat_interleave(count)
        slot += expert_slots.view(-1).to(torch.int64).repeat_interleave(count)
        source = layout.view(self._kernels.memory[1], "slots", torch.int64)[slot] & 0xFFFFFFFF
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
        slots = workspace_layout(self.shape).view(self._kernels.memory[1], "slots", torch.int64)
        return (slots[tables.slot] >> 32).to(torch.int32).view(torch.float32)
