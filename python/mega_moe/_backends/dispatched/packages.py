"""Installed packages that move tokens: whether they are there, import and have what the engines call.

Looked for only where an engine is named, since their imports set environment variables and compile.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mega_moe._base.errors import LibraryError

# By engine: the module, the distribution, and names of which the module needs one each.
_NEEDED: dict[str, tuple[str, str, tuple[tuple[str, ...], ...]]] = {
    "deep_ep": ("deep_ep", "deep_ep", (("EPBuffer", "ElasticBuffer"),)),
    "nccl_ep": ("nccl.ep", "nccl-extensions", (("Group",), ("GroupConfig",), ("PassDir",), ("Tensor",))),
}


@dataclass(frozen=True)
class Status:
    """``version`` where the package can be used, else ``reason``."""

    version: str | None
    reason: str | None
    module: Any = None


@functools.cache
def status(engine: str) -> Status:
    """Import the package of ``engine`` once and say how that went; never raises."""
    name, distribution, needed = _NEEDED[engine]
    try:
        # Of the outer package: looking for "nccl.ep" would import it.
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return Status(None, f"{name} is not installed ({distribution})")
        module = importlib.import_module(name)
    # A missing compiler or a wrong NCCL is an assertion in an import, a wrong driver an OSError.
    except Exception as error:  # noqa: BLE001
        return Status(None, f"{name} does not import ({type(error).__name__}: {error})")
    lacking = [" or ".join(names) for names in needed if not any(hasattr(module, n) for n in names)]
    if lacking:
        return Status(None, f"the installed {name} has no {', '.join(lacking)}")
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    return Status(version, None, module)


def require(engine: str) -> Any:
    """The module; LibraryError with the reason where it cannot be used."""
    found = status(engine)
    if found.reason is not None:
        raise LibraryError(found.reason)
    return found.module
