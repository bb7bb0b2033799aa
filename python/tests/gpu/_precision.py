"""Tests of all precisions: their kernels, and what judges their results. "fp8_dw": weight gradients in fp8 too.

bf16 is compared with fp64 alone. fp8 is within 3e-3 of the emulation over groups of tokens and in each weight's
gradient, and its error against fp64 within 1.05 times the emulation's.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from mega_moe._backends.fused.memory import Shape
from mega_moe._base.layer import Gradients

from . import _backward, _backward_fp8, _forward, _forward_fp8
from ._forward import Layer

_WHY = _forward_fp8.why_no_kernel() or _backward_fp8.why_no_kernel()
FP8 = pytest.param("fp8", marks=pytest.mark.skipif(_WHY is not None, reason=str(_WHY)))
_WHY_DW = _WHY or _backward_fp8.why_no_gradients()
FP8_DW = pytest.param("fp8_dw", marks=pytest.mark.skipif(_WHY_DW is not None, reason=str(_WHY_DW)))
PRECISIONS = pytest.mark.parametrize("precision", ["bf16", FP8])
OF_BACKWARD = pytest.mark.parametrize("precision", ["bf16", FP8, FP8_DW])


def assert_y_right(layer: Layer, y: Sequence[Tensor], precision: str) -> None:
    """The results of all ranks."""
    if precision == "bf16":
        _forward.assert_right(layer, y)
    else:
        _forward_fp8.Judge(layer).assert_right(y)


def assert_gradients_right(
    layer: Layer, dy: Sequence[Tensor], gradients: Sequence[Gradients], shape: Shape
) -> None:
    """The gradients of all ranks on buffers of that shape."""
    if shape.mode.backward == "fp8":
        _backward_fp8.Judge(layer, dy, shape).assert_right(gradients)
    else:
        _backward.assert_right(layer, dy, gradients)


def hidden_of(precision: str, hidden: int) -> int:
    """The next H that the precision's kernels take."""
    multiple = 512 if precision in ("fp8", "fp8_dw") else 256
    return -(-hidden // multiple) * multiple


__all__ = [
    "FP8",
    "FP8_DW",
    "OF_BACKWARD",
    "PRECISIONS",
    "assert_gradients_right",
    "assert_y_right",
    "hidden_of",
]
