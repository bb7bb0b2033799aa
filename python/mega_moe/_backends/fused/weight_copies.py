"""e4m3 copies of the weights: made by one kernel for each call or, where the user says so, kept between calls.

Nothing in a tensor proves that its values are unchanged: its version counts neither the writes of torch's own fused
optimizers nor those through ``.data``, by other libraries or in a replayed graph, and FSDP refills the memory of a
parameter under the old version. So a call makes its own copies unless `WeightCopies.reused` is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.fused.memory import dense
from mega_moe._base.types import SCALE_BLOCK
from mega_moe._ops import library


class WeightCopy(NamedTuple):
    """Copies of a weight ``[E, N, K]``; one that was not asked for may be missing."""

    codes: Tensor | None  # e4m3 [E, N, K]
    transposed: Tensor | None  # e4m3 [E, K, N]
    scales: Tensor  # fp32 [E, N / 128, K / 128], of both

    def has(self, *, codes: bool, transposed: bool) -> bool:
        return (self.codes is not None or not codes) and (self.transposed is not None or not transposed)


@dataclass
class _Kept:
    # References, so that neither address is reused while the copy is kept.
    weight: Tensor
    storage: torch.UntypedStorage
    seen: tuple[Any, ...]
    copy: WeightCopy
    made: torch.cuda.Event | None  # on the stream that made it; None on a CPU
    stream: torch.cuda.Stream | None


class WeightCopies:
    """The copies of one buffer's layers.

    ``backward``: a kernel reads transposed copies too, so that what is kept of a weight that learns has both.
    ``power_of_two`` rounds scales up to powers of two.
    """

    def __init__(self, *, backward: bool, power_of_two: bool = False) -> None:
        self._backward = backward
        self._power_of_two = power_of_two
        self._kept: dict[int, _Kept] = {}
        self._open = 0

    def of(self, weight: Tensor, *, codes: bool, transposed: bool) -> WeightCopy:
        """Copies of the current ``weight [E, N, K]`` bf16, on the current stream; a kept one may hold both forms."""
        # Freed memory is FSDP's, which later gathers what may be other numbers.
        self._kept = {key: kept for key, kept in self._kept.items() if kept.storage.nbytes()}
        if not self._open or not _can_keep(weight):
            return self._make(weight, codes, transposed)
        kept = self._kept.get(id(weight))
        seen = _seen(weight)
        if kept is None or kept.seen != seen:
            self._kept.pop(id(weight), None)
            # The backward, if one comes, then finds both: the weight is read once.
            both = weight.requires_grad and self._backward
            copy = self._make(weight, codes or both, transposed or both)
        elif kept.copy.has(codes=codes, transposed=transposed):
            _use_here(kept)
            return kept.copy
        else:
            _use_here(kept)
            more = self._make(weight, kept.copy.codes is None, kept.copy.transposed is None)
            copy = WeightCopy(
                kept.copy.codes if more.codes is None else more.codes,
                kept.copy.transposed if more.transposed is None else more.transposed,
                more.scales,
            )
        stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        made = None if stream is None else stream.record_event()
        self._kept[id(weight)] = _Kept(weight, weight.untyped_storage(), seen, copy, made, stream)
        return copy

    def changed(self) -> None:
        """Nothing that is kept may be used any more."""
        self._kept.clear()

    @contextlib.contextmanager
    def reused(self) -> Iterator[None]:
        """Keep copies until this ends, a torch optimizer has stepped, or `changed` is called; may be nested."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        hook = register_optimizer_step_post_hook(lambda *_: self.changed())
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            hook.remove()
            if not self._open:
                self.changed()

    def _make(self, weight: Tensor, codes: bool, transposed: bool) -> WeightCopy:
        experts, rows, columns = weight.shape
        device = weight.device
        plain = (
            torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device) if codes else None
        )
        turned = (
            torch.empty(experts, columns, rows, dtype=torch.float8_e4m3fn, device=device)
            if transposed
            else None
        )
        scales = torch.empty(experts, rows // SCALE_BLOCK, columns // SCALE_BLOCK, device=device)
        library.require().quantize_weights(dense(weight), plain, turned, scales, self._power_of_two)
        return WeightCopy(plain, turned, scales)


def copies_nbytes(num_experts: int, rows: int, columns: int, *, copies: int) -> int:
    """Bytes of ``copies`` (1 or 2) e4m3 copies of a weight and of their scales."""
    scales = (rows // SCALE_BLOCK) * (columns // SCALE_BLOCK) * 4
    return num_experts * (copies * rows * columns + scales)


def _can_keep(weight: Tensor) -> bool:
    # A parameter has a life of its own; anything else, as a cast or ``.data``, may be an alias that shows nothing of
    # what happens to the parameter. A graph that is replayed must quantize what it then finds.
    if not isinstance(weight, torch.nn.Parameter) or weight.is_inference():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _seen(weight: Tensor) -> tuple[Any, ...]:
    """What changes where torch knows of a change."""
    return (
        weight._version,
        weight.untyped_storage()._cdata,
        weight.data_ptr(),
        tuple(weight.shape),
        weight.stride(),
        weight.dtype,
    )


def _use_here(kept: _Kept) -> None:
    """Order the current stream behind the copy, and its memory behind the current stream."""
    if kept.stream is None or kept.made is None:
        return
    here = torch.cuda.current_stream(kept.copy.scales.device)
    if here == kept.stream:
        return
    here.wait_event(kept.made)
    for tensor in kept.copy:
        if tensor is not None:
            tensor.record_stream(here)
