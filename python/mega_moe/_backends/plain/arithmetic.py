"""What a backend computes on the rows of its local experts; `executor` has dispatch and combine around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.plain.activation import wide
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, Needs

# x as it travels to the experts: (rows,), or (e4m3 codes, scale factors).
Payload = tuple[Tensor, ...]


class Experts(NamedTuple):
    """This rank's experts for one call: weights ``[E_local, 2I, H]`` and ``[E_local, H, I]``, rows of each, activation.

    The M rows are in canonical order, so expert e has the ``counts[e]`` rows after those of the experts before it.
    """

    gate_up: Tensor
    down: Tensor
    counts: list[int]
    activation: Activation


class Arithmetic(ABC):
    """``weight [M]``: the routing weight of each row, wide; ``dtypes``: of x and the weights."""

    dtypes: tuple[torch.dtype, ...]

    def payload(self, x: Tensor) -> Payload:
        """``x [T, H]`` as a forward dispatches it."""
        return (x,)

    @abstractmethod
    def forward(self, x: Payload, weight: Tensor, experts: Experts) -> Tensor:
        """-> ``o [M, H]``, rounded to the weights' dtype."""

    @abstractmethod
    def backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, experts: Experts, needs: Needs, dw_dtype: torch.dtype
    ) -> Gradients:
        """From ``x`` and ``dy [M, H]``: dx ``[M, H]``, dtopk ``[M]`` and dW in ``dw_dtype``, where needed."""

    def sum_slots(self, rows: Tensor) -> Tensor:
        """``rows [T, K, H]`` -> their sum over K in a fixed order, wide ``[T, H]``."""
        return rows.sum(1, dtype=wide(rows.dtype))
