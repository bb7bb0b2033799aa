"""FLOP formulas of the layer for torch's FlopCounterMode: the GEMMs of a call's own slots, nothing recomputed."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def register() -> None:
    """Once torch's counter was imported by somebody: importing it costs seconds, which no other call shall pay."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None or torch.ops.mega_moe.run in counter.flop_registry:
        return
    formulas = {
        "run": _run,
        "run_saving": _run_saving,
        "run_out": _run_saving,
        "backward": _backward,
        "backward_into": _backward,
        "backward_out": _backward_out,
    }
    for name, formula in formulas.items():
        target = getattr(torch.ops.mega_moe, name)
        counter.register_flop_formula(target)(formula)
        # A counter that is open already has its own copy of the table.
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "counter") and hasattr(mode.counter, "flop_registry"):
                mode.counter.flop_registry[target] = counter.flop_registry[target]


def _run(token: Any, *others: Any, **_: Any) -> int:
    return 6 * _size_of_gemm(others)


def _run_saving(*shapes: Any, **_: Any) -> int:
    return 6 * _size_of_gemm(shapes)


def _backward(dy: Any, *others: Any, **_: Any) -> int:
    x, _weights, gate_up, down = others[-2]  # needs
    # dh always; dx and dW of gate and up are twice as wide.
    return int(2 + 4 * x + 4 * gate_up + 2 * down) * _size_of_gemm(others)


def _backward_out(dy: Any, *others: Any, **_: Any) -> int:
    return 12 * _size_of_gemm(others)


def _size_of_gemm(inputs: Any) -> int:
    """T K H I, half of the FLOPs of a GEMM of H x I, from the shapes of the layer's five inputs."""
    tokens, top_k = inputs[1]
    _, hidden, intermediate = inputs[4]
    return int(tokens * top_k * hidden * intermediate)
