"""An installed DeepGEMM: whether it is there, imports and has the grouped GEMMs that the backend calls.

Looked for only where there is a GPU, since its import does much: it may compile, and it needs a CUDA toolkit.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mega_moe._base.errors import LibraryError

_NAME = "deep_gemm"
_GEMMS = (
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "k_grouped_bf16_gemm_tn_contiguous",
)
# The rows of an expert start on a multiple of what this function returns; its name changed between versions.
_ALIGNMENTS = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")


class Gemms(NamedTuple):
    """The grouped GEMMs, on padded rows; ``alignment``: rows of an expert are padded to a multiple of it."""

    rows_nt: Callable[..., None]
    """(a [M, K], b [G, N, K], out [M, N], group of each row int32 or -1)"""
    rows_nn: Callable[..., None]
    """(a [M, K], b [G, K, N], out [M, N], group of each row)"""
    groups_tn: Callable[..., None]
    """(a [M, A], b [M, B], out fp32 [G, A, B], rows of each group as list, and as int32 tensor, what is added: out)"""
    alignment: int


@dataclass(frozen=True)
class Status:
    """``version`` where it can be used, else ``reason``."""

    version: str | None
    reason: str | None
    gemms: Gemms | None = None


def judge(module: Any) -> Status:
    """Whether an imported ``module`` has what the backend calls."""
    lacking = [name for name in _GEMMS if not hasattr(module, name)]
    aligned = [name for name in _ALIGNMENTS if hasattr(module, name)]
    if lacking or not aligned:
        names = ", ".join([*lacking, *([] if aligned else [" or ".join(_ALIGNMENTS)])])
        return Status(None, f"the installed deep_gemm has no {names}")
    rows_nt, rows_nn, groups_tn = (getattr(module, name) for name in _GEMMS)
    gemms = Gemms(rows_nt, rows_nn, groups_tn, int(getattr(module, aligned[0])()))
    return Status(str(getattr(module, "__version__", "unknown")), None, gemms)


@functools.cache
def status() -> Status:
    """Import it once and say how that went; never raises."""
    loaded = sys.modules.get(_NAME)
    # A stand-in for a missing one has no spec.
    if importlib.util.find_spec(_NAME) is None if loaded is None else loaded.__spec__ is None:
        return Status(None, "deep_gemm is not installed")
    try:
        module = importlib.import_module(_NAME)
    # A missing compiler is an assertion in its import, a wrong driver an OSError.
    except Exception as error:  # noqa: BLE001
        return Status(None, f"deep_gemm does not import ({type(error).__name__}: {error})")
    return judge(module)


def require() -> Gemms:
    """The GEMMs; LibraryError with the reason where there are none."""
    found = status()
    if found.gemms is None:
        raise LibraryError(found.reason)
    return found.gemms
