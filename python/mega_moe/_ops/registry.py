"""Integer handles of live buffers.

Ops take a handle instead of the workspace, so that functionalisation never clones memory whose address peers know.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mega_moe._base.errors import MegaMoEError


class Executor(Protocol):
    """What an op needs of a backend: the two directions of one layer, on real tensors."""

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
    ) -> Tensor: ...

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...


@runtime_checkable
class Saver(Protocol):
    """An executor that can keep gate and up of a forward for its backward. The tensor means nothing to others."""

    def forward_saving(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """-> y, and ``[rows, 2I]`` in x's dtype."""
        ...

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
        saved_gate_up: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...


@runtime_checkable
class Accumulator(Protocol):
    """An executor that may add weight gradients into given buffers itself; a `Saver` with a kernel for the backward."""

    def backward_into(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        into: tuple[Tensor, Tensor],
        saved_gate_up: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None] | None:
        """-> gradients of x and of the routing weights; None where it cannot, and has done nothing."""
        ...


_handles = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()


def register(executor: Executor) -> int:
    handle = next(_handles)
    _live[handle] = executor
    return handle


def unregister(handle: int) -> None:
    _live.pop(handle, None)


def get_saver(handle: int) -> Saver:
    executor = get(handle)
    if not isinstance(executor, Saver):
        raise MegaMoEError(f"the backend of buffer {handle} saves no gate and up, and was given some")
    return executor


def get(handle: int) -> Executor:
    executor = _live.get(handle)
    if executor is None:
        raise MegaMoEError(
            f"buffer {handle} was destroyed or dropped; keep the MoEBuffer until backward has run"
        )
    return executor
