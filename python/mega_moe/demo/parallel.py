"""Several processes: experts spread over the ranks (EP), everything else sharded with FSDP2.

The ranks form a grid [data, expert]. Ranks of one row (an EP group: one NVLink domain) hold different experts; rows
hold the same experts and split each expert's weights between them. All other weights are split over all ranks. So no
number is kept twice, whatever the grid, and a sum over all ranks of local sums is a sum over the whole model.

Gradients need no correction for the EP size: each rank's loss is its part of the global mean (its sum divided by the
global number of tokens), therefore every gradient is a plain sum over ranks. The combine's backward already adds up
what all ranks' tokens ask of an expert; FSDP2 is told to add and not to average.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mega_moe.demo.model import LanguageModel


@dataclass(frozen=True)
class Ranks:
    """This process's device and its place in the grid. `grid` is None in a run of a single process."""

    device: torch.device
    grid: DeviceMesh | None = None
    world: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return 0 if self.world is None else self.world.get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1 if self.world is None else self.world.size()

    @property
    def ep_size(self) -> int:
        """Number of ranks over which the experts are spread."""
        return 1 if self.grid is None else self.grid["expert"].size()

    @property
    def expert_rank(self) -> int:
        """This process's number within its EP group."""
        return 0 if self.grid is None else self.grid["expert"].get_local_rank()

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """What `MoEBuffer` wants: the EP group, or None where all experts live in one process."""
        return None if self.grid is None or self.ep_size == 1 else self.grid["expert"].get_group()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, the same on each. Not differentiable."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over all ranks, the same on each. Not differentiable."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world is not None:
            dist.barrier()

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a global batch, on its device."""
        return batch.chunk(self.world_size)[self.rank].to(self.device, non_blocking=True)

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        result = tensor.detach().clone()
        if self.world is not None:
            dist.all_reduce(result, op=op)
        return result


def connect(device: str | None = None, ep_size: int | None = None) -> Ranks:
    """Join the processes that torchrun started, or stand alone.

    device: "cpu" or "cuda" (default: cuda where there is one). ep_size: ranks in an EP group (default: all ranks of
    this host). Raises ValueError for a device that is not there and for an ep_size that does not divide the ranks.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"device is {kind!r}, must be 'cpu' or 'cuda' (torchrun's LOCAL_RANK picks the number)"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA device; `mega-moe doctor` says more")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ep_size is None:
        ep_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if ep_size < 1 or world_size % ep_size:
        raise ValueError(f"ep_size is {ep_size}, must divide the number of ranks {world_size}")
    place = torch.device(kind)
    if kind == "cuda":
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if world_size == 1:
        return Ranks(place)
    if kind == "cuda":
        dist.init_process_group("nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    grid = init_device_mesh(kind, (world_size // ep_size, ep_size), mesh_dim_names=("data", "expert"))
    return Ranks(place, grid, init_device_mesh(kind, (world_size,)))


def disconnect(ranks: Ranks) -> None:
    """Leave the process group that `connect` joined."""
    if ranks.world is not None:
        dist.destroy_process_group()


def shard(model: LanguageModel, ranks: Ranks) -> None:
    """Shard a model, whose experts are already this rank's own, in place. Call it after the weights are set."""
    if ranks.grid is None or ranks.world is None:
        return
    data = ranks.grid["data"]
    # Plain tensors that FSDP2 must leave alone, because nobody else holds these experts.
    whole: set[nn.Parameter] = set()
    for block in model.layers():
        if data.size() == 1:
            whole.update(block.experts.parameters())
        else:
            # By rows of each matrix and not by experts, of which there may be fewer than ranks.
            fully_shard(block.experts, mesh=data, shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=ranks.world, ignored_params=whole)
    fully_shard(model, mesh=ranks.world, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of one is otherwise sent as a scaled sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    """The part that lives here: a DTensor's local tensor, any other tensor itself. Shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_global(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """A parameter, or a tensor shaped like it, as the DTensor that a checkpoint needs to know its global place.

    Experts are plain tensors [E_local, ...] to their module; here they become one tensor [E, ...] by global expert
    index, so that a checkpoint holds all of them and may be read at another EP size. Shares memory with `tensor`.
    """
    tensor = tensor.detach()
    if ranks.grid is None or not is_expert(name):
        return tensor
    return DTensor.from_local(local(tensor), ranks.grid, [Shard(1), Shard(0)], run_check=False)


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to the experts."""
    return ".experts." in name


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, ranks: Ranks) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; return the norm before, on every rank.

    `torch.nn.utils.clip_grad_norm_` refuses gradients that live on two meshes, and would count a plain tensor as if
    every rank held the same one. Here every number is kept on exactly one rank, so squares simply add up.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    squares = torch.stack([g.float().square().sum() for g in gradients])
    norm = ranks.sum(squares.sum()).sqrt()
    torch._foreach_mul_(gradients, (max_norm / norm).clamp(max=1.0))
    return norm
