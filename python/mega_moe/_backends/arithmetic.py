"""What a backend computes on the rows of its local experts; dispatch and combine around it are in `plain`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# x as it travels to the experts: (rows,) or (codes, scales).
Payload = tuple[Tensor, ...]


class RowGrads(NamedTuple):
    """Gradients of one rank's rows: ``dx [M, H]``, ``dw [M]`` of the routing weights, and of the local weights."""

    dx: Tensor | None
    dw: Tensor | None
    dw_gate_up: Tensor | None
    dw_down: Tensor | None


class Arithmetic(Protocol):
    """Rows are in canonical order; ``counts`` holds the rows of each local expert and sums to M."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of x and the weights."""
        ...

    @property
    def quantized_dispatch(self) -> bool:
        """Whether x travels as e4m3 codes and scales in forward."""
        ...

    def forward(
        self,
        x: Payload,
        weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        counts: list[int],
        clamp: float | None,
    ) -> Tensor:
        """-> ``o [M, H]``, rounded to the weights' dtype."""
        ...

    def backward(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        counts: list[int],
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
    ) -> RowGrads: ...

    def sum_slots(self, rows: Tensor) -> Tensor:
        """``rows [T, K, H]`` -> their sum over K in a fixed order, wide ``[T, H]``."""
        ...
