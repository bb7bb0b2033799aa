"""FSDP2 with expert parallelism over a grid of ranks, one gradient norm over both meshes, and selective checkpointing.

The ranks form a grid [data, expert]: ranks of one row (an NVLink domain) hold different experts, the rows hold the same
ones and split each expert's matrices. Everything else is split over all ranks. Expert parameters are DTensors of their
full shape, so optimizers, `torch.distributed.checkpoint` and a later run with another grid see whole experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mega_moe.integrations.served import served_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


class Meshes(NamedTuple):
    """``world`` has all ranks in one dimension; ``data`` and ``expert`` are this rank's column and row of the grid."""

    world: DeviceMesh
    data: DeviceMesh
    expert: DeviceMesh


def make_meshes(device_type: str, ep_size: int) -> Meshes:
    """Grid of all ranks with ``ep_size`` ranks in a row. Collective over all ranks, which torch.distributed knows.

    Neighbouring ranks share the experts: with torchrun a row stays inside one machine when ``ep_size`` divides the
    ranks of a machine.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    if ep_size < 1 or size % ep_size:
        raise ValueError(f"ep_size: got {ep_size}, want a divisor of the {size} ranks")
    grid = init_device_mesh(device_type, (size // ep_size, ep_size), mesh_dim_names=("data", "expert"))
    return Meshes(init_device_mesh(device_type, (size,)), grid["data"], grid["expert"])


def shard(
    model: nn.Module,
    meshes: Meshes,
    blocks: Iterable[nn.Module],
    *,
    gradients: Literal["sum", "mean"] = "mean",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """`fully_shard` a converted model: each switched layer's experts over ``data``, blocks and the rest over all ranks.

    Args:
        model: after `convert` with ``mesh=meshes.expert``.
        meshes: of `make_meshes`.
        blocks: the transformer blocks, each gathered and freed as one.
        gradients: "mean" for a loss that is the mean over the rank's own tokens, "sum" for one that is the rank's part
            of the global mean. Experts' gradients hold the tokens of all ranks of their row, so they are divided by
            the number of all ranks where the others are averaged over them.
        mp_policy: mixed precision, for all parameters alike.
        reshard_after_forward: as of `fully_shard`.
        offload_policy: as of `fully_shard`, for all parameters alike. With torch's CPUOffloadPolicy shards, gradients
            and the optimizer's state lie on the CPU; `convert` must then have been given the device of the calls,
            or a model that lay there.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    policy = mp_policy or MixedPrecisionPolicy()
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    if offload_policy is not None:
        if meshes.world.device_type == "cpu" and getattr(offload_policy, "pin_memory", False):
            # Nothing is copied to a device, and torch pins memory only where there is one.
            offload_policy = dataclasses.replace(offload_policy, pin_memory=False)  # type: ignore[call-arg]
        options["offload_policy"] = offload_policy
    # Experts are given what the model computes, routing weights in fp32 among it.
    as_given = {
        **options,
        "mp_policy": MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False),
    }
    divisor = 1.0 if gradients == "sum" else float(meshes.world.size())
    served = {module: found for module in model.modules() if (found := served_by(module)) is not None}
    for module, layer in served.items():
        # By rows of each matrix and not by experts, of which there may be fewer than ranks.
        fully_shard(module, mesh=meshes.data, shard_placement_fn=lambda _: Shard(1), **as_given)
        if meshes.data.size() == 1:
            layer.gradient_scale = 1 / divisor
    for block in blocks:
        fully_shard(block, mesh=meshes.world, **options)
    fully_shard(model, mesh=meshes.world, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # One rank reduces nothing, and versions of torch differ in whether it divides then.
            alone = module in served and meshes.data.size() == 1
            module.set_gradient_divide_factor(1.0 if alone else divisor)
            # Such a factor is otherwise sent as a scaled sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over parameters on several meshes, which that function refuses. Collective.

    Returns the norm of all gradients before clipping as a plain tensor, equal on all ranks and to that of one process.
    Gradients that are no DTensors are taken to be equal on all ranks.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    groups: dict[Any, list[Tensor]] = {}
    for parameter in given:
        if (grad := parameter.grad) is not None:
            mesh, placements = getattr(grad, "device_mesh", None), getattr(grad, "placements", ())
            groups.setdefault((mesh, placements, grad.device), []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    norms = [_norm_of(group, mesh, placements, norm_type) for (mesh, placements, _), group in groups.items()]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(total)}")
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm_of(parameters: list[Tensor], mesh: Any, placements: tuple[Any, ...], norm_type: float) -> Tensor:
    """Norm of gradients that all lie alike; a dimension of the mesh that does not split them is not added up."""
    import torch.distributed as dist

    grads: list[Any] = [parameter.grad for parameter in parameters]
    local: list[Tensor] = [grad.to_local() if mesh is not None else grad for grad in grads]
    held = [grad for grad in local if grad.numel()]  # a rank may hold no row of a small matrix
    norm = (
        torch.nn.utils.get_total_norm(held, norm_type)
        if held
        else local[0].new_zeros((), dtype=torch.float32)
    )
    largest = math.isinf(norm_type)
    norm = norm if largest else norm**norm_type
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"parameters: a gradient is placed as {placements}, want shards or replicas")
        if placement.is_shard():
            dist.all_reduce(norm, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, mesh.get_group(axis))
    return norm if largest else norm ** (1 / norm_type)


def keep_moe_outputs() -> Callable[[], tuple[Any, Any]]:
    """``context_fn`` of `torch.utils.checkpoint.checkpoint`: keep y of each MoE layer, recompute everything else.

    For blocks in which something after the layer saves its input, such as a norm: y is then kept, T x H numbers,
    and the layer's forward, with its exchange between the ranks, runs once a step.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return partial(create_selective_checkpoint_contexts, [torch.ops.mega_moe.run.default])
