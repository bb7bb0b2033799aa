"""The memory of the kernels for one buffer: its shape, its bytes, and the collective that builds it."""

from __future__ import annotations

from typing import Any

import torch

from mega_moe._backends.control import Control
from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.pools import pool_rows
from mega_moe._backends.request import Request
from mega_moe._backends.symmetric import Shape, of_group, of_one_rank, symmetric_layout, workspace_layout
from mega_moe._base import env
from mega_moe._base.mode import Mode


def kernel_shape(request: Request, fused: bool, backward: bool = False) -> Shape:
    """What both layouts depend on; ``fused``: with what the fused kernels need; ``backward``: of both directions."""
    # Without the fused kernels the staging area is laid out for x in bf16, which every precision stages in one
    # direction and which is the larger.
    return Shape(
        request.max_tokens_per_rank,
        request.top_k,
        request.num_experts,
        request.hidden,
        request.num_ranks,
        intermediate=request.intermediate if fused else 0,
        pool_rows=pool_rows(request) if fused else 0,
        mode=request.mode(backward=backward) if fused else Mode(),
        canaries=env.debug(),
    )


def kernel_nbytes(request: Request, fused: bool, backward: bool = False) -> int:
    """Bytes of the part that peers reach and of the workspace, on each rank."""
    shape = kernel_shape(request, fused, backward)
    return symmetric_layout(shape).total + workspace_layout(shape).total


def build_kernel_rank(
    request: Request,
    fused: bool,
    backward: bool,
    num_sms: int,
    device: torch.device,
    control: Control,
    group: Any,
    progress_timeout: float,
) -> KernelRank:
    """Collective over ``group``. ``num_sms``: at most so many are used by a launch."""
    shape = kernel_shape(request, fused, backward)
    nbytes = symmetric_layout(shape).total
    memory = of_one_rank(nbytes, device) if group is None else of_group(nbytes, device, group, control)
    return KernelRank(
        shape,
        control.rank,
        memory,
        num_sms=num_sms,
        arrival_timeout=progress_timeout if control.timeout is None else control.timeout,
        progress_timeout=progress_timeout,
    )
