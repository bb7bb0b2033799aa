"""In the place of DeepEP 2 and NCCL EP: their calls, with their own parameters and checks, over gloo on a CPU.

What a package leaves undefined holds NaN, or ids of no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_moe._backends.dispatched.collectives import CollectiveDispatcher, visited_ranks

NO_EXPERT = 1 << 20


def routed(topk_idx: Tensor, num_experts: int, group: Any) -> tuple[CollectiveDispatcher, list[list[int]]]:
    """An engine for this routing, and how many tokens go where, which real packages learn on the device."""
    size = dist.get_world_size(group)
    mine = visited_ranks(topk_idx, size, num_experts // size).sum(0)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    engine = CollectiveDispatcher(dist.get_rank(group), num_experts // size, group)
    return engine, [row.tolist() for row in everyone]


def undefined(rows: Tensor, count: int) -> Tensor:
    """``count`` rows, the first as given."""
    value = float("nan") if rows.is_floating_point() else NO_EXPERT
    out = torch.full((count, *rows.shape[1:]), value, dtype=rows.dtype)
    out[: len(rows)] = rows
    return out


# DeepEP 2


@dataclass
class EPHandle:
    engine: CollectiveDispatcher
    route: Any
    num_experts: int
    num_received: int
    num_allocated: int
    topk_idx: Tensor


class ElasticBuffer:
    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        explicitly_destroy: bool = False,
    ) -> None:
        assert deterministic
        assert not allow_multiple_reduction
        self.group, self.most, self.hidden, self.top_k = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, None]:
        assert num_experts is not None  # the number of SMs is derived from it before the handle is looked at
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert 0 < len(x) <= self.most
        assert x.shape[1] == self.hidden
        if handle is not None:
            assert topk_idx is None
            assert not do_cpu_sync
            assert len(x) == len(handle.topk_idx)
            rows = handle.engine.dispatch_again(x, handle.route)
            return undefined(rows, handle.num_allocated), None, None, handle, None
        assert do_cpu_sync is False
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_idx.shape == topk_weights.shape == (len(x), self.top_k)
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        engine, sizes = routed(topk_idx, num_experts, self.group)
        rows, ids, weights, route = engine.dispatch(x, topk_idx, topk_weights, sizes)
        allocated = self.most * dist.get_world_size(self.group)
        made = EPHandle(engine, route, num_experts, len(rows), allocated, topk_idx)
        wide = undefined(ids.to(topk_idx.dtype), allocated)
        return undefined(rows, allocated), wide, undefined(weights, allocated), made, None

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
    ) -> tuple[Tensor, Tensor | None, None]:
        assert x.dtype == torch.bfloat16
        assert x.shape == (handle.num_allocated, self.hidden)
        assert topk_weights is None or topk_weights.shape == (handle.num_allocated, self.top_k)
        assert topk_weights is None or topk_weights.dtype == torch.float32
        count = handle.num_received
        weights = None if topk_weights is None else topk_weights[:count]
        y, summed = handle.engine.combine(x[:count], weights, handle.route)
        assert y is not None
        return y, summed, None


DEEP_EP = SimpleNamespace(ElasticBuffer=ElasticBuffer, topk_idx_t=torch.int64, __version__="2.0")
RENAMED_DEEP_EP = SimpleNamespace(EPBuffer=ElasticBuffer, topk_idx_t=torch.int64)


# NCCL EP


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1


class Descriptor:
    def __init__(self, buffer: Tensor) -> None:
        assert isinstance(buffer, Tensor)
        assert buffer.is_contiguous()
        assert buffer.numel() > 0
        self.buffer = buffer


@dataclass
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0


@dataclass
class DispatchConfig:
    pass_direction: PassDir = PassDir.FWD


@dataclass
class CombineConfig:
    pass_direction: PassDir = PassDir.FWD


@dataclass
class LayoutInfo:
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass
class Tokens:
    """Inputs or outputs of a dispatch or a combine."""

    tokens: Descriptor | None = None
    topk_weights: Descriptor | None = None
    topk_idx: Descriptor | None = None

    def buffers(self) -> list[Tensor | None]:
        return [None if d is None else d.buffer for d in (self.tokens, self.topk_weights, self.topk_idx)]


class Handle:
    def __init__(self, config: GroupConfig, group: Any) -> None:
        self.config, self.group, self.destroyed = config, group, False

    def update(self, topk_idx: Descriptor, *, layout_info: LayoutInfo | None = None, stream: int) -> None:
        assert layout_info is not None
        assert layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL
        self.ids = topk_idx.buffer
        assert len(self.ids) <= self.config.max_dispatch_tokens_per_rank
        self.engine, self.sizes = routed(self.ids, self.config.num_experts, self.group)
        self.count = sum(row[dist.get_rank(self.group)] for row in self.sizes)

    def dispatch(
        self,
        inputs: Tokens,
        outputs: Tokens,
        *,
        layout_info: None = None,
        config: DispatchConfig,
        stream: int,
    ) -> None:
        x, weights, _ = inputs.buffers()
        rows, got_weights, got_ids = outputs.buffers()
        assert x is not None
        assert rows is not None
        assert x.nbytes == len(self.ids) * self.config.max_token_bytes
        assert len(rows) == max(1, self.count)
        if config.pass_direction == PassDir.BWD:
            assert weights is got_weights is got_ids is None
            rows[: self.count] = self.engine.dispatch_again(x, self.route)
            return
        assert weights is not None
        assert got_weights is not None
        assert got_ids is not None
        assert weights.dtype == got_weights.dtype == torch.float32
        assert got_ids.dtype == torch.int64
        arrived = self.engine.dispatch(x, self.ids, weights, self.sizes)
        rows[: self.count], got_ids[: self.count], got_weights[: self.count] = arrived[:3]
        self.route = arrived.route

    def combine(self, inputs: Tokens, outputs: Tokens, *, config: CombineConfig, stream: int) -> None:
        rows, weights, _ = inputs.buffers()
        y, summed, _ = outputs.buffers()
        assert rows is not None
        assert y is not None
        assert len(rows) == max(1, self.count)
        assert (config.pass_direction == PassDir.BWD) == (weights is not None) == (summed is not None)
        parts = (rows[: self.count], None if weights is None else weights[: self.count])
        got, factors = self.engine.combine(*parts, self.route)
        assert got is not None
        y.copy_(got)
        if summed is not None:
            assert factors is not None
            summed.copy_(factors)

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True


class Group:
    def __init__(self, comm: Any, config: GroupConfig) -> None:
        self.comm, self.config, self.handles, self.destroyed = comm, config, list[Handle](), False

    @classmethod
    def create(cls, comm: Any, config: GroupConfig) -> Group:
        assert config.algorithm == Algorithm.HIGH_THROUGHPUT
        assert config.max_recv_tokens_per_rank == 0  # eager mode
        assert config.max_token_bytes % 16 == 0
        return cls(comm, config)

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Descriptor,
        *,
        layout_info: LayoutInfo | None = None,
        config: None = None,
        stream: int,
    ) -> Handle:
        assert layout == Layout.FLAT
        self.handles.append(Handle(self.config, self.comm))
        self.handles[-1].update(topk_idx, layout_info=layout_info, stream=stream)
        return self.handles[-1]

    def destroy(self) -> None:
        assert not self.destroyed
        assert all(handle.destroyed for handle in self.handles)
        self.destroyed = True


NCCL_EP = SimpleNamespace(
    Algorithm=Algorithm,
    CombineConfig=CombineConfig,
    CombineInputs=Tokens,
    CombineOutputs=Tokens,
    DispatchConfig=DispatchConfig,
    DispatchInputs=Tokens,
    DispatchOutputs=Tokens,
    ExpertIdKind=ExpertIdKind,
    Group=Group,
    GroupConfig=GroupConfig,
    Layout=Layout,
    LayoutInfo=LayoutInfo,
    PassDir=PassDir,
    Tensor=Descriptor,
)
