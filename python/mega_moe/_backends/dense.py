"""Tensors as the kernels read and write them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_moe._base.layer import Gradients

ALIGNMENT = 16  # bytes; what the kernels' bulk copies start on


def dense(value: Tensor) -> Tensor:
    """``value`` itself where it is contiguous and aligned, else a copy."""
    value = value.contiguous()
    return value.clone() if value.data_ptr() % ALIGNMENT else value


def writable(gradients: Sequence[Tensor]) -> bool:
    """Whether the kernel can write weight gradients as these lie in memory."""
    return all(
        g.is_contiguous()
        and g.data_ptr() % ALIGNMENT == 0
        and g.dtype in (torch.bfloat16, torch.float32)
        and g.dtype == gradients[0].dtype
        for g in gradients
    )


def add_into(buffers: tuple[Tensor, Tensor] | None, gradients: Gradients) -> Gradients:
    """Adds the weights' gradients to the caller's ``buffers``, where there are any -> the others."""
    if buffers is None:
        return gradients
    for buffer, gradient in zip(buffers, gradients[2:], strict=True):
        if gradient is not None:
            buffer.add_(gradient)
    return Gradients(gradients.dx, gradients.dtopk)
