"""Integer handles of live buffers.

Ops take a handle instead of the workspace, so that functionalisation never clones memory whose address peers know.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from mega_moe._base.activation import Activation
from mega_moe._base.errors import MegaMoEError
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs


class Executor(Protocol):
    """What a backend gives to the operators: the two directions of one layer, on real tensors."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Accepted dtypes of x and the weights."""
        ...

    def forward(
        self,
        inputs: LayerInputs,
        activation: Activation,
        saved_rows: int | None = None,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """-> y, and with ``saved_rows`` gate and up for the backward, ``[saved_rows, 2I]`` in x's dtype.

        Nobody else can read what is saved. MegaMoEError from a backend that saves nothing. ``out``: is y, overwritten.
        ``received`` int32 ``[E_local]``: to it the rows of each expert are added.
        """
        ...

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
        """Gradients that are needed; ``into``: buffers to which those of the weights are added with one rounding.

        ``out``: all four, overwritten; ``dw_dtype`` is then at least as wide as the weights' of them.
        """
        ...

    def refuse(self, error: Exception, num_tokens: int) -> None:
        """Let the other ranks raise PeerError for the call that this rank answers with ``error``."""
        ...


_handles = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()


def register(executor: Executor) -> int:
    handle = next(_handles)
    _live[handle] = executor
    return handle


def unregister(handle: int) -> None:
    _live.pop(handle, None)


def get(handle: int) -> Executor:
    executor = _live.get(handle)
    if executor is None:
        raise MegaMoEError(
            f"buffer {handle} was destroyed or dropped; keep the MoEBuffer until backward has run"
        )
    return executor
