"""The fused backend's calls: one kernel for each direction where the wheel holds both, else another's backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.layer import Copies, KernelLayer
from mega_moe._backends.fused.memory import dense, writable
from mega_moe._backends.fused.weight_copies import WeightCopies
from mega_moe._backends.routing import add_received
from mega_moe._base.activation import Activation
from mega_moe._base.errors import MegaMoEError, PeerError
from mega_moe._base.layer import Gradients, LayerInputs, Needs, Outputs
from mega_moe._ops.registry import Executor


class FusedExecutor:
    """Forward never waits for the device, so ranks agree on nothing before it; see `KernelRank.call` for its faults.

    ``backward`` is used where the memory of ``kernels`` was not made for the backward kernel. It recomputes everything
    from the inputs, and agrees with the other ranks as it always does.
    """

    dtypes = (torch.bfloat16,)

    def __init__(self, kernels: KernelRank, backward: Executor) -> None:
        self._kernels = kernels
        self._layer = KernelLayer(kernels)
        self._backward = backward
        self._mode = mode = kernels.shape.mode
        # None where no kernel reads e4m3 weights.
        self.weight_copies = (
            WeightCopies(backward=mode.backward == "fp8", power_of_two=mode.power_of_two)
            if mode.reads_fp8_weights
            else None
        )

    def forward(
        self,
        inputs: LayerInputs,
        activation: Activation,
        saved_rows: int | None = None,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        tokens, most = inputs.x.shape[0], self._kernels.shape.max_tokens
        if tokens > most:
            # Seen here by compiled calls alone, whose T is not known before.
            error = ValueError(f"x: got {tokens} tokens, the buffer was built for {most} per rank")
            self.refuse(error, tokens)
            raise error
        saved, copies = None, None
        with self._kernels.refuse_peers_on_oom():
            if saved_rows is not None:
                columns = inputs.w_gate_up.shape[1]
                saved = torch.empty(saved_rows, columns, dtype=torch.bfloat16, device=inputs.x.device)
            if self.weight_copies is not None and self._mode.forward == "fp8":
                copies = (
                    self.weight_copies.of(inputs.w_gate_up, codes=True, transposed=False),
                    self.weight_copies.of(inputs.w_down, codes=True, transposed=False),
                )
            given = _dense(inputs, copies)
            y, summary = self._layer.forward(given, activation, copies=copies, saved_gate_up=saved, out=out)
        if received is not None:
            add_received(self._kernels.routing(summary), received)
        return y, saved

    def backward(
        self,
        dy: Tensor,
        inputs: LayerInputs,
        activation: Activation,
        needs: Needs,
        dw_dtype: torch.dtype,
        *,
        saved_gate_up: Tensor | None = None,
        into: tuple[Tensor, Tensor] | None = None,
        out: Outputs | None = None,
    ) -> Gradients:
        if not self._mode.has_backward:
            self._check_before_backward()
            return self._backward.backward(dy, inputs, activation, needs, dw_dtype, into=into, out=out)
        accumulated = into
        if into is not None and not writable([buffer for buffer, needed in zip(into, needs[2:]) if needed]):
            # Wide gradients, so that adding into the buffer is their only rounding.
            accumulated, dw_dtype = None, torch.float32
        with self._kernels.refuse_peers_on_oom():
            copies = None
            if self.weight_copies is not None and self._mode.backward == "fp8":
                copies = (
                    self.weight_copies.of(inputs.w_gate_up, codes=True, transposed=True),
                    self.weight_copies.of(inputs.w_down, codes=False, transposed=True),
                )
            got, _ = self._layer.backward(
                dense(dy),
                _dense(inputs, copies),
                activation,
                needs=needs,
                dw_dtype=dw_dtype,
                into=accumulated,
                out=out,
                saved_gate_up=saved_gate_up,
                copies=copies,
            )
        if out is None and got.dtopk is not None:
            got = got._replace(dtopk=got.dtopk.to(inputs.topk_weights.dtype))
        return got if into is accumulated else got.add_into(into)

    def refuse(self, error: Exception, num_tokens: int) -> None:
        self._kernels.refuse(num_tokens)

    def _check_before_backward(self) -> None:
        """Raise what this call's forward reported before the ranks meet: some of them may not reach its backward."""
        if torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                "the backward of this version's fused backend sizes its exchange on the host and cannot be captured "
                "into a CUDA graph; its forward can"
            )
        torch.cuda.current_stream(self._kernels.device).synchronize()
        pending = self._kernels.take_pending()
        if pending is None:
            return
        if not isinstance(pending, PeerError):
            # A bad id is known to this rank alone. A refusal is known to all ranks, and the one that refused has raised
            # already, so nobody would answer.
            self._backward.refuse(pending, 0)
        raise pending


def _dense(inputs: LayerInputs, copies: Copies | None) -> LayerInputs:
    """Inputs as the kernels read them; the weights themselves only where there are no e4m3 copies."""
    if copies is None:
        return LayerInputs(*map(dense, inputs))
    return inputs._replace(
        x=dense(inputs.x), topk_idx=dense(inputs.topk_idx), topk_weights=dense(inputs.topk_weights)
    )
