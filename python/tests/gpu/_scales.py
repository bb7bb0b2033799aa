"""The scale factors that kernels leave in their memory, and how they are judged."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.memory import workspace_layout


def assert_powers_of_two(scales: Tensor, written: int) -> None:
    """At least ``written`` of them are numbers above 0, and these are powers of two; what nobody wrote is NaN."""
    numbers = scales[scales.isfinite()].double()
    assert len(numbers) >= written, f"{len(numbers)} scales are numbers, want {written}"
    mantissa, _ = torch.frexp(numbers)
    others = int((mantissa != 0.5).sum())
    assert others == 0, f"{others} of {len(numbers)} scales are no powers of two"


def part_of(kernels: KernelRank, name: str, dtype: torch.dtype, columns: int) -> Tensor:
    """Rows of one part of the workspace."""
    return workspace_layout(kernels.shape).view(kernels.memory[1], name, dtype).view(-1, columns)


def scales_of(kernels: KernelRank, name: str, groups: int) -> Tensor:
    """fp32 ``[rows, groups]`` of a pool in which the scales of 128 rows and one group are one run."""
    runs = part_of(kernels, name, torch.float32, 128)
    return runs.view(-1, groups, 128).transpose(1, 2).reshape(-1, groups)
