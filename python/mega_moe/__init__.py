"""Mixture-of-experts layers with expert parallelism.

Importing this reads nothing but itself: each name brings its module, and with it torch, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_moe import nn
    from mega_moe._backends.dispatched.protocol import DispatchedTokens, Dispatcher
    from mega_moe._base.activation import Activation
    from mega_moe._base.errors import (
        BackendRefusedError,
        FallbackWarning,
        LibraryError,
        MegaMoEError,
        PeerError,
        RankTimeoutError,
    )
    from mega_moe.api import explain, moe, route
    from mega_moe.buffer import MoEBuffer

    __version__: str

__all__ = [
    "Activation",
    "BackendRefusedError",
    "DispatchedTokens",
    "Dispatcher",
    "FallbackWarning",
    "LibraryError",
    "MegaMoEError",
    "MoEBuffer",
    "PeerError",
    "RankTimeoutError",
    "__version__",
    "explain",
    "moe",
    "nn",
    "route",
]

_MODULES = {
    "Activation": "_base.activation",
    "DispatchedTokens": "_backends.dispatched.protocol",
    "Dispatcher": "_backends.dispatched.protocol",
    "MoEBuffer": "buffer",
    "explain": "api",
    "moe": "api",
    "nn": "nn",
    "route": "api",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mega_moe' has no attribute {name!r}")
    if name == "__version__":
        from mega_moe._ops.library import package_version

        return package_version()
    module = import_module(f"mega_moe.{_MODULES.get(name, '_base.errors')}")
    found = module if name == "nn" else getattr(module, name)
    globals()[name] = found  # the next use costs no call
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
