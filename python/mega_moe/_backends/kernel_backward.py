"""The fused backward of one rank: one launch for every gradient of the layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.summary import Routing, routing_of
from mega_moe._backends.weight_copies import WeightCopy
from mega_moe._ops import library


class Gradients(NamedTuple):
    """What a launch gave; None for what nobody wanted."""

    dx: Tensor | None  # [T, H] bf16
    dtopk: Tensor | None  # [T, K] fp32
    dw_gate_up: Tensor | None  # as the weights, bf16 or fp32
    dw_down: Tensor | None


class KernelBackward:
    """The fused backward kernel on the memory of ``kernels``. Launches never wait for the device.

    ``power_of_two``: in fp8 it rounds the scales of what it quantizes up to powers of two.
    """

    def __init__(self, kernels: KernelRank, power_of_two: bool = False) -> None:
        self._kernels = kernels
        self._power_of_two = power_of_two

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None = None,
        *,
        needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
        dw_dtype: torch.dtype = torch.bfloat16,
        into: tuple[Tensor | None, Tensor | None] | None = None,
        overwrite: bool = False,
        saved_gate_up: Tensor | None = None,
        copies: tuple[WeightCopy, WeightCopy] | None = None,
        delay_seed: int = 0,
        trace: Tensor | None = None,
    ) -> tuple[Gradients, Routing]:
        """-> gradients and the routing of the call, both on the current stream.

        Inputs as `KernelForward.forward` takes them, and dy as x. ``needs``: of x, topk_weights, w_gate_up, w_down; the
        first two alike on all ranks. ``into``: contiguous buffers of one dtype, bf16 or fp32, to which the weight
        gradients that are needed are added, or which they ``overwrite``; they are then None in the result.
        ``saved_gate_up``: what a forward of the same inputs left in it, on this rank; it changes no bit. Ranks may
        differ in the last four. ``copies`` of both weights make the launch one of the fp8 kernel, where ``kernels`` has
        its memory: all of w_gate_up, and the transposed one of w_down; the weights themselves are then not read.
        """
        kernels = self._kernels
        shape = kernels.shape
        none = torch.empty(0, device=x.device)
        dx = torch.empty_like(x) if needs[0] else none
        dtopk = torch.empty(topk_idx.shape, dtype=torch.float32, device=x.device) if needs[1] else none
        made = [
            none
            if not needed
            # Contiguous, whatever the weight is: in fp8 the kernel reads its copies alone.
            else torch.empty(weight.shape, dtype=dw_dtype, device=weight.device)
            if into is None
            else buffer
            for weight, needed, buffer in zip(
                (w_gate_up, w_down), needs[2:], (None, None) if into is None else into, strict=True
            )
        ]
        summary = kernels.new_summary()
        weights: tuple[Tensor | None, ...]
        # What the fp8 kernel alone takes: of the shape, and of the scales.
        form: tuple[bool, ...] = ()
        rounding: tuple[bool, ...] = ()
        if copies is None:
            op, weights = (
                "moe_backward",
                (w_gate_up, w_down, none if saved_gate_up is None else saved_gate_up),
            )
        elif saved_gate_up is not None:
            raise TypeError(
                "saved_gate_up: got a tensor, want None: the fp8 kernel computes gate and up again"
            )
        else:
            gate_up, down = copies
            op, form = "moe_backward_fp8", (shape.quantize, shape.quantize_gradients)
            rounding = (self._power_of_two,)
            weights = (gate_up.codes, gate_up.transposed, gate_up.scales, down.transposed, down.scales)
        kernels.call(
            lambda: getattr(library.require(), op)(
                x,
                dy,
                topk_idx,
                topk_weights,
                *weights,
                dx,
                dtopk,
                *made,
                summary,
                *kernels.addresses,
                shape.max_tokens,
                shape.num_experts,
                shape.pool_rows,
                shape.canaries,
                *form,
                kernels.rank,
                kernels.num_sms,
                *kernels.limits_ns,
                math.inf if clamp is None else clamp,
                *rounding,
                into is not None and not overwrite,
                delay_seed,
                0 if trace is None else trace.data_ptr(),
                0 if trace is None else trace.numel() * trace.element_size(),
            )
        )
        given = [gradient if needed and into is None else None for gradient, needed in zip(made, needs[2:])]
        got = Gradients(dx if needs[0] else None, dtopk if needs[1] else None, *given)
        return got, routing_of(summary, shape.num_ranks, shape.num_local_experts)
