"""``import deep_gemm`` resolves to this face: alongside an installed DeepGEMM, or as a stand-in for a missing one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

from mega_moe.api import explain
from mega_moe.deep_gemm.symm_buffer import MMA_TYPES, SymmBuffer, get_symm_buffer_for_mega_moe

_NAME = "deep_gemm"
NAMES = (
    "get_symm_buffer_for_mega_moe",
    "bf16_mega_moe",
    "bf16_mega_moe_backward",
    "fp8_mega_moe",
    "fp8_mega_moe_backward",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "set_num_sms",
    "get_num_sms",
)

_MISSING: Any = object()
# What `install` replaced in an installed DeepGEMM, by name; None while nothing is installed.
_replaced: dict[str, Any] | None = None


def serves(precision: str = "bf16") -> list[str]:
    """Why the fused kernels cannot serve ``precision`` on the current device; empty where they can."""
    explanation = explain(
        num_experts=8,
        max_tokens_per_rank=128,
        top_k=2,
        hidden=2048,
        intermediate=768,
        precision=precision,
        dtype=torch.bfloat16,
    )
    return list(explanation.verdict("fused").reasons)


def install() -> ModuleType:
    """Make ``import deep_gemm`` give these names, and return that module. A second call changes nothing.

    Where a DeepGEMM is installed, it stays, with all its names. Those of this face that it lacks are added; those that
    it has are replaced only where the fused kernels serve them on this device, and go on answering what the kernels do
    not: another ``mma_type``, its own buffers, its own number of SMs. Otherwise a stand-in holds these names alone.
    """
    global _replaced  # noqa: PLW0603 -- sys.modules, which this changes, is of the process as well
    if _replaced is not None:
        return sys.modules[_NAME]
    import mega_moe.deep_gemm as face

    able = frozenset(precision for precision in ("bf16", "fp8") if not serves(precision))
    module = _installed_one()
    if module is None:
        module = _StandIn(_NAME, "mega_moe's stand-in for DeepGEMM: its Mega MoE calls alone.")
        sys.modules[_NAME] = module
    _replaced = {}
    for name in NAMES:
        original, own = getattr(module, name, _MISSING), getattr(face, name)
        if original is not _MISSING:
            own = _beside(name, own, original, able)
        if own is not original:
            _replaced[name] = original
            setattr(module, name, own)
    return module


def uninstall() -> None:
    """Undo `install`; without one it does nothing. Modules that imported a name keep it."""
    global _replaced  # noqa: PLW0603
    if _replaced is None:
        return
    module = sys.modules[_NAME]
    if isinstance(module, _StandIn):
        del sys.modules[_NAME]
    else:
        for name, original in _replaced.items():
            if original is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, original)
    _replaced = None


def _beside(name: str, own: Any, original: Any, able: frozenset[str]) -> Any:
    """What ``name`` is in an installed DeepGEMM: ``own`` for what is ``able``, ``original`` for the rest."""
    if not able or name == "get_num_sms":
        return original
    if name == "set_num_sms":

        def both(num_sms: int) -> None:
            original(num_sms)
            own(num_sms)

        return both
    ours = _OURS.get(name, _has_own_buffer)

    @functools.wraps(own)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (own if ours(able, args, kwargs) else original)(*args, **kwargs)

    return choose


def _has_own_buffer(able: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, SymmBuffer) for value in (*args, *kwargs.values()))


def _wants_able_type(able: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        bound = inspect.signature(get_symm_buffer_for_mega_moe).bind(*args, **kwargs)
    except TypeError:  # an argument that only the original has
        return False
    bound.apply_defaults()
    return MMA_TYPES.get(bound.arguments["mma_type"]) in able


def _has_able_weights(able: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # fp8 weights come with their scales. Weights and buffer take the same way, so that none meets the other's kernel.
    first = args[0] if args else kwargs.get("l1_weights")
    return ("fp8" if isinstance(first, (tuple, list)) else "bf16") in able


_OURS = {
    "get_symm_buffer_for_mega_moe": _wants_able_type,
    "transform_weights_for_mega_moe": _has_able_weights,
    "transform_weights_for_mega_moe_sm90": _has_able_weights,
}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"deep_gemm.{name}: DeepGEMM itself is not installed, and mega_moe stands in for its Mega MoE calls alone "
            f"({', '.join(NAMES)})"
        )


def _installed_one() -> ModuleType | None:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    if importlib.util.find_spec(_NAME) is None:
        return None
    try:
        return importlib.import_module(_NAME)
    # It runs much at import: a missing compiler is an assertion there, a wrong driver an OSError.
    except Exception as error:  # noqa: BLE001
        sys.modules.pop(_NAME, None)
        text = f"the installed deep_gemm does not import ({type(error).__name__}: {error}); mega_moe stands in for it"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None
