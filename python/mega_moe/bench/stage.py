"""The staging operation against the device copy: x, ids and weights into a rank's buffer; the fp8 form quantizes x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mega_moe.bench.ceilings import INPUT_SETS
from mega_moe.bench.protocols import Protocol, Timer, measure
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import Outcome, StageRow

Form = Literal["bf16", "fp8"]
FORMS: tuple[Form, ...] = ("bf16", "fp8")

_GROUP = 128  # elements of x that share a scale factor
# Relative L2 of e4m3 codes times their scales against normal x: 3 mantissa bits give 2.6 % at most.
_FP8_ERROR = 0.03


@dataclass(frozen=True)
class StageShape:
    """Tokens of one call and what each brings: `hidden` elements of x, `top_k` ids and weights."""

    tokens: int
    hidden: int
    top_k: int
    num_experts: int


def stage_bytes(shape: StageShape, form: Form) -> int:
    """Bytes read plus bytes written by one call with bf16 x, int64 ids and fp32 weights."""
    elements, slots = shape.tokens * shape.hidden, shape.tokens * shape.top_k
    read = 2 * elements + (8 + 4) * slots
    written_x = elements + 4 * elements // _GROUP if form == "fp8" else 2 * elements
    return read + written_x + (2 + 4) * slots


def measure_stage(
    shape: StageShape,
    form: Form,
    protocols: Sequence[Protocol],
    timer: Timer,
    context: Context,
    *,
    library_reason: str | None,
    copy_rates: dict[str, float],
) -> list[StageRow]:
    """One row per protocol, or one refused row. Collective over the ranks.

    `library_reason` says why the compiled library is missing; `copy_rates` holds the device copy's GB/s by protocol.
    """
    if context.device.type != "cuda":
        return [
            _row(
                shape, form, _refused(f"staging is a CUDA operation, the device is {context.device.type}"), {}
            )
        ]
    if library_reason is not None:
        return [_row(shape, form, _refused(library_reason), {})]
    call = _StageCall(shape, form, context)
    rows = []
    for protocol in protocols:
        timing = measure(call.calls, protocol, timer, context, poison=call.poison)
        wrong = context.first_reason(call.fault())
        outcome = Outcome("failed", (wrong,), None) if wrong else Outcome("measured", (), timing)
        rows.append(_row(shape, form, outcome, copy_rates))
    return rows


class _StageCall:
    """A buffer and the input sets that are staged into it."""

    def __init__(self, shape: StageShape, form: Form, context: Context) -> None:
        self._shape, self._form = shape, form
        ops = torch.ops.mega_moe_kernels
        quantize = form == "fp8"
        self._layout = ops.staging_layout(shape.tokens, shape.top_k, shape.hidden, quantize)
        device, slots = context.device, (shape.tokens, shape.top_k)
        self._buffer = torch.empty(self._layout[5], dtype=torch.uint8, device=device)
        self._xs = [
            torch.randn(shape.tokens, shape.hidden, device=device).to(torch.bfloat16)
            for _ in range(INPUT_SETS)
        ]
        ids = [torch.randint(0, shape.num_experts, slots, device=device) for _ in range(INPUT_SETS)]
        weights = [torch.rand(slots, device=device) for _ in range(INPUT_SETS)]
        address, total = self._buffer.data_ptr(), self._buffer.numel()
        self._last = 0

        def call_of(index: int) -> object:
            self._last = index
            return ops.stage(
                self._xs[index],
                ids[index],
                weights[index],
                address,
                total,
                shape.tokens,
                shape.num_experts,
                quantize,
                False,
            )

        self.calls = [lambda index=index: call_of(index) for index in range(INPUT_SETS)]

    def poison(self) -> None:
        self._buffer.fill_(0xFF)

    def fault(self) -> str | None:
        """What is wrong with the staged x of the last call."""
        x = self._xs[self._last]
        start, after = self._layout[0], self._layout[1]
        if self._form == "bf16":
            staged = self._buffer[start : start + x.numel() * 2].view(torch.bfloat16).view_as(x)
            return None if torch.equal(staged, x) else "staged x differs from x after the last window"
        codes = self._buffer[start : start + x.numel()].view(torch.float8_e4m3fn).float().view(-1, _GROUP)
        scales = self._buffer[after : after + 4 * codes.shape[0]].view(torch.float32)
        error = (codes * scales[:, None] - x.float().view(-1, _GROUP)).norm() / x.float().norm()
        if bool(error <= _FP8_ERROR):
            return None
        return (
            f"staged x: got relative L2 {float(error):.3g} after the last window, wanted at most {_FP8_ERROR}"
        )


def _refused(reason: str) -> Outcome:
    return Outcome("refused", (reason,), None)


def _row(shape: StageShape, form: Form, outcome: Outcome, copy_rates: dict[str, float]) -> StageRow:
    num_bytes = stage_bytes(shape, form)
    rate = percent = None
    if outcome.timing:
        rate = num_bytes / outcome.timing.seconds * 1e-9
        ceiling = copy_rates.get(outcome.timing.protocol)
        percent = 100 * rate / ceiling if ceiling else None
    return StageRow("stage", form, shape.tokens, shape.hidden, shape.top_k, num_bytes, rate, percent, outcome)
