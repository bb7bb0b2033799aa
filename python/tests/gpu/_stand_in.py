"""In place of the kernel, on any device: plain torch with its rounding points, and faults to plant.

With it the tests of the forward are themselves tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from ._emulated import combined, slot_outputs
from ._forward import Layer
from ._forward_ranks import shape_of
from ._virtual import NAN


class StandIn:
    """As ForwardRanks; ``fault`` names what it does wrong."""

    fault: str | None = None

    def __init__(
        self,
        device: torch.device,
        layer: Layer,
        *,
        max_tokens: int | None = None,
        pool_rows: int = 0,
        num_sms: int | None = None,
        limit: float = 5.0,
    ) -> None:
        self.device = device
        self.shape = shape_of(layer, max_tokens=max_tokens, pool_rows=pool_rows)
        self._num_sms = num_sms
        self._poison = NAN
        self._calls = 0
        self._bad = False
        self._before: list[Tensor] = []

    def on(self, rank: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def poison(self, word: int) -> None:
        self._poison = word

    def use_sms(self, num_sms: int) -> None:
        self._num_sms = num_sms

    def fill_results(self, layer: Layer, word: int) -> None:
        pass

    def have_room(self, layer: Layer) -> None:
        assert max(len(own) for own in layer.x) <= self.shape.max_tokens

    def synchronize(self) -> None:
        pass

    def check(self) -> None:
        bad, self._bad = self._bad, False
        if bad:
            raise ValueError("topk_idx")

    def forward(self, layer: Layer, *, delay_seed: int = 0) -> list[Tensor]:
        self.have_room(layer)
        return self.start_all(layer, delay_seed=delay_seed)

    def start_all(self, layer: Layer, *, delay_seed: int = 0) -> list[Tensor]:
        self._calls += 1
        wrong = [(own < -1) | (own >= layer.num_experts) for own in layer.ids]
        seen = self._inputs(
            replace(layer, ids=[own.masked_fill(bad, -1) for own, bad in zip(layer.ids, wrong, strict=True)])
        )
        if self.fault == "weighted too late":
            plain = slot_outputs(replace(seen, weights=[torch.ones_like(own) for own in seen.weights]))
            outputs = [
                (out * own[..., None].float()).bfloat16()
                for out, own in zip(plain, seen.weights, strict=True)
            ]
        else:
            outputs = slot_outputs(seen)
        self._spoil_outputs(seen, outputs)
        results = combined(seen, outputs)
        for rank, own in enumerate(wrong):
            if own.any():
                results[rank].fill_(torch.nan)
                self._bad = True
        self._spoil_results(layer, results, delay_seed)
        self._before = [own.clone() for own in results]
        return results

    def _inputs(self, layer: Layer) -> Layer:
        """What a faulty kernel would read."""
        if self.fault == "weight missing":
            weights = [own.clone() for own in layer.weights]
            weights[0][len(weights[0]) // 2 :, -1] = 1
            return replace(layer, weights=weights)
        if self.fault == "weights rounded":
            return replace(layer, weights=[own.bfloat16() for own in layer.weights])
        if self.fault == "gate and up swapped":
            return replace(layer, gate_up=torch.cat(layer.gate_up.chunk(2, 1)[::-1], 1))
        if self.fault == "clamp ignored":
            return replace(layer, clamp=None)
        if self.fault == "masked slot taken":
            return replace(layer, ids=[torch.where(own < 0, layer.num_experts - 1, own) for own in layer.ids])
        if self.fault == "row dropped":
            ids = [own.clone() for own in layer.ids]
            for own in ids:
                own[-1:, -1:] = -1
            return replace(layer, ids=ids)
        if self.fault == "alignment assumed" and layer.gate_up.data_ptr() % 32:
            return replace(layer, gate_up=layer.gate_up.roll(-8, 2))
        if self.fault == "input overwritten" and len(layer.x[0]):
            layer.x[0][0, 0] += 1
        return layer

    def _spoil_outputs(self, layer: Layer, outputs: list[Tensor]) -> None:
        rows = outputs[0]
        if self.fault == "rows swapped" and len(rows) > 1:
            rows[[0, -1]] = rows[[-1, 0]]
        if self.fault == "pad row leaks" and len(rows):
            rows[-1, 0, 3] = torch.tensor(self._poison).short().view(torch.bfloat16)
        leaks = {
            "next expert leaks": bool(layer.gate_up.isnan().any()),
            "sigmoid overflows": bool(len(rows)) and float(layer.x[0].abs().max()) > 50,
        }
        if leaks.get(self.fault or ""):
            rows[-1] = torch.nan
        if self.fault == "NaN spreads" and not rows.isfinite().all():
            rows[:64] = torch.nan

    def _spoil_results(self, layer: Layer, results: list[Tensor], delay_seed: int) -> None:
        y = results[0]
        s = self.shape
        limit, most_in_one = s.chunk_limits()
        rows = s.max_tokens * s.num_ranks * s.top_k
        lost = {"chunk lost": most_in_one < rows, "second pool lost": limit < rows <= most_in_one}
        ulp = {
            "ulp in a repeat": self._calls % 5 == 2,
            "ulp with few SMs": self._num_sms == 2,
            "ulp when delayed": delay_seed == 3,
            "ulp in a large batch": len(y) > 64,
            "ulp in chunks": self.shape.pool_rows > 0,
        }
        if not len(y):
            return
        if ulp.get(self.fault or ""):
            y.view(torch.int16)[0, -1] ^= 1
        elif self.fault == "token lost":
            results[-1][-1:] = 0
        elif lost.get(self.fault or ""):
            y[128:] = 0
        elif self.fault == "stale result" and self._calls % 2 == 0 and self._before[0].shape == y.shape:
            y.copy_(self._before[0])
        elif self.fault == "unwritten":
            y[-1].view(torch.int16).fill_(-1)
