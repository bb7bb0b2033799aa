"""What reinforcement learning asks of routing: replay of given ids, and the load of the experts without a wait."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mega_moe.integrations.adapters import ExpertAdapter
from mega_moe.integrations.served import served_by

_ROUTERS = ("gate", "router")


class RoutingReplay:
    """Records the expert ids that the routers of a converted model choose, and replays ids of another run.

    An id of -1, given or recorded, is a slot without an expert: it adds nothing, and where a router divides by the sum
    of a token's weights it is not in it.

    A generator and a trainer round differently, so near ties send a token to other experts in each; replaying the
    generator's ids makes the trainer compute the same layers. Weights are the trainer's own for the given ids, so the
    router still gets its gradient.

    Args:
        model: after `convert`. The router of a layer is the child ``gate`` or ``router`` alongside its experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers: list[tuple[nn.Module, ExpertAdapter]] = []
        for name, module in model.named_modules():
            served = served_by(module)
            if served is None:
                continue
            router = _router_beside(model, name)
            if router is None:
                raise ValueError(
                    f"{name}: no router ({' or '.join(_ROUTERS)}) alongside it to record or to replay"
                )
            self._routers.append((router, served.adapter))

    @contextmanager
    def record(self) -> Iterator[list[list[Tensor]]]:
        """Inside, every forward appends its ids to the list of its layer; they stay on their device."""
        layers: list[list[Tensor]] = [[] for _ in self._routers]

        def keep(layer: int, adapter: ExpertAdapter, output: Any) -> None:
            layers[layer].append(adapter.ids(output).detach())

        handles = [
            router.register_forward_hook(
                lambda _m, _i, out, layer=layer, adapter=adapter: keep(layer, adapter, out)
            )
            for layer, (router, adapter) in enumerate(self._routers)
        ]
        try:
            yield layers
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def replay(self, ids: Sequence[Tensor]) -> Iterator[None]:
        """Inside, layer l routes by ``ids[l]``, global expert ids or -1, in the shape of its router's own.

        One forward and its backward belong inside: a checkpointed layer routes again when it is recomputed.
        """
        if len(ids) != len(self._routers):
            raise ValueError(f"ids: got {len(ids)} layers, want {len(self._routers)}")

        def change(router: nn.Module, adapter: ExpertAdapter, given: Tensor, output: Any) -> Any:
            own = adapter.ids(output)
            if given.shape != own.shape:
                raise ValueError(f"ids: got shape {tuple(given.shape)}, want the router's {tuple(own.shape)}")
            return adapter.reroute(router, output, given.to(own))

        handles = [
            router.register_forward_hook(
                lambda _m, _i, out, router=router, adapter=adapter, given=given: change(
                    router, adapter, given, out
                )
            )
            for (router, adapter), given in zip(self._routers, ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class LoadMeter:
    """Counts, on the device and without a wait for it, how many slots of this rank's tokens each expert gets.

    A call is counted when its gradient arrives, so once a step whatever is recomputed, and never in evaluation.

    Args:
        model: after `convert`.

    Attributes:
        tokens_per_expert: int64 ``[L, E]``, of the converted layers in order; layers with fewer experts end in zeros.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [served for module in model.modules() if (served := served_by(module)) is not None]
        if not layers:
            raise ValueError("model: no layer of it is converted")
        experts = max(served.sizes.num_experts for served in layers)
        device = layers[0].buffer.device
        self.tokens_per_expert = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        # On the device from the start: a later copy of it would wait for the device.
        self._num_experts = torch.tensor([served.sizes.num_experts for served in layers], device=device)
        self._layers = layers
        for layer, served in enumerate(layers):
            served.watch = functools.partial(self._watch, layer)

    def max_over_mean(self) -> Tensor:
        """``[L]``: load of the busiest expert over the mean one's, 1 where even; NaN before anything was counted."""
        counts = self.tokens_per_expert.double()
        return counts.amax(1) * self._num_experts / counts.sum(1)

    def reset(self) -> None:
        self.tokens_per_expert.zero_()

    def close(self) -> None:
        """Count no more."""
        for served in self._layers:
            served.watch = None

    def _watch(self, layer: int, y: Tensor, ids: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(lambda _: self._count(layer, ids))

    def _follow(self, device: torch.device) -> None:
        """Move with a model that went from the CPU to a GPU; of layers on several GPUs the first has the table."""
        if self.tokens_per_expert.device.type == "cpu" and device.type != "cpu":
            self.tokens_per_expert = self.tokens_per_expert.to(device)
            self._num_experts = self._num_experts.to(device)

    @torch.no_grad()
    def _count(self, layer: int, ids: Tensor) -> None:
        self._follow(ids.device)
        # From GPU to GPU, where layers lie on several; the host waits for neither.
        flat = ids.reshape(-1).to(self.tokens_per_expert.device, torch.int64, non_blocking=True)
        # Masked slots add zero to expert 0. scatter_add_ waits for nothing, which bincount does on a GPU.
        self.tokens_per_expert[layer].scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))


def _router_beside(model: nn.Module, name: str) -> nn.Module | None:
    """The router of the experts ``name``: a child of the nearest module above them that has one."""
    while name:
        name = name.rpartition(".")[0]
        for child in _ROUTERS:
            found = getattr(model.get_submodule(name), child, None)
            if isinstance(found, nn.Module):
                return found
    return None
