"""One rank of the kernels that span ranks: its memory, its record of faults, and launches that wait for no device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mega_moe._backends.fused import faults
from mega_moe._backends.fused.memory import (
    BLOCK_TOKENS,
    Layout,
    Shape,
    SymmetricMemory,
    allocate,
    broken_canaries,
    symmetric_layout,
    workspace_layout,
    write_canaries,
)
from mega_moe._backends.routing import Routing, new_summary, routing_of
from mega_moe._base import env
from mega_moe._base.errors import MegaMoEError
from mega_moe._ops import library

# (device, rank that one process plays there): the last launch. Virtual ranks of one device must run at once.
_last: dict[tuple[int, int], tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
_lock = threading.Lock()


class KernelRank:
    """What the routing and the layer's kernels launch on: all launches of a rank share one epoch and one record."""

    name = "kernel"  # as a router

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
        self.shape, self.rank, self.num_sms = shape, rank, num_sms
        self.device = symmetric.memory.device
        self._symmetric = symmetric
        self._workspace = allocate(workspace_layout(shape).total, self.device)
        self._record = _new_record()
        self._no_ids = torch.empty(0, shape.top_k, dtype=torch.int64, device=self.device)
        self._limits = faults.Limits(
            shape.num_ranks,
            shape.top_k,
            -(-shape.max_tokens // BLOCK_TOKENS),
            arrival_timeout,
            progress_timeout,
        )
        self._lane = lane
        self._lost: str | None = None
        if shape.canaries:
            for memory, layout in self._parts():
                write_canaries(memory, layout)
        # The stream that launches need not be the one that zeroed the memory.
        torch.cuda.synchronize(self.device)

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The symmetric part and the workspace, uint8."""
        return self._symmetric.memory, self._workspace

    def staged_codes(self) -> tuple[Tensor, Tensor]:
        """Where a forward in fp8 stages x: e4m3 ``[max_tokens, H]``, scale factors fp32 ``[max_tokens, H / 128]``."""
        layout, tokens = symmetric_layout(self.shape), self.shape.max_tokens
        codes = layout.view(self.memory[0], "staged_x", torch.float8_e4m3fn)[: tokens * self.shape.hidden]
        scales = layout.view(self.memory[0], "staged_scales", torch.float32)
        return codes.view(tokens, self.shape.hidden), scales.view(tokens, -1)

    def words(self) -> list[int]:
        """Every number that a launch needs besides its tensors, as kernels/binding/rank.h unpacks them."""
        return [
            *self.shape.words(),
            self.rank,
            self.num_sms,
            int(self._limits.arrival * 1e9),
            int(self._limits.progress * 1e9),
            self._workspace.data_ptr(),
            self._record.data_ptr(),
            *self._symmetric.addresses,
        ]

    def new_summary(self) -> Tensor:
        return new_summary(self.shape.num_ranks, self.shape.num_local_experts, self.device)

    def call(self, launch: Callable[[Tensor, list[int]], None]) -> Tensor:
        """One launch in order, which fills a summary -> that, for `routing`; raises what earlier ones reported.

        With MEGA_MOE_DEBUG=1 what this one reports, too.
        """
        summary = self.new_summary()
        pending = self.take_pending()
        self._in_order(lambda: launch(summary, self.words()))
        if pending is not None:
            # After the launch, and not instead of it: the other ranks wait for this call, which did nothing wrong.
            raise pending
        if env.debug() and not torch.cuda.is_current_stream_capturing():
            self.check()
        return summary

    def routing(self, summary: Tensor) -> Routing:
        """Views of what a launch filled."""
        return routing_of(summary, self.shape.num_ranks, self.shape.num_local_experts)

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        """One launch of the routing kernel."""
        ids, weights = topk_idx.contiguous(), None if topk_weights is None else topk_weights.contiguous()
        return self.routing(
            self.call(lambda summary, words: library.require().route(ids, weights, summary, words, 0))
        )

    def refuse(self, num_tokens: int) -> None:
        """A launch in place of a call that this rank takes no part in: the other ranks' calls end at once."""
        if self.shape.num_ranks == 1 or self._lost is not None:
            return
        announced = num_tokens if num_tokens > self.shape.max_tokens else 1
        summary = self.new_summary()
        self._in_order(lambda: library.require().route(self._no_ids, None, summary, self.words(), announced))

    @contextlib.contextmanager
    def refuse_peers_on_oom(self) -> Iterator[None]:
        """Around what is allocated for a call, all of it before the launch: the other ranks wait for this one."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.refuse(0)
            raise

    def check(self) -> None:
        """Wait for the device and raise what its launches reported."""
        torch.cuda.synchronize(self.device)
        pending = self.take_pending()
        if pending is not None:
            raise pending
        if self.shape.canaries:
            broken = [gap for memory, layout in self._parts() for gap in broken_canaries(memory, layout)]
            if broken:
                raise MegaMoEError(f"a kernel wrote between the parts of the buffer, at bytes {broken}")

    def close(self) -> None:
        # The allocator may hand the memory to another stream at once.
        torch.cuda.synchronize(self.device)

    def take_pending(self) -> Exception | None:
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

    def _parts(self) -> tuple[tuple[Tensor, Layout], tuple[Tensor, Layout]]:
        return (self.memory[0], symmetric_layout(self.shape)), (self.memory[1], workspace_layout(self.shape))

    def _in_order(self, launch: Callable[[], None]) -> None:
        with torch.cuda.device(self.device), in_order(self.device, self._lane):
            launch()


@contextlib.contextmanager
def in_order(device: torch.device, lane: int = 0) -> Iterator[None]:
    """Around one launch on the current stream of ``device``: one after another in host order, whatever the streams.

    Launches wait for other ranks inside the kernel. In a capture the graph alone orders them.
    """
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    stream = torch.cuda.current_stream(device)
    key = (device.index or 0, lane)
    with _lock:
        before = _last.get(key)
        if before is not None and before[0] != stream:
            stream.wait_event(before[1])
        yield
        event = torch.cuda.Event() if before is None else before[1]
        event.record(stream)
        _last[key] = (stream, event)


def _new_record() -> Tensor:
    # Pinned: the device writes it, and the host reads it without a wait.
    return torch.zeros(faults.RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=True)
