"""What a backend computes on the rows of its local experts; dispatch and combine around it are in `plain`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mega_moe._base.activation import Activation

# x as it travels to the experts: (rows,) or (codes, scales).
Payload = tuple[Tensor, ...]


class RowGrads(NamedTuple):
    """Gradients of one rank's rows: ``dx [M, H]``, ``dw [M]`` of the routing weights, and of the local weights."""

    dx: Tensor | None
    dw: Tensor | None
    dw_gate_up: Tensor | None
    dw_down: Tensor | None


class Experts(NamedTuple):
    """This rank's experts for one call: weights ``[E_local, 2I, H]`` and ``[E_local, H, I]``, rows of each, activation.

    The M rows are in canonical order, so expert e has the ``counts[e]`` rows after those of the experts before it.
    """

    gate_up: Tensor
    down: Tensor
    counts: list[int]
    activation: Activation


class Wanted(NamedTuple):
    """Which gradients a backward computes, and the dtype of those of the experts' weights."""

    dx: bool
    dw: bool
    gate_up: bool
    down: bool
    dw_dtype: torch.dtype


class Arithmetic(Protocol):
    """``weight [M]``: the routing weight of each row, wide."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of x and the weights."""
        ...

    @property
    def quantized_dispatch(self) -> bool:
        """Whether x travels as e4m3 codes and scales in forward."""
        ...

    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        """-> ``o [M, H]``, rounded to the weights' dtype."""
        ...

    def backward(self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, wanted: Wanted) -> RowGrads:
        """From ``x`` and ``dy [M, H]``; what is not wanted is None."""
        ...

    def sum_slots(self, rows: Tensor) -> Tensor:
        """``rows [T, K, H]`` -> their sum over K in a fixed order, wide ``[T, H]``."""
        ...
