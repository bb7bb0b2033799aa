"""TorchTitan 0.3's own trainer: the routed experts as an override of its configuration, nothing else changed.

Switched on from its command line or `OverrideConfig`::

    --override.imports 'mega_moe.integrations.torchtitan_trainer.routed_experts={"max_tokens_per_rank": 16384}'

Importing this module imports torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

from mega_moe.api import moe
from mega_moe.integrations.config import DispatchConfig
from mega_moe.integrations.shared_buffers import SharedBuffer, keep_for_backward, shared_buffer
from mega_moe.nn import in_shape_of

_SETTINGS = tuple(field.name for field in fields(DispatchConfig) if field.name != "layers")


class FusedGateUpExperts(Module):
    """This rank's expert weights, gate and up projection as one parameter, which the kernels read without a copy.

    Parameters: ``gate_up_EGD [E_local, 2F, D]``, F gate rows then F up rows, and ``w2_EDF [E_local, D, F]``. A state
    dict has TorchTitan's own ``w1_EFD`` (gate) and ``w3_EFD`` (up) in the place of the first.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """D, F and the number of experts over all ranks."""

        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_EGD = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Both weights as this rank's plain tensors."""
        gate_up, down = (
            p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_up_EGD, self.w2_EDF)
        )
        return gate_up, down


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    gate, up = state.pop(f"{prefix}gate_up_EGD").chunk(2, dim=1)
    down = state.pop(f"{prefix}w2_EDF")
    state |= {f"{prefix}w1_EFD": gate, f"{prefix}w2_EDF": down, f"{prefix}w3_EFD": up}


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    names = (f"{prefix}w1_EFD", f"{prefix}w3_EFD")
    # With one of them only, load_state_dict reports gate_up_EGD as missing and the other as unexpected.
    if all(name in state for name in names):
        state[f"{prefix}gate_up_EGD"] = torch.cat([state.pop(name) for name in names], dim=1)


class MegaMoERoutedExperts(RoutedExperts):
    """`mega_moe.moe` in the place of dispatch, grouped GEMMs and combine."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """TorchTitan's, and fields of `mega_moe.integrations.DispatchConfig`."""

        settings: dict[str, Any]

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.inner_experts = config.inner_experts.build()
        self.top_k = config.token_dispatcher.top_k
        self.dispatch_config = DispatchConfig(**config.settings)
        experts = config.inner_experts
        self.sizes = (experts.num_experts, self.top_k, experts.dim, experts.hidden_dim)
        self._ep_group: Any = None
        self._shared: SharedBuffer | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """As TorchTitan's, and remember the expert-parallel group. Tensor parallelism inside an expert is refused."""
        if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise ValueError(
                f"tensor_parallel_degree: got {parallel_dims.tp} with expert_parallel_degree 1, which shards each "
                "expert; want expert_parallel_degree > 1, which shards the tokens instead"
            )
        Module.parallelize(self, parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        self._ep_group = None if mesh is None else mesh.get_group()

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        # Every rank comes here, layer by layer and before the first step: the one place where a collective
        # construction can neither be traced by torch.compile nor recomputed by a checkpoint.
        if self.dispatch_config.max_tokens_per_rank is not None:
            device = buffer_device or self.inner_experts.w2_EDF.device
            self._buffer(self.dispatch_config.max_tokens_per_rank, torch.device(device))

    def _buffer(self, tokens: int, device: torch.device) -> SharedBuffer:
        """The buffer of all layers of this size, with room for ``tokens``; collective where it has to be built."""
        if self._shared is None:
            if torch.compiler.is_compiling():
                raise ValueError(
                    "max_tokens_per_rank: got None under torch.compile, want the tokens of one call, as in "
                    "--override.imports '...routed_experts={\"max_tokens_per_rank\": 16384}'"
                )
            self._shared = shared_buffer(
                self.sizes, device, torch.bfloat16, self.dispatch_config, self._ep_group
            )
        if not torch.compiler.is_compiling():
            self._shared.grow(tokens)
        return self._shared

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """As TorchTitan's: ``[B, L, D]`` and routing ``[B, L, K]`` to ``[B, L, D]``, computed in bf16."""
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        gate_up, down = self.inner_experts()
        buffer = self._buffer(len(x_TD), x_TD.device).use()
        y = moe(
            x_TD.bfloat16(),
            topk_expert_ids_BLK.reshape(-1, self.top_k),
            topk_scores_BLK.reshape(-1, self.top_k),
            gate_up.bfloat16(),
            down.bfloat16(),
            buffer=buffer,
        )
        keep_for_backward(y, buffer)
        return in_shape_of(x_BLD, y).type_as(x_BLD)


@override(
    target=RoutedExperts.Config,
    exact=True,
    description="mega-moe: dispatch, expert GEMMs and combine in one kernel a direction",
)
def routed_experts(config: RoutedExperts.Config, **settings: Any) -> MegaMoERoutedExperts.Config:
    """The routed experts of one MoE layer, served by mega-moe.

    Args:
        config: TorchTitan's own.
        settings: fields of `mega_moe.integrations.DispatchConfig`, without ``layers`` (name layers by ``fqns`` of an
            override of your own). With ``--compile.enable`` `max_tokens_per_rank` must be among them.

    Raises:
        ValueError: the experts are a subclass of `GroupedExperts` (another precision or activation), or a setting is
            unknown or does not fit; the message names it.
    """
    experts = config.inner_experts
    if type(experts) is not GroupedExperts.Config:
        raise ValueError(
            f"inner_experts: got {type(experts).__qualname__}, want GroupedExperts.Config: bf16, SwiGLU, no biases"
        )
    for name in settings:
        if name not in _SETTINGS:
            raise ValueError(f"{name}: no such setting, want {', '.join(_SETTINGS)}")
    DispatchConfig(**settings)  # refused here, before anything is built
    sharding = experts.sharding_config
    if sharding is not None:
        sharding = replace(sharding, state_shardings=_renamed(sharding.state_shardings))
    inner = FusedGateUpExperts.Config(
        dim=experts.dim,
        hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        param_init=_initializers(experts.param_init),
        sharding_config=sharding,
    )
    return MegaMoERoutedExperts.Config(
        inner_experts=inner,
        token_dispatcher=config.token_dispatcher,
        param_init=config.param_init,
        sharding_config=config.sharding_config,
        settings=settings,
    )


def _renamed(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """``by_name`` for the fused parameter, which is laid out as its gate rows were."""
    kept = {name: value for name, value in by_name.items() if name not in ("w1_EFD", "w3_EFD")}
    return {"gate_up_EGD": by_name["w1_EFD"], **kept} if "w1_EFD" in by_name else kept


def _initializers(by_name: Mapping[str, Callable[[Tensor], Any]] | None) -> dict[str, Any] | None:
    if by_name is None:
        return None
    return {**_renamed(by_name), "gate_up_EGD": partial(_init_halves, by_name["w1_EFD"], by_name["w3_EFD"])}


def _init_halves(gate: Callable[[Tensor], Any], up: Callable[[Tensor], Any], weight: Tensor) -> None:
    for initialize, half in zip((gate, up), weight.chunk(2, dim=1), strict=True):
        initialize(half)
