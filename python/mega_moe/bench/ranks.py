"""The processes of one run and the device of this one: a single process, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """`group` is None for a single process, in which every reduction returns its argument."""

    device: torch.device
    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int

    def maximum(self, value: float) -> float:
        """Largest of the ranks' values. Collective."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def minimum(self, value: float) -> float:
        """Smallest of the ranks' values. Collective."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def barrier(self) -> None:
        """Returns when every rank has come here and its device is idle."""
        if self.group is not None:
            self.maximum(0.0)

    def first_reason(self, reason: str | None) -> str | None:
        """The reason of the lowest rank that has one, with its number; None when no rank has. Collective."""
        if self.group is None:
            return reason
        reasons: list[str | None] = [None] * self.num_ranks
        dist.all_gather_object(reasons, reason, group=self.group)
        for rank, found in enumerate(reasons):
            if found is not None:
                return f"rank {rank}: {found}"
        return None

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reduce(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation, group=self.group)
        return float(tensor.item())


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that torch appends."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def joined(device_type: str) -> Iterator[Context]:
    """This process's context; under torchrun it joins the group and leaves it at the end.

    `device_type` is cpu, cuda or auto (cuda where there is one). Raises ValueError when cuda is named and missing.
    """
    available = torch.cuda.is_available()
    if device_type == "cuda" and not available:
        raise ValueError("device: got 'cuda', wanted a device of this machine; torch sees no CUDA device")
    use_cuda = available if device_type == "auto" else device_type == "cuda"
    if not dist.is_torchelastic_launched():
        device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
        yield Context(device, None, 0, 1)
        return
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    try:
        yield Context(device, dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
