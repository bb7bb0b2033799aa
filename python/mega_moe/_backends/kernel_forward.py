"""The fused forward of one rank: one launch for dispatch, both products, SwiGLU and combine."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.summary import Routing, routing_of
from mega_moe._backends.weight_copies import WeightCopy
from mega_moe._ops import library


class KernelForward:
    """The fused forward kernel on the memory of ``kernels``. Launches never wait for the device.

    ``power_of_two``: in fp8 it rounds the scales of what it quantizes up to powers of two.
    """

    def __init__(self, kernels: KernelRank, power_of_two: bool = False) -> None:
        self._kernels = kernels
        self._power_of_two = power_of_two

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor | WeightCopy,
        w_down: Tensor | WeightCopy,
        clamp: float | None = None,
        *,
        saved_gate_up: Tensor | None = None,
        delay_seed: int = 0,
        trace: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """-> y ``[T, H]`` bf16 and the routing of the call, both on the current stream.

        Contiguous tensors with 16-byte aligned rows: x ``[T, H]``, w_gate_up ``[E_local, 2I, H]``, w_down
        ``[E_local, H, I]`` in bf16, or the copies of both where ``kernels`` has the memory of the fp8 kernel; ids int32
        or int64 and weights fp32 or bf16 ``[T, K]``. In fp8, x may also be the first rows of `KernelRank.staged_codes`,
        beside their scales. ``saved_gate_up`` bf16 ``[SavedRows.slots(T), 2I]`` is filled for
        `KernelBackward.backward`, in an order of the kernels' own; the fp8 kernel takes none. ``delay_seed`` other than
        0 delays the communication at random; ``trace`` int64 ``[CTAs, 5, events, 3]``, zero, makes the launch one of
        the tracing kernel. A bad id, a refusal or a lost rank makes y NaN; the next call or `KernelRank.check` raises.
        """
        kernels = self._kernels
        shape = kernels.shape
        y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        summary = kernels.new_summary()
        weights: tuple[Tensor | None, ...]
        # What the kernel saves, beside y.
        saved: tuple[Tensor, ...] = ()
        # What the fp8 kernel alone takes.
        rounding: tuple[bool, ...] = ()
        if isinstance(w_gate_up, WeightCopy) and isinstance(w_down, WeightCopy):
            if saved_gate_up is not None:
                raise TypeError("saved_gate_up: got a tensor, want None: the fp8 kernel saves nothing")
            rounding = (self._power_of_two,)
            op, weights = "moe_forward_fp8", (w_gate_up.codes, w_gate_up.scales, w_down.codes, w_down.scales)
        elif isinstance(w_gate_up, Tensor) and isinstance(w_down, Tensor):
            op, weights = "moe_forward", (w_gate_up, w_down)
            saved = (torch.empty(0, device=x.device) if saved_gate_up is None else saved_gate_up,)
        else:
            raise TypeError("w_gate_up, w_down: want two tensors or the copies of both")
        kernels.call(
            lambda: getattr(library.require(), op)(
                x,
                topk_idx,
                topk_weights,
                *weights,
                y,
                *saved,
                summary,
                *kernels.addresses,
                shape.max_tokens,
                shape.num_experts,
                shape.pool_rows,
                shape.canaries,
                shape.backward_form,
                kernels.rank,
                kernels.num_sms,
                *kernels.limits_ns,
                math.inf if clamp is None else clamp,
                *rounding,
                delay_seed,
                0 if trace is None else trace.data_ptr(),
                0 if trace is None else trace.numel() * trace.element_size(),
            )
        )
        return y, routing_of(summary, shape.num_ranks, shape.num_local_experts)
