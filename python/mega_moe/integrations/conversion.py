"""Switch a model's MoE layers in place: find them, judge them all, build the buffers, and only then change anything."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mega_moe._backends.choice.facts import as_device
from mega_moe._base.activation import Activation, as_activation
from mega_moe.buffer import MoEBuffer
from mega_moe.integrations.adapters import ExpertAdapter, Sizes
from mega_moe.integrations.config import DispatchConfig
from mega_moe.integrations.served import DeviceBuffers, Served, forward_fault, served_by, switch, unswitch
from mega_moe.integrations.torchtitan import TorchTitanExperts
from mega_moe.integrations.transformers_experts import TransformersExperts

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
    _sites: tuple[tuple[weakref.ref[nn.Module], ExpertAdapter], ...] = field(repr=False)
    _buffers: tuple[DeviceBuffers, ...] = field(repr=False)

    @property
    def buffers(self) -> tuple[MoEBuffer, ...]:
        """One for each size of layer and each device that such layers lie on or were called on."""
        return tuple(buffer for buffers in self._buffers for buffer in buffers)

    @property
    def reason(self) -> str:
        """The backend of each buffer, and why it is not the fused one where it is not."""
        return "; ".join(buffer.reason for buffer in self.buffers)

    def destroy(self) -> None:
        """Give the buffers back and undo the switch: the layers compute by themselves, and may be converted again.

        For memory that another program needs for a while, or for longer sequences. Backwards that are still to come
        raise. Experts that are spread over ranks stay so, and raise when called before the next `convert`.
        """
        for reference, adapter in self._sites:
            module = reference()
            served = None if module is None else served_by(adapter.owner(module))
            if module is not None and served is not None and served.buffers in self._buffers:
                unswitch(module, adapter)
        for buffers in self._buffers:
            buffers.destroy()


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
    activation: Activation | None = None,
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
            Layers on several devices get a buffer on each, and a model that is moved later gets its buffers in its
            first call there, which is then collective over ``mesh``.
        activation: of experts whose own has no clamp; default: what the model's own experts compute.
        activation_clamp: short for ``Activation(clamp=...)``; both together are a ValueError.
        adapters: for experts of one's own, see `ExpertAdapter`.

    Raises:
        ValueError, TypeError: the model has no such layer, or one cannot be switched, with every reason; nothing was
            changed.
        BackendRefusedError: no backend, or not the named one, can serve a layer's size; nothing was changed.
    """
    sites = find(model, adapters)
    if not sites:
        known = ", ".join(adapter.family for adapter in (*adapters, *ADAPTERS))
        raise ValueError(
            f"model: {type(model).__name__} has no MoE layer of a known family ({known}){_unknown(model)}"
        )
    chosen = [sites[index] for index in config.select(len(sites))]
    faults = list(_faults(chosen))
    if faults:
        raise ValueError(
            "model: these layers cannot be switched:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    tokens = config.max_tokens_per_rank or sequence_length
    if tokens is None:
        raise ValueError("max_tokens_per_rank: not set, and no sequence_length was given")
    given = activation is not None or activation_clamp is not None
    asked = as_activation(activation, activation_clamp) if given else None
    activations = [_activation(site, asked) for site in chosen]
    group = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
    buffers: dict[tuple[Sizes, torch.device | None], DeviceBuffers] = {}
    try:
        for site in chosen:
            key = site.adapter.sizes(site.module), _device(site, device)
            if key not in buffers:

                def build(where: torch.device | None, of_x: torch.dtype, sizes: Sizes = key[0]) -> MoEBuffer:
                    return MoEBuffer(
                        group,
                        **sizes._asdict(),
                        max_tokens_per_rank=tokens,
                        precision=config.precision,
                        dw_precision=config.dw_precision,
                        scale_format=config.scale_format,
                        backend=config.backend,
                        dtype=of_x,
                        device=where,
                        num_reserved_sms=config.num_reserved_sms,
                        save_gate_up=config.save_gate_up,
                        strict=config.strict,
                    )

                of_x = dtype or site.adapter.dtype or _weight(site).dtype
                buffers[key] = DeviceBuffers(build, key[1], of_x)
    except Exception:
        for built in buffers.values():
            built.destroy()
        raise
    for site, act in zip(chosen, activations):
        sizes = site.adapter.sizes(site.module)
        own = buffers[sizes, _device(site, device)]
        if mesh is not None and mesh.size() > 1:
            _spread(site, mesh)
        switch(site.module, Served(site.adapter, own, next(iter(own)), site.name, sizes, act))
    kept = tuple(site.name for site in sites if site not in chosen)
    switched = tuple((weakref.ref(site.module), site.adapter) for site in chosen)
    return Converted(tuple(site.name for site in chosen), kept, switched, tuple(buffers.values()))


def _unknown(model: nn.Module) -> str:
    """The classes of modules that may well be experts: their own parameters have a dimension more than matrices."""
    kinds = dict.fromkeys(
        f"{type(module).__module__}.{type(module).__qualname__}"
        for module in model.modules()
        if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    )
    if not kinds:
        return "; no module of it holds weights [experts, out, in] either"
    return (
        f": {', '.join(kinds)} may be experts, but have neither gate_up_proj, down_proj and the marks of transformers' "
        "experts nor TorchTitan's token_dispatcher and inner_experts; for others give convert() an adapter"
    )


def _faults(sites: list[Site]) -> Iterator[str]:
    for site in sites:
        if served_by(site.adapter.owner(site.module)) is not None:
            yield f"{site.name}: is switched already"
        owner = site.adapter.owner(site.module)
        own = [
            fault
            for part in dict.fromkeys((site.module, owner))
            if (fault := forward_fault(part)) is not None
        ]
        for reason in (*site.adapter.refusals(site.module), *own):
            yield f"{site.name} ({type(site.module).__name__}): {reason}"


def _activation(site: Site, asked: Activation | None) -> Activation:
    own = site.adapter.activation(site.module)
    if asked is None or asked == own:
        return own
    if asked.kind != own.kind or own.clamp is not None:
        raise ValueError(f"activation: got {asked}, the experts of {site.name} have {own}")
    return asked


def _weight(site: Site) -> Tensor:
    weight: Tensor = getattr(site.adapter.owner(site.module), site.adapter.parameters[0])
    return weight


def _device(site: Site, asked: torch.device | str | None) -> torch.device | None:
    device = _weight(site).device if asked is None else as_device(asked)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
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
