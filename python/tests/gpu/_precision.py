"""Tests of both precisions: their kernels, and what judges their results.

bf16 is compared with fp64 alone. fp8 is within 1e-2 of the emulation over groups of tokens and in each weight's
gradient, and its error against fp64 within 1.05 times the emulation's.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from mega_moe._backends.kernel_backward import Gradients

from . import _backward, _backward_fp8, _forward, _forward_fp8
from ._forward import Layer

_WHY = _forward_fp8.why_no_kernel() or _backward_fp8.why_no_kernel()
FP8 = pytest.param("fp8", marks=pytest.mark.skipif(_WHY is not None, reason=str(_WHY)))
PRECISIONS = pytest.mark.parametrize("precision", ["bf16", FP8])


def assert_y_right(layer: Layer, y: Sequence[Tensor], precision: str) -> None:
    """The results of all ranks."""
    if precision == "bf16":
        _forward.assert_right(layer, y)
    else:
        _forward_fp8.Judge(layer).assert_right(y)


def assert_gradients_right(
    layer: Layer, dy: Sequence[Tensor], gradients: Sequence[Gradients], precision: str
) -> None:
    """The gradients of all ranks."""
    if precision == "bf16":
        _backward.assert_right(layer, dy, gradients)
    else:
        _backward_fp8.Judge(layer, dy).assert_right(gradients)


def hidden_of(precision: str, hidden: int) -> int:
    """The next H that the precision's kernels take."""
    multiple = 512 if precision == "fp8" else 256
    return -(-hidden // multiple) * multiple


__all__ = ["FP8", "PRECISIONS", "assert_gradients_right", "assert_y_right", "hidden_of"]
