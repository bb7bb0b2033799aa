"""transformers' own switch: with this module imported, ``experts_implementation="mega_moe"`` means this library.

``from_pretrained(..., experts_implementation="mega_moe")`` and ``set_experts_implementation("mega_moe")`` then serve
every family whose experts lie as `mega_moe.integrations.convert` takes them. Buffers come with the first call, from
the shapes that it has, and are shared by layers of one size. Over expert-parallel ranks of transformers' own,
``DistributedConfig(ep_implementation="mega_moe")`` exchanges the tokens inside the kernels.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from mega_moe._base.activation import SWIGLU, Activation
from mega_moe._base.errors import BackendRefusedError
from mega_moe.integrations.adapters import Arguments, local
from mega_moe.integrations.config import DispatchConfig
from mega_moe.integrations.served import autocast_dtype, compute, making_a_graph
from mega_moe.integrations.shared_buffers import SharedBuffer, keep_for_backward, shared_buffer
from mega_moe.integrations.transformers_experts import TransformersExperts
from mega_moe.nn import in_shape_of

try:
    from transformers import PreTrainedModel
    from transformers import __version__ as _version
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        f"mega_moe.integrations.transformers: needs transformers 5.7.0 or later, with torch: {error}"
    ) from error

NAME = "mega_moe"
LOWEST = "5.7.0"
"""The first transformers that looks names up in the registry; older ones compare with a list of their own."""
_LAYER = "_mega_moe_layer"
_adapter = TransformersExperts()
_log = logging.getLogger(__name__)


class _Settings:
    """What `register` was given. A layer that was judged under other settings is judged again."""

    config: DispatchConfig | None = None
    otherwise: str | None = None


_settings = _Settings()


class _Layer:
    """What the switch knows of one module of experts."""

    def __init__(self, settings: _Settings, activation: Activation, shared: SharedBuffer | None) -> None:
        self.settings = settings
        self.activation = activation
        self.shared = shared
        """None: transformers' implementation ``settings.otherwise`` computes instead."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied model makes its own with its first call.
        return type(None), ()


def register(config: DispatchConfig | None = None, *, otherwise: str | None = None) -> None:
    """Register with transformers, or register again with other settings. Importing this module does it with none.

    Args:
        config: precision, backend and the rest of every buffer, for layers "all"; ``max_tokens_per_rank`` is what a
            buffer starts with, and over expert-parallel ranks what it holds for good. None: the defaults of
            `DispatchConfig`, and no reserved SMs in a process without other ranks.
        otherwise: name of one of transformers' implementations, such as "grouped_mm", for experts that this library
            refuses, with a warning that has the reason. None: the refusal is raised.

    Raises:
        ValueError: ``config`` selects layers, or transformers has no implementation ``otherwise``.
        RuntimeError: this transformers takes no registered implementation, as none before 5.7.0 does.
    """
    global _settings  # noqa: PLW0603
    if config is not None and config.layers != "all":
        raise ValueError(
            f'layers: got {config.layers!r}, want "all": transformers switches whole models, convert() layers'
        )
    ExpertsInterface.register(NAME, experts_forward)
    known = set(ExpertsInterface()) - {NAME}  # type: ignore[no-untyped-call, unused-ignore]
    if otherwise is not None and otherwise not in known:
        raise ValueError(f"otherwise: got {otherwise!r}, want one of {', '.join(sorted(known))}")
    try:
        PreTrainedModel.get_correct_experts_implementation(cast("Any", None), NAME)
    except ValueError as error:
        raise RuntimeError(
            f"transformers {_version} takes no experts implementation but its own: use {LOWEST} or later, or "
            "mega_moe.integrations.convert"
        ) from error
    _register_refusal_of_fp8()
    _register_expert_parallel()
    _settings = _Settings()
    _settings.config, _settings.otherwise = config, otherwise


def reserve(model: nn.Module, tokens: int) -> None:
    """Judge the experts of ``model`` and build their buffers for calls of up to ``tokens`` tokens, before any call.

    For a model whose first call is already compiled as one graph or captured, where nothing can be built. The number
    of slots a token comes from the configuration, the device from the weights.
    """
    for module in model.modules():
        if _adapter.matches(module):
            gate_up, _ = _adapter.weights(module)
            top_k = _adapter.top_k(module)
            _prepare(module, tokens, top_k, gate_up.device, autocast_dtype(gate_up) or gate_up.dtype)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls with a module of experts: ``[T, H]``, ids and weights ``[T, K]`` -> ``[T, H]``.

    Ids of the module's own experts; where it is one of several expert-parallel ranks, those that it lacks are masked.
    """
    x, ids = hidden_states, top_k_index
    tokens, top_k = x.shape[:-1].numel(), ids.shape[-1]
    dtype = _dtype(self, x)
    layer: _Layer | None = getattr(self, _LAYER, None)
    if not _serves(layer, tokens, top_k, x.device, dtype):
        layer = _prepare(self, tokens, top_k, x.device, dtype)
    assert layer is not None
    if layer.shared is None:
        own: Any = ExpertsInterface()[layer.settings.otherwise]  # type: ignore[no-untyped-call, unused-ignore]
        result: Tensor = own(self, hidden_states, top_k_index, top_k_weights)
        return result
    gate_up, down = (local(weight) for weight in _adapter.weights(self))
    if getattr(self, "_is_expert_parallel", False):
        ids = ids.masked_fill(ids >= gate_up.shape[0], -1)
    buffer = layer.shared.use()
    y, _ = compute(Arguments(x, ids, top_k_weights), (gate_up, down), buffer, dtype, layer.activation)
    keep_for_backward(y, buffer)
    return in_shape_of(x, y).to(x.dtype)


def _dtype(module: nn.Module, x: Tensor) -> torch.dtype:
    weight: Any = getattr(module, "gate_up_proj", x)
    return autocast_dtype(x) or weight.dtype


def _serves(layer: _Layer | None, tokens: int, top_k: int, device: torch.device, dtype: torch.dtype) -> bool:
    if layer is None or layer.settings is not _settings:
        return False
    return layer.shared is None or layer.shared.fits(tokens, top_k, device, dtype)


_IN_A_GRAPH = (
    "the first call of so many tokens is in a compiled or captured graph, where no buffer can be built: make one such "
    "call outside it, or call mega_moe.integrations.transformers.reserve"
)


# Not traced: where the compiler may break the graph, the buffer is built between its parts.
@torch.compiler.disable(reason=_IN_A_GRAPH)  # type: ignore[untyped-decorator, unused-ignore]
def _prepare(module: nn.Module, tokens: int, top_k: int, device: torch.device, dtype: torch.dtype) -> _Layer:
    """Judge the module, find or build its buffer, and keep both with the module."""
    if making_a_graph():
        raise RuntimeError(f"{type(module).__name__} of {tokens} tokens: {_IN_A_GRAPH}")
    settings = _settings
    try:
        layer = _judged(module, settings, tokens, top_k, device, dtype)
    except (ValueError, BackendRefusedError) as error:
        if settings.otherwise is None:
            raise
        warnings.warn(f"{error}; {settings.otherwise} computes them instead", UserWarning, stacklevel=2)
        layer = _Layer(settings, SWIGLU, None)
    setattr(module, _LAYER, layer)
    return layer


def _judged(
    module: nn.Module, settings: _Settings, tokens: int, top_k: int, device: torch.device, dtype: torch.dtype
) -> _Layer:
    kind = type(module).__name__
    if faults := _adapter.layout_faults(module):
        raise ValueError(f'{kind}: experts_implementation="{NAME}" cannot serve it: ' + "; ".join(faults))
    gate_up, down = (local(weight) for weight in _adapter.weights(module))
    sizes = (gate_up.shape[0], top_k, gate_up.shape[2], down.shape[2])
    shared = shared_buffer(sizes, device, dtype, settings.config, None)
    if shared.grow(tokens):
        _say(shared)
    return _Layer(settings, _adapter.activation(module), shared)


_said: set[str] = set()


def _say(shared: SharedBuffer) -> None:
    # A choice that falls back has warned with the reason already.
    backend = shared.buffer.backend
    if backend not in _said and (backend == "fused" or shared.config.backend != "auto"):
        _said.add(backend)
        _log.warning("experts of transformers are served by mega_moe: %s", shared.buffer.reason)


def _refuse_fp8(self: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        f'{type(self).__name__}: experts_implementation="{NAME}" takes bf16 or fp32 weights, these are quantized to '
        'fp8: load them dequantized, and ask for fp8 products with register(DispatchConfig(precision="fp8"))'
    )


def _register_refusal_of_fp8() -> None:
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:
        return  # this transformers has no registry of their own for them
    FP8ExpertsInterface.register(NAME, _refuse_fp8)


def _register_expert_parallel() -> None:
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return  # this transformers has no such door, or torch no torch.distributed
    from mega_moe.integrations.transformers_ep import ExpertParallel

    EPImplementationInterface.register(NAME, ExpertParallel)


def settings_of_expert_parallel() -> DispatchConfig | None:
    """The ``config`` of the last `register`."""
    return _settings.config


register()
