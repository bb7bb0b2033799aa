"""The only door to the compiled library. It is loaded on first need, never at import.

What the installed package says of itself can be read without torch, which `mega-moe doctor` does where it is missing.
"""

from __future__ import annotations

import functools
import json
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_moe._base.errors import LibraryError

_FOLDER = Path(__file__).resolve().parent.parent / "_lib"
TORCH_FLOOR = (2, 10)


@dataclass(frozen=True)
class LibraryStatus:
    """Whether the compiled library is in this process; ``reason`` says why not, ``build`` is its build.json."""

    loaded: bool
    reason: str | None
    path: str
    build: dict[str, Any] = field(default_factory=dict)


def package_version() -> str:
    """Version of the installed distribution; '0+unknown' when the package is not installed."""
    from importlib import metadata

    try:
        return metadata.version("mega-moe")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def build_record() -> dict[str, Any]:
    """build.json of the wheel (CUDA version, architectures, hash of the kernel sources); empty when it is missing."""
    return _json("build.json")


@functools.cache
def wheel_record() -> dict[str, Any]:
    """wheel.json (label, commit, flavours that are published, code); empty where no published wheel is installed."""
    return _json("wheel.json")


def _json(name: str) -> dict[str, Any]:
    path = _FOLDER / name
    if not path.is_file():
        return {}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


@functools.cache
def status() -> LibraryStatus:
    """Load the library once and say how that went; never raises."""
    import torch

    path = _FOLDER / "mega_moe_ops.so"
    if torch_version() < TORCH_FLOOR:
        want = ".".join(map(str, TORCH_FLOOR))
        return LibraryStatus(
            False, f"torch is {torch.__version__}, the library needs torch >= {want}", str(path)
        )
    if not path.is_file():
        why = f"{path} is missing: this is not an installed mega-moe wheel"
        if build_record().get("architectures") == []:
            why = "this build holds no kernels, it was made with MEGA_MOE_BUILD_KERNELS=0"
        return LibraryStatus(False, why, str(path))
    try:
        torch.ops.load_library(str(path))  # noqa: TID251 - the one place
    except OSError as error:
        why = str(error.__cause__ or error)  # newer torch hides the linker's words behind its own
        return LibraryStatus(False, f"{path} does not load: {why}{_glibc(why)}", str(path))
    return LibraryStatus(True, None, str(path), build_record())


def _glibc(error: str) -> str:
    """What the linker's word about a missing symbol version means; empty for other errors."""
    wanted = re.search(r"version `GLIBC_([\d.]+)' not found", error)
    if wanted is None:
        return ""
    have = platform.libc_ver()[1] or "unknown"
    return f"; this system's glibc is {have}, the wheel needs {wanted[1]} or newer"


def require() -> Any:
    """The op namespace of the compiled library; LibraryError with the reason where it cannot be loaded."""
    current = status()
    if not current.loaded:
        raise LibraryError(current.reason)
    import torch

    return torch.ops.mega_moe_kernels


@functools.cache
def variants() -> tuple[dict[str, Any], ...]:
    """The compiled kernels that variants.json of the wheel lists; empty when the file is missing."""
    return tuple(_json("variants.json").get("variants", ()))
