"""Buffers that come with the first call and grow with the calls, shared by all layers of one size."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._base.types import MAX_TOKENS_PER_RANK
from mega_moe.buffer import MoEBuffer
from mega_moe.integrations.adapters import Sizes
from mega_moe.integrations.config import DispatchConfig
from mega_moe.integrations.served import making_a_graph

if TYPE_CHECKING:
    import torch.distributed as dist

_STEP = 256
"""Tokens that a buffer's capacity is a multiple of."""


class SharedBuffer:
    """One buffer at a time, replaced by a larger one when a call has more tokens than it holds.

    A replaced buffer lives as long as a backward may come that needs it: in autograd's graph, and for good where a
    compiled or captured graph has its address.
    """

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        config: DispatchConfig,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.sizes, self.device, self.dtype, self.config, self.group = sizes, device, dtype, config, group
        self._buffer: MoEBuffer | None = None
        self._in_graph = False
        self._kept: list[MoEBuffer] = []

    @property
    def buffer(self) -> MoEBuffer:
        assert self._buffer is not None
        return self._buffer

    def fits(self, tokens: int, top_k: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a call of this form can be made now."""
        if self._buffer is None or tokens > self._buffer.max_tokens_per_rank:
            return False
        return top_k == self.sizes.top_k and device == self.device and dtype == self.dtype

    def use(self) -> MoEBuffer:
        """The buffer, for a call that is made now."""
        if not self._in_graph and making_a_graph():
            self._in_graph = True
        return self.buffer

    def grow(self, tokens: int) -> bool:
        """Have room for ``tokens``; whether that took a new buffer. Collective over the group."""
        old, backend = self._buffer, self.config.backend
        wanted = max(tokens, 1)
        if old is None:
            wanted = max(wanted, self.config.max_tokens_per_rank or 1)
        elif tokens <= old.max_tokens_per_rank:
            return False
        else:
            # By half at least, so that slowly growing calls do not each build one; and by the backend that was chosen.
            wanted, backend = max(wanted, old.max_tokens_per_rank * 3 // 2), old.backend
        wanted = max(tokens, min(-(-wanted // _STEP) * _STEP, MAX_TOKENS_PER_RANK))
        config = self.config
        # A tensor made in inference mode, as by generate(), could not be written to in training.
        with torch.inference_mode(False):
            self._buffer = MoEBuffer(
                self.group,
                **self.sizes._asdict(),
                max_tokens_per_rank=wanted,
                precision=config.precision,
                dw_precision=config.dw_precision,
                scale_format=config.scale_format,
                backend=backend,
                dtype=self.dtype,
                device=self.device,
                num_reserved_sms=config.num_reserved_sms,
                save_gate_up=config.save_gate_up,
                strict=config.strict,
            )
        if old is not None and self._in_graph:
            self._kept.append(old)
        self._in_graph = False
        return True


class _Key(NamedTuple):
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    config: DispatchConfig
    group: Any


# Held by the layers that use them: with the last model of a size goes its buffer.
_shared: weakref.WeakValueDictionary[_Key, SharedBuffer] = weakref.WeakValueDictionary()


def shared_buffer(
    sizes: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    config: DispatchConfig | None,
    group: dist.ProcessGroup | None,
) -> SharedBuffer:
    """The one of this form, made now where there is none; it has no buffer before the first `SharedBuffer.grow`."""
    if config is None:
        config = DispatchConfig() if _has_other_ranks() else DispatchConfig(num_reserved_sms=0)
    key = _Key(Sizes(*sizes), device, dtype, config, group)
    found = _shared.get(key)
    if found is None:
        found = SharedBuffer(*key)
        _shared[key] = found
    return found


def keep_for_backward(y: Tensor, buffer: MoEBuffer) -> None:
    """Let autograd's graph behind ``y`` own the buffer: its backward may come when a larger one has its place."""
    if not torch.compiler.is_compiling() and y.grad_fn is not None:
        metadata: Any = y.grad_fn.metadata
        metadata["mega_moe buffer"] = buffer


def _has_other_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
