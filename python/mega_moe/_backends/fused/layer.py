"""The fused kernels of one rank: one launch for the layer, and one for every gradient of it."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.memory import as_written
from mega_moe._backends.fused.weight_copies import WeightCopy
from mega_moe._base.activation import SWIGLU, Activation
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs
from mega_moe._ops import library

# w_gate_up and w_down.
Copies = tuple[WeightCopy, WeightCopy]

_EVERYTHING = Needs()


class KernelLayer:
    """Both kernels on the memory of ``kernels``. Launches never wait for the device.

    Inputs are contiguous, with 16-byte aligned rows: x, dy, y and dx bf16 ``[T, H]``, ids int32 or int64 and weights
    fp32 or bf16 ``[T, K]``, the experts' weights bf16. Where the mode of ``kernels`` is fp8 the kernels read
    ``copies`` of both weights instead. A bad id, a refusal or a lost rank makes the results NaN; the next call
    or `KernelRank.check` raises. ``delay_seed`` other than 0 delays the communication at random; ``trace`` int64
    ``[CTAs, 5, events, 3]``, zero, makes the launch one of the tracing kernel.
    """

    def __init__(self, kernels: KernelRank) -> None:
        self._kernels = kernels

    def forward(
        self,
        inputs: LayerInputs,
        activation: Activation = SWIGLU,
        *,
        copies: Copies | None = None,
        saved_gate_up: Tensor | None = None,
        out: Tensor | None = None,
        delay_seed: int = 0,
        trace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> y ``[T, H]`` bf16, which is ``out`` if given, and the call's summary for `KernelRank.routing`, both on the
        current stream.

        In fp8, x may also be the first rows of `KernelRank.staged_codes`, with their scales. ``saved_gate_up`` bf16
        ``[SavedRows.slots(T), 2I]`` is filled for `backward`, in an order of the kernels' own.
        """
        x, topk_idx, topk_weights, *_ = inputs
        weights: tuple[Tensor | None, ...] = (inputs.w_gate_up, inputs.w_down, None, None)
        if copies is not None:
            gate_up, down = copies
            weights = (gate_up.codes, down.codes, gate_up.scales, down.scales)
        if out is None:
            y = out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        else:
            (y,) = as_written(out, read=(x, topk_idx, topk_weights, *weights))
        summary = self._kernels.call(
            lambda summary, words: library.require().moe_forward(
                x,
                topk_idx,
                topk_weights,
                *weights,
                y,
                saved_gate_up,
                summary,
                words,
                *activation.arguments(),
                trace,
                delay_seed,
            )
        )
        return (out if out is y else out.copy_(y)), summary

    def backward(
        self,
        dy: Tensor,
        inputs: LayerInputs,
        activation: Activation = SWIGLU,
        *,
        needs: Needs = _EVERYTHING,
        dw_dtype: torch.dtype = torch.bfloat16,
        into: tuple[Tensor | None, Tensor | None] | None = None,
        out: Outputs | None = None,
        copies: Copies | None = None,
        saved_gate_up: Tensor | None = None,
        delay_seed: int = 0,
        trace: Tensor | None = None,
    ) -> tuple[Gradients, Tensor]:
        """-> gradients (dtopk fp32) and the call's summary for `KernelRank.routing`, both on the current stream.

        ``needs``: the first two alike on all ranks. ``into``: contiguous buffers of one dtype, bf16 or fp32, to which
        the weight gradients that are needed are added; they are then None in the result. ``out``: all four, in place of
        new memory; what the kernel cannot write as it lies is copied there. ``saved_gate_up``: what a forward of the
        same inputs left in it, on this rank; it changes bits of "fp8_bwd" alone. Ranks may differ in these. ``copies``:
        all of w_gate_up, and the transposed one of w_down; of the weights themselves the shapes alone are then read.
        """
        x, topk_idx, topk_weights, w_gate_up, w_down = inputs
        weights: tuple[Tensor | None, ...] = (w_gate_up, w_down, None, None, None, None)
        if copies is not None:
            gate_up, down = copies
            weights = (gate_up.codes, None, gate_up.transposed, down.transposed, gate_up.scales, down.scales)
        # Contiguous, whatever the weight is: in fp8 the kernel reads its copies alone.
        forms = (
            (x.shape, x.dtype),
            (topk_idx.shape, torch.float32),
            (w_gate_up.shape, dw_dtype),
            (w_down.shape, dw_dtype),
        )
        given = Gradients(None, None, *into) if into is not None else Gradients()
        if out is not None:
            read = (dy, x, topk_idx, topk_weights, *weights)
            dx, dtopk, *dw = out
            rows = *as_written(dx, read=read), *as_written(dtopk, read=read)
            given = Gradients(*rows, *as_written(*dw, read=read))
        results = Gradients(
            *(
                (torch.empty(shape, dtype=dtype, device=x.device) if own is None else own) if needed else None
                for (shape, dtype), own, needed in zip(forms, given, needs, strict=True)
            )
        )
        summary = self._kernels.call(
            lambda summary, words: library.require().moe_backward(
                dy,
                x,
                topk_idx,
                topk_weights,
                *weights,
                saved_gate_up,
                *results,
                summary,
                words,
                *activation.arguments(),
                into is not None,
                trace,
                delay_seed,
            )
        )
        return (results if into is None else Gradients(*results[:2])).copy_into(out), summary
