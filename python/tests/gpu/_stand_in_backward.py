"""In place of the backward kernel, on any device: fp64 rounded once, and faults to plant.

With it the tests of the backward are themselves tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mega_moe._base.layer import Gradients

from ._backward import exact_gradients
from ._forward import Layer
from ._stand_in import StandIn


class BackwardStandIn(StandIn):
    """As BackwardRanks; ``fault`` names what it does wrong."""

    def __init__(self, device: torch.device, layer: Layer, **options: Any) -> None:
        super().__init__(device, layer, **options)
        self.kernels = [SimpleNamespace(num_sms=132)]
        self._backwards = 0

    def backward(
        self,
        layer: Layer,
        dy: Sequence[Tensor],
        *,
        needs: tuple[bool, bool, bool, bool] = (True,) * 4,
        dw_dtype: torch.dtype = torch.bfloat16,
        into: Sequence[tuple[Tensor, Tensor]] | None = None,
        delay_seed: int = 0,
    ) -> list[Gradients]:
        self.have_room(layer)
        self._backwards += 1
        wrong = [(own < -1) | (own >= layer.num_experts) for own in layer.ids]
        seen = replace(
            layer, ids=[own.masked_fill(bad, -1) for own, bad in zip(layer.ids, wrong, strict=True)]
        )
        exact = exact_gradients(seen, dy)
        share = layer.num_experts // layer.num_ranks
        results = []
        for rank, bad in enumerate(wrong):
            own = slice(rank * share, (rank + 1) * share)
            made = [
                exact.dx[rank].bfloat16(),
                exact.dtopk[rank].float(),
                exact.dw_gate_up[own].to(dw_dtype),
                exact.dw_down[own].to(dw_dtype),
            ]
            self._spoil(seen, rank, made, delay_seed)
            if bad.any():
                self._bad = True
                for part in made:
                    part.fill_(torch.nan)
            if into is not None:
                for buffer, part, needed in zip(into[rank], made[2:], needs[2:], strict=True):
                    if needed:
                        buffer.add_(part)
            given = [
                part if needed and (into is None or at < 2) else None
                for at, (part, needed) in enumerate(zip(made, needs, strict=True))
            ]
            results.append(Gradients(*given))
        return results

    def _spoil(self, layer: Layer, rank: int, made: list[Tensor], delay_seed: int) -> None:
        dx, dtopk, dw_gate_up, dw_down = made
        ids = layer.ids[rank]
        share = len(dw_down)
        everyone = torch.cat([own.reshape(-1) for own in layer.ids])
        counts = everyone[everyone >= 0].bincount(minlength=layer.num_experts)
        counts = counts[rank * share : (rank + 1) * share]
        if self.fault == "dx of a token lost" and len(dx):
            dx[-1] = 0
            dx[: len(dx) // 3] = 0
        elif self.fault == "masked slot has a gradient":
            dtopk[ids < 0] = 1
        elif self.fault == "gradients of experts swapped" and share > 1:
            dw_gate_up.copy_(dw_gate_up.roll(1, 0))
        elif self.fault == "a part of the rows lost":
            dw_down[counts.argmax()] *= 0.9
        elif self.fault == "no zeros for an empty expert":
            dw_down[counts == 0] = 1
        elif self.fault == "rounded before the sum" and dw_gate_up.dtype == torch.bfloat16:
            dw_gate_up.copy_(dw_gate_up * 1.004)
        ulp = {
            "ulp in a repeat": self._backwards % 3 == 2,
            "ulp when delayed": delay_seed > 0,
            "ulp with few SMs": self._num_sms is not None and self._num_sms <= 16,
        }
        if ulp.get(self.fault or "") and len(dtopk):
            dtopk.view(torch.int32)[0, 0] ^= 1
