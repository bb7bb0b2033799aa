"""Ranks that one process plays on one GPU: a buffer, a stream and a share of the SMs for each."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

# A stream that shares its hardware queue with another rank's would wait for the launch that waits for it. Read when the
# first context is made, so it is set where a test file is imported.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.memory import Shape, of_virtual_ranks, symmetric_layout, workspace_layout
from mega_moe._backends.routing import Routing
from mega_moe.testing.tables import Tables, plain_tables

# Parts that are zero in a new buffer; what the others hold must not matter.
SYMMETRIC_STATE = ("control", "headers", "block_flags", "x_flags", "sent_flags")
WORKSPACE_STATE = ("sync", "group_counts")
# 16 bits that fill all other parts: as bf16 a number, NaN, and 3e38.
NUMBER, NAN, HUGE = 0xEEEE, 0xFFFF, 0x7F62


LOADING_LANE = 1 << 10  # of no rank


class VirtualRanks:
    """``shape.num_ranks`` ranks on ``device``; ``num_sms`` for each (default: an even share).

    Launches of one lane are chained by the library; ranks that are to run at once need a lane each.
    """

    def __init__(
        self,
        device: torch.device,
        shape: Shape,
        *,
        num_sms: int | None = None,
        arrival: float = 10.0,
        progress: float = 10.0,
        poison: int = NUMBER,
        first_lane: int = 0,
    ) -> None:
        self.shape, self.device = shape, device
        everything = torch.cuda.get_device_properties(device).multi_processor_count
        ranks = range(shape.num_ranks)
        self.streams = [torch.cuda.Stream(device) for _ in ranks]
        parts = of_virtual_ranks(symmetric_layout(shape).total, device, shape.num_ranks)
        self.kernels = [
            KernelRank(
                shape,
                rank,
                parts[rank],
                num_sms=num_sms or everything // shape.num_ranks,
                arrival_timeout=arrival,
                progress_timeout=progress,
                lane=first_lane + rank,
            )
            for rank in ranks
        ]
        self.poison(poison)
        self.warm()

    def warm(self) -> None:
        """Have memory for results and the routing kernel ready: an allocation, or the first launch of a kernel, between
        launches that wait for others could wait for them."""
        _load_routing(self.device)
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.empty(1, device=self.device)
        torch.cuda.synchronize(self.device)

    def poison(self, word: int) -> None:
        """Fill all memory but the state with ``word``. Nothing may be running."""
        torch.cuda.synchronize(self.device)
        layouts = (
            (symmetric_layout(self.shape), SYMMETRIC_STATE),
            (workspace_layout(self.shape), WORKSPACE_STATE),
        )
        signed = word - (1 << 16) if word >= 1 << 15 else word
        for kernels in self.kernels:
            for memory, (layout, state) in zip(kernels.memory, layouts, strict=True):
                for name in layout.parts:
                    if name not in state:
                        layout.view(memory, name, torch.int16).fill_(signed)
        torch.cuda.synchronize(self.device)

    def launch(self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> list[Routing]:
        """One call of every rank, from the last to the first; the inputs are on the device already."""
        torch.cuda.synchronize(self.device)
        results: dict[int, Routing] = {}
        for rank in reversed(range(self.shape.num_ranks)):
            with torch.cuda.stream(self.streams[rank]):
                results[rank] = self.kernels[rank].route(
                    ids[rank], None if weights is None else weights[rank]
                )
        return [results[rank] for rank in range(self.shape.num_ranks)]

    def check(self) -> None:
        for kernels in self.kernels:
            kernels.check()


@functools.cache
def _load_routing(device: torch.device) -> None:
    """A rank that refuses a call routes only; alone in its process it would not do so alongside another's forward."""
    if device.type != "cuda":
        return
    shape = Shape(128, 1, 1, 256, 1)
    (memory,) = of_virtual_ranks(symmetric_layout(shape).total, device, 1)
    alone = KernelRank(
        shape, 0, memory, num_sms=1, arrival_timeout=10.0, progress_timeout=10.0, lane=LOADING_LANE
    )
    alone.route(torch.zeros(1, 1, dtype=torch.int64, device=device), None)
    alone.close()


def random_ids(
    kind: str, tokens: Sequence[int], top_k: int, experts: int, device: torch.device, seed: int = 0
) -> list[Tensor]:
    """Expert ids of every rank: int64, or int32 on odd ranks."""
    made = torch.Generator(device).manual_seed(seed)
    local = experts // len(tokens)

    def numbers(count: int, high: int) -> Tensor:
        return torch.randint(0, high, (count, top_k), generator=made, device=device)

    ids = []
    for rank, count in enumerate(tokens):
        if kind == "one expert":
            own = torch.full((count, top_k), experts - 1, device=device)
        elif kind == "one rank":
            own = numbers(count, local)
        elif kind == "duplicates":
            own = numbers(count, min(experts, 3))
        elif kind == "empty":
            own = torch.full((count, top_k), -1, device=device)
        else:
            scores = torch.rand(count, experts, generator=made, device=device)
            own = scores.topk(min(top_k, experts), dim=1).indices
            own = torch.nn.functional.pad(own, (0, top_k - own.shape[1]), value=-1)
            if kind == "masked":
                own = own.masked_fill(torch.rand(own.shape, generator=made, device=device) < 0.5, -1)
        ids.append(own.to(torch.int32 if rank % 2 else torch.int64).contiguous())
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # launches on other streams read them
    return ids


def kernel_tables(kernels: KernelRank, routing: Routing) -> Tables:
    """Copies of the tables of the last launch, whose result ``routing`` is. Synchronizes with the device."""
    torch.cuda.synchronize(kernels.device)
    layout, workspace = workspace_layout(kernels.shape), kernels.memory[1]
    num_local = kernels.shape.num_local_experts
    chunks, rows, residents = (int(v) for v in (routing.num_chunks, routing.num_rows, routing.num_residents))

    def table(name: str, columns: int) -> Tensor:
        flat = layout.view(workspace, name, torch.int32)[: chunks * columns]
        return flat.view(chunks, columns).clone()

    def entries(name: str, dtype: torch.dtype, count: int) -> Tensor:
        return layout.view(workspace, name, dtype)[:count].to(torch.int64)

    expert_rows, expert_slots = table("expert_rows", num_local), table("expert_slots", num_local)
    count = expert_rows.view(-1).to(torch.int64)
    begins = count.cumsum(0) - count
    slot = torch.arange(rows, device=count.device) - begins.repeat_interleave(count)
    slot += expert_slots.view(-1).to(torch.int64).repeat_interleave(count)
    source = layout.view(workspace, "slots", torch.int64)[slot] & 0xFFFFFFFF
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


def kernel_weights(kernels: KernelRank, tables: Tables) -> Tensor:
    """``[M]`` fp32: routing weight of each row of ``tables``, in slot order."""
    slots = workspace_layout(kernels.shape).view(kernels.memory[1], "slots", torch.int64)
    return (slots[tables.slot] >> 32).to(torch.int32).view(torch.float32)


def difference(got: Tables, want: Tables) -> str | None:
    """The first table that differs."""
    for name, a, b in zip(Tables._fields, got, want, strict=True):
        there = b.to(a.device)
        if a.shape != there.shape:
            return f"{name}: got shape {tuple(a.shape)}, want {tuple(b.shape)}"
        if not torch.equal(a, there):
            at = int((a != there).reshape(-1).nonzero()[0])
            return f"{name}: entry {at} of {a.numel()} is {a.reshape(-1)[at]}, want {b.reshape(-1)[at]}"
    return None


def assert_tables(
    ranks: VirtualRanks,
    ids: Sequence[Tensor],
    results: Sequence[Routing],
    weights: Sequence[Tensor] | None = None,
    on: torch.device | str = "cpu",
) -> None:
    """The tables of all ranks are those of stable sorts on the device ``on``, and the weights lie with their rows."""
    there = [own.to(on) for own in ids]
    for rank, (kernels, routing) in enumerate(zip(ranks.kernels, results, strict=True)):
        got = kernel_tables(kernels, routing)
        want = plain_tables(there, rank, ranks.shape.num_experts, *ranks.shape.chunk_limits())
        where = difference(got, want)
        assert where is None, f"rank {rank}: {where}"
        assert int(routing.status) == 0
        assert int(routing.num_chunks) == len(want.chunks)
        if weights is None:
            continue
        token, source, slot = got.source & 0xFFFFF, got.source >> 20 & 31, got.source >> 25
        most = max(len(own) for own in ids)
        padded = torch.zeros(len(ids), most, ids[0].shape[1], device=ranks.device)
        for other, own in enumerate(weights):
            padded[other, : len(own)] = own.float()
        assert torch.equal(kernel_weights(kernels, got), padded[source, token, slot]), f"rank {rank}: weights"
