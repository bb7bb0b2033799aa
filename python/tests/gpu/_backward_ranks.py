"""The fused backward of ranks that one process plays on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mega_moe._backends.fused.layer import Copies
from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.fused.weight_copies import WeightCopies
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, Needs
from mega_moe._base.mode import Mode

from ._forward import Layer
from ._forward_ranks import ForwardRanks, inputs_of, shape_of

# What tests call a precision -> `precision` and `dw_precision` of a buffer, where the name is not the former alone.
WITH_DW = {"fp8_dw": ("fp8", "fp8"), "fp8_bwd_dw": ("fp8_bwd", "fp8")}


class BackwardRanks(ForwardRanks):
    """Both directions; all memory but the state starts as NaN."""

    def __init__(self, device: torch.device, shape: Shape, **options: Any) -> None:
        super().__init__(device, shape, **options)
        self._pairs: dict[tuple[int, int], Copies] = {}

    def start_backward(self, layer: Layer, dy: Sequence[Tensor], **options: Any) -> list[Gradients]:
        """One call of every rank, from the last to the first, each on its stream; waits for nothing.

        ``into``: a pair of buffers for each rank, ``out``: all four results likewise; ``saved``: of each rank what its
        forward saved, or None.
        """
        into, out, saved = (options.pop(name, None) for name in ("into", "out", "saved"))
        results: dict[int, Gradients] = {}
        for rank in reversed(range(layer.num_ranks)):
            own, given, kept = (None if of is None else of[rank] for of in (into, out, saved))
            with self.on(rank):
                results[rank] = self.start_backward_of(
                    rank, layer, dy, into=own, out=given, saved_gate_up=kept, **options
                )
        return [results[rank] for rank in range(layer.num_ranks)]

    def start_backward_of(self, rank: int, layer: Layer, dy: Sequence[Tensor], **options: Any) -> Gradients:
        """One rank's launch on the current stream, or on the one that captures."""
        needs = Needs(*options.pop("needs", ()))
        gradients, _ = self.layers[rank].backward(
            dy[rank],
            inputs_of(layer, rank),
            Activation(clamp=layer.clamp),
            needs=needs,
            copies=self.copies(rank, layer),
            **options,
        )
        return gradients

    def copies(self, rank: int, layer: Layer) -> Copies | None:
        """Of one rank's weights as the backward in fp8 reads them, made once; None in bf16."""
        if self.shape.mode.backward != "fp8":
            return None
        key = (rank, layer.gate_up.data_ptr())
        if key not in self._pairs:
            made = WeightCopies(backward=True, power_of_two=self.shape.mode.power_of_two)
            gate_up, down = (made.of(w, codes=True, transposed=True) for w in layer.experts(rank))
            self._pairs[key] = (gate_up, down)
        return self._pairs[key]

    def backward(self, layer: Layer, dy: Sequence[Tensor], **options: Any) -> list[Gradients]:
        self.have_room_for_gradients(layer, options.get("dw_dtype", torch.bfloat16))
        results = self.start_backward(layer, dy, **options)
        self.synchronize()
        return results

    def forward_saving(
        self, layer: Layer, saved: Sequence[Tensor | None], *, delay_seed: int = 0
    ) -> list[Tensor]:
        """y of each rank, whose gate and up go into ``saved``."""
        self.have_room(layer)
        results: dict[int, Tensor] = {}
        for rank in reversed(range(layer.num_ranks)):
            with self.on(rank):
                results[rank], _ = self.layers[rank].forward(
                    inputs_of(layer, rank),
                    Activation(clamp=layer.clamp),
                    copies=self.forward_copies(rank, layer),
                    saved_gate_up=saved[rank],
                    delay_seed=delay_seed,
                )
        self.synchronize()
        return [results[rank] for rank in range(layer.num_ranks)]

    def have_room_for_gradients(self, layer: Layer, dw_dtype: torch.dtype) -> None:
        """As `have_room`: an allocation between the launches could wait for one that waits."""
        for rank in range(layer.num_ranks):
            self.copies(rank, layer)
            with self.on(rank):
                spare = [torch.empty_like(weight, dtype=dw_dtype) for weight in layer.experts(rank)]
                spare += [torch.empty_like(layer.x[rank]) for _ in range(2)]
                spare += [torch.empty(1 << 18, device=self.device) for _ in range(4)]
            del spare
        self.synchronize()


def mode_of(precision: str, power_of_two: bool = False) -> Mode:
    """Of both directions in what tests call a precision."""
    named, wgrad = WITH_DW.get(precision, (precision, "bf16"))
    forward, backward = ("bf16", "fp8") if named == "fp8_bwd" else (named, named)
    return Mode(forward, backward, wgrad, "power_of_two" if power_of_two else "fp32")


def new_backward_ranks(
    device: torch.device,
    layer: Layer,
    *,
    max_tokens: int | None = None,
    pool_rows: int = 0,
    num_sms: int | None = None,
    limit: float = 5.0,
    precision: str = "bf16",
    progress: float | None = None,
    power_of_two: bool = False,
) -> BackwardRanks:
    """Ranks on a buffer that just holds ``layer`` in both directions. ``progress``: ``limit`` too."""
    mode = mode_of(precision, power_of_two)
    shape = shape_of(layer, max_tokens=max_tokens, pool_rows=pool_rows, mode=mode)
    return BackwardRanks(
        device,
        shape,
        num_sms=num_sms,
        arrival=limit,
        progress=limit if progress is None else progress,
    )
