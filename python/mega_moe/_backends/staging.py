"""The first step of a call: x, ids and weights in the form that dispatch reads.

On a GPU whose architecture the wheel holds this is the staging kernel, which writes into the buffer's own memory;
elsewhere the same result, bit for bit, comes from plain torch operators.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mega_moe._backends.activation import wide
from mega_moe._backends.quantize import E4M3, quantize_rows
from mega_moe._base.types import SCALE_BLOCK
from mega_moe._ops import library

_MASKED = 0xFFFF


class Staged(NamedTuple):
    """``x`` as payload (rows, or e4m3 codes and scales), ids int64 with -1 for masked, weights wide.

    ``bad [3]`` int64: 1 if an id is out of range, its pair index (token * k + slot), the id. Bad ids are masked.
    """

    x: tuple[Tensor, ...]
    topk_idx: Tensor
    topk_weights: Tensor
    bad: Tensor


class Stager(Protocol):
    name: str

    def stage(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, quantize: bool) -> Staged: ...


class TorchStager:
    name = "torch"

    def __init__(self, num_experts: int, power_of_two: bool = False) -> None:
        self._num_experts = num_experts
        self.power_of_two = power_of_two

    def stage(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, quantize: bool) -> Staged:
        ids = topk_idx.to(torch.int64)
        wrong = (ids < -1) | (ids >= self._num_experts)
        if ids.numel():
            pair = wrong.reshape(-1).to(torch.int8).argmax()
            bad = torch.stack((wrong.any().to(torch.int64), pair, ids.reshape(-1)[pair]))
        else:
            bad = ids.new_zeros(3)
        payload = quantize_rows(x, self.power_of_two) if quantize else (x,)
        return Staged(payload, ids.masked_fill(wrong, -1), topk_weights.to(wide(x.dtype)), bad)


class KernelStager:
    """The staging kernel, into ``memory`` (uint8, on the device), as ``staging_layout`` of the library divides it.

    Scales are rounded as those of ``plain``, which stages what the kernel does not take.
    """

    name = "kernel"

    def __init__(
        self, memory: Tensor, max_tokens: int, num_experts: int, top_k: int, hidden: int, plain: TorchStager
    ) -> None:
        self._plain = plain
        self._memory = memory
        self._max_tokens = max_tokens
        self._num_experts = num_experts
        self._top_k = top_k
        self._hidden = hidden

    @staticmethod
    def nbytes(max_tokens: int, top_k: int, hidden: int, quantize: bool) -> int:
        return int(library.require().staging_layout(max_tokens, top_k, hidden, quantize)[-1])

    def stage(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, quantize: bool) -> Staged:
        if x.dtype != torch.bfloat16:
            return self._plain.stage(x, topk_idx, topk_weights, quantize)
        ops = library.require()
        tokens, width = x.shape[0], self._hidden
        address, size = self._memory.data_ptr(), self._memory.numel()
        power_of_two = quantize and self._plain.power_of_two
        sizes = address, size, self._max_tokens, self._num_experts
        ops.stage(x, topk_idx, topk_weights, *sizes, quantize, power_of_two)
        at = ops.staging_layout(self._max_tokens, self._top_k, width, quantize)
        if quantize:
            codes = self._view(at[0], E4M3, (tokens, width))
            payload: tuple[Tensor, ...] = (
                codes,
                self._view(at[1], torch.float32, (tokens, width // SCALE_BLOCK)),
            )
        else:
            payload = (self._view(at[0], torch.bfloat16, (tokens, width)),)
        ids = self._view(at[2], torch.uint16, (tokens, self._top_k)).to(torch.int64)
        record = self._view(at[4], torch.int32, (8,))
        flag, token, slot, value = record[:4].to(torch.int64).unbind()
        bad = torch.stack((flag, token * self._top_k + slot, value))
        record.zero_()
        return Staged(
            payload,
            ids.masked_fill(ids == _MASKED, -1),
            self._view(at[3], torch.float32, (tokens, self._top_k)),
            bad,
        )

    def _view(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        return self._memory[start : start + count].view(dtype).view(shape)
