"""Tensors as the kernels read them."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16  # bytes; what the kernels' bulk copies start on


def dense(value: Tensor) -> Tensor:
    """``value`` itself where it is contiguous and aligned, else a copy."""
    value = value.contiguous()
    return value.clone() if value.data_ptr() % ALIGNMENT else value
