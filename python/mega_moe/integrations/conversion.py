"""Switch a model's MoE layers in place: find them, judge them all, build the buffers, and only then change anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mega_moe.buffer import MoEBuffer
from mega_moe.integrations.adapters import ExpertAdapter, Served, Sizes, served_by, switch
from mega_moe.integrations.config import DispatchConfig
from mega_moe.integrations.torchtitan import TorchTitanExperts
from mega_moe.integrations.transformers import TransformersExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ADAPTERS: tuple[ExpertAdapter, ...] = (TransformersExperts(), TorchTitanExperts())


class Site(NamedTuple):
    """One MoE layer of a model."""

    name: str
    module: nn.Module
    adapter: ExpertAdapter


@dataclass(frozen=True)
class Converted:
    """What `convert` did. Keep it, or the model, until the last backward has run."""

    layers: tuple[str, ...]
    """Names of the switched modules."""
    kept: tuple[str, ...]
    """Names of the MoE layers that were left as they are."""
    buffers: tuple[MoEBuffer, ...]
    """One for each size of layer."""

    @property
    def reason(self) -> str:
        """The backend of each buffer, and why it is not the fused one where it is not."""
        return "; ".join(buffer.reason for buffer in self.buffers)

    def destroy(self) -> None:
        """Give the buffers back; the switched modules raise when called afterwards."""
        for buffer in self.buffers:
            buffer.destroy()


def find(model: nn.Module, adapters: Sequence[ExpertAdapter] = ()) -> list[Site]:
    """The MoE layers of a model, in the order of its modules. ``adapters`` are asked before the package's own."""
    sites = []
    for name, module in model.named_modules():
        for adapter in (*adapters, *ADAPTERS):
            if adapter.matches(module):
                sites.append(Site(name, module, adapter))
                break
    return sites


def convert(
    model: nn.Module,
    config: DispatchConfig,
    *,
    sequence_length: int | None = None,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    activation_clamp: float | None = None,
    adapters: Sequence[ExpertAdapter] = (),
) -> Converted:
    """Let this library serve the MoE layers of ``model`` that ``config`` selects. Collective over ``mesh``.

    Parameters keep their names and, seen as a whole, their shapes: a checkpoint of the converted model loads into an
    unconverted one. Call it before `fully_shard` or `shard`, on a model that holds all experts or lies on the meta
    device.

    Args:
        model: with experts of transformers, of TorchTitan or of a family that one of ``adapters`` knows.
        config: see `DispatchConfig`.
        sequence_length: tokens of one call where ``config`` does not say.
        mesh: one dimension, the ranks that share the experts; each expert parameter becomes a DTensor of which this
            rank holds its part. None: this process holds all experts.
        dtype: of x in the calls, as far as it decides the choice of the backend; default: the weights' own. With mixed
            precision over fp32 weights it is the precision's.
        device: where the calls run; default: the weights' device, or for weights on the meta device the current GPU.
        activation_clamp: see `mega_moe.moe`.
        adapters: for experts of one's own, see `ExpertAdapter`.

    Raises:
        ValueError, TypeError: the model has no such layer, or one cannot be switched, with every reason; nothing was
            changed.
        BackendRefusedError: no backend, or not the named one, can serve a layer's size; nothing was changed.
    """
    sites = find(model, adapters)
    if not sites:
        known = ", ".join(adapter.family for adapter in (*adapters, *ADAPTERS))
        raise ValueError(f"model: {type(model).__name__} has no MoE layer of a known family ({known})")
    chosen = [sites[index] for index in config.select(len(sites))]
    faults = list(_faults(chosen))
    if faults:
        raise ValueError(
            "model: these layers cannot be switched:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    tokens = config.max_tokens_per_rank or sequence_length
    if tokens is None:
        raise ValueError("max_tokens_per_rank: not set, and no sequence_length was given")
    buffers: dict[Sizes, MoEBuffer] = {}
    try:
        for site in chosen:
            sizes = site.adapter.sizes(site.module)
            if sizes not in buffers:
                buffers[sizes] = MoEBuffer(
                    mesh.get_group() if mesh is not None and mesh.size() > 1 else None,
                    **sizes._asdict(),
                    max_tokens_per_rank=tokens,
                    precision=config.precision,
                    dw_precision=config.dw_precision,
                    scale_format=config.scale_format,
                    backend=config.backend,
                    dtype=dtype or site.adapter.dtype or _weight(site).dtype,
                    device=device or _device(site),
                    num_reserved_sms=config.num_reserved_sms,
                    save_gate_up=config.save_gate_up,
                    strict=config.strict,
                )
    except Exception:
        for buffer in buffers.values():
            buffer.destroy()
        raise
    for site in chosen:
        sizes = site.adapter.sizes(site.module)
        if mesh is not None and mesh.size() > 1:
            _spread(site, mesh)
        switch(site.module, Served(site.adapter, buffers[sizes], site.name, sizes, activation_clamp))
    kept = tuple(site.name for site in sites if site not in chosen)
    return Converted(tuple(site.name for site in chosen), kept, tuple(buffers.values()))


def _faults(sites: list[Site]) -> Iterator[str]:
    for site in sites:
        if served_by(site.adapter.owner(site.module)) is not None:
            yield f"{site.name}: is switched already"
        for reason in site.adapter.refusals(site.module):
            yield f"{site.name} ({type(site.module).__name__}): {reason}"


def _weight(site: Site) -> Tensor:
    weight: Tensor = getattr(site.adapter.owner(site.module), site.adapter.parameters[0])
    return weight


def _device(site: Site) -> torch.device | None:
    device = _weight(site).device
    return None if device.type == "meta" else device


def _spread(site: Site, mesh: DeviceMesh) -> None:
    """Keep this rank's experts alone, as the local part of one tensor over ``mesh``."""
    from torch.distributed.tensor import DTensor, Shard

    owner = site.adapter.owner(site.module)
    for name in site.adapter.parameters:
        whole = getattr(owner, name)
        if isinstance(whole, DTensor):  # the trainer has spread it
            continue
        local = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(owner, name, nn.Parameter(spread, requires_grad=whole.requires_grad))
