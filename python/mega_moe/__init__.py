"""Mixture-of-experts layers with expert parallelism. Importing this opens no library and makes no CUDA context."""

from __future__ import annotations

from mega_moe import nn
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

__all__ = [
    "Activation",
    "BackendRefusedError",
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


def __getattr__(name: str) -> str:
    # Read on demand: the metadata of a distribution costs file reads that an import should not pay.
    if name == "__version__":
        from mega_moe._backends.facts import package_version

        return package_version()
    raise AttributeError(f"module 'mega_moe' has no attribute {name!r}")
