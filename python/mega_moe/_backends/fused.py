"""The fused backend: one kernel for each direction, where the wheel holds both; else another executor's backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.dense import dense, writable
from mega_moe._backends.executor import LayerExecutor
from mega_moe._backends.given_codes import GivenCodes
from mega_moe._backends.kernel_backward import KernelBackward
from mega_moe._backends.kernel_forward import KernelForward
from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.weight_copies import WeightCopies, WeightCopy
from mega_moe._base.errors import MegaMoEError, PeerError

# x, topk_idx, topk_weights, w_gate_up, w_down.
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class FusedExecutor:
    """Forward never waits for the device, so ranks agree on nothing before it; see `KernelRank.call` for its faults.

    ``backward`` is used where the memory of ``kernels`` was not made for the backward kernel. It computes everything
    again from the inputs, and agrees with the other ranks as it always does. It must not use the staging area of the
    buffer, from which a forward on another stream may be reading. ``power_of_two``: scales of fp8 are.
    """

    dtypes = (torch.bfloat16,)
    stages_by = "kernel"

    def __init__(self, kernels: KernelRank, backward: LayerExecutor, power_of_two: bool = False) -> None:
        self._kernels = kernels
        self._kernel = KernelForward(kernels, power_of_two)
        self._kernel_backward = KernelBackward(kernels, power_of_two) if kernels.shape.backward else None
        self._backward = backward
        # None where no kernel reads e4m3 weights.
        shape = kernels.shape
        reads = shape.quantize or shape.quantize_backward
        self.weight_copies = (
            WeightCopies(backward=shape.quantize_backward, power_of_two=power_of_two) if reads else None
        )
        both = shape.quantize and shape.quantize_backward
        self.given_codes = GivenCodes(kernels, power_of_two) if both else None

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
    ) -> Tensor:
        return self._forward((x, topk_idx, topk_weights, w_gate_up, w_down), clamp, None)

    def forward_saving(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        with self._kernels.telling_of_no_memory():
            saved = torch.empty(rows, w_gate_up.shape[1], dtype=torch.bfloat16, device=x.device)
        return self._forward((x, topk_idx, topk_weights, w_gate_up, w_down), clamp, saved), saved

    def _forward(self, inputs: _Inputs, clamp: float | None, saved_gate_up: Tensor | None) -> Tensor:
        tokens, most = inputs[0].shape[0], self._kernels.shape.max_tokens
        if tokens > most:
            # Seen here by compiled calls alone, whose T is not known before.
            error = ValueError(f"x: got {tokens} tokens, the buffer was built for {most} per rank")
            self.refuse(error, tokens)
            raise error
        x, topk_idx, topk_weights = map(dense, inputs[:3])
        with self._kernels.telling_of_no_memory():
            weights = self._as_read(inputs[3]), self._as_read(inputs[4])
            y, _ = self._kernel.forward(
                x, topk_idx, topk_weights, *weights, clamp, saved_gate_up=saved_gate_up
            )
        return y

    def _as_read(self, weight: Tensor) -> Tensor | WeightCopy:
        """``weight`` as the forward kernel takes it."""
        copies = self.weight_copies
        if copies is None or not self._kernels.shape.quantize:
            return dense(weight)
        return copies.of(weight, codes=True, transposed=False)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
        saved_gate_up: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        if self._kernel_backward is not None:
            inputs = (x, topk_idx, topk_weights, w_gate_up, w_down)
            return self._fused_backward(dy, inputs, clamp, needs, dw_dtype, None, saved_gate_up)
        if torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                "the backward of this version's fused backend sizes its exchange on the host and cannot be captured "
                "into a CUDA graph; its forward can"
            )
        self._raise_faults()
        return self._backward.backward(
            dy, x, topk_idx, topk_weights, w_gate_up, w_down, clamp, needs, dw_dtype
        )

    def backward_into(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        into: tuple[Tensor, Tensor],
        saved_gate_up: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None] | None:
        """Adds the weights' gradients into buffers in the kernel -> dx, dtopk; None where it cannot."""
        wanted = [buffer for buffer, needed in zip(into, needs[2:]) if needed]
        if self._kernel_backward is None or not writable(wanted):
            return None
        inputs = (x, topk_idx, topk_weights, w_gate_up, w_down)
        return self._fused_backward(dy, inputs, clamp, needs, torch.float32, into, saved_gate_up)[:2]

    def _fused_backward(
        self,
        dy: Tensor,
        inputs: _Inputs,
        clamp: float | None,
        needs: tuple[bool, bool, bool, bool],
        dw_dtype: torch.dtype,
        into: tuple[Tensor, Tensor] | None,
        saved_gate_up: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        assert self._kernel_backward is not None
        x, topk_idx, topk_weights, w_gate_up, w_down = inputs
        with self._kernels.telling_of_no_memory():
            copies = None
            if self.weight_copies is not None and self._kernels.shape.quantize_backward:
                copies = (
                    self.weight_copies.of(w_gate_up, codes=True, transposed=True),
                    self.weight_copies.of(w_down, codes=False, transposed=True),
                )
            else:
                w_gate_up, w_down = dense(w_gate_up), dense(w_down)
            got, _ = self._kernel_backward.backward(
                dense(dy),
                dense(x),
                dense(topk_idx),
                dense(topk_weights),
                w_gate_up,
                w_down,
                clamp,
                needs=needs,
                dw_dtype=dw_dtype,
                into=into,
                saved_gate_up=saved_gate_up,
                copies=copies,
            )
        dtopk = None if got.dtopk is None else got.dtopk.to(inputs[2].dtype)
        return got.dx, dtopk, got.dw_gate_up, got.dw_down

    def refuse(self, error: Exception, num_tokens: int) -> None:
        self._kernels.refuse(num_tokens)

    def _raise_faults(self) -> None:
        """What this call's forward reported, before the ranks meet: some of them may not come to its backward."""
        torch.cuda.current_stream(self._kernels.device).synchronize()
        pending = self._kernels.take_pending()
        if pending is None:
            return
        if not isinstance(pending, PeerError):
            # A bad id, of which the other ranks know nothing. Of a refusal all ranks know, and the one that refused has
            # raised already, so nobody would come.
            self._backward.refuse(pending, 0)
        raise pending
