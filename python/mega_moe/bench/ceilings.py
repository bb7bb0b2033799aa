"""What the machine does on plain operations, in the same run and protocol as the rates judged against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mega_moe.bench.protocols import Protocol, Timer, measure
from mega_moe.bench.ranks import Context, first_line
from mega_moe.bench.schema import CeilingRow, Outcome

INPUT_SETS = 3

_COPY_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
_PEER_BYTES = 256 << 20
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Operation:
    """Calls ready to run, one per input set; `poison` spoils the outputs, `finished` says what is wrong with them."""

    calls: Sequence[Callable[[], object]]
    poison: Callable[[], None]
    finished: Callable[[], str | None]
    keep: tuple[object, ...] = ()
    """What the calls reach through an address only."""


@dataclass(frozen=True)
class Ceiling:
    """One plain operation. `prepare` gives it ready to run, or the reason why this machine cannot."""

    name: str
    what: str
    unit: str
    work: float
    prepare: Callable[[Context], Operation | str]


def product_name(dtype: str) -> str:
    """Name of the ceiling of matrix products that read this element type."""
    return f"product {dtype}"


COPY = "device copy"


def ceilings(device_type: str, dtype: str) -> tuple[Ceiling, ...]:
    """The ceilings of a run whose tensors have `dtype`: two products, the copy, peer pull and push."""
    size = _PRODUCT_SIZE[device_type]
    copied = _COPY_BYTES[device_type]
    return (
        Ceiling(
            product_name(dtype),
            f"{size}^3 product, random data",
            "TF/s",
            2.0 * size**3,
            lambda context: _product(context, size, getattr(torch, dtype)),
        ),
        Ceiling(
            product_name("float8_e4m3fn"),
            f"{size}^3 product, per-tensor scales, fast accumulation",
            "TF/s",
            2.0 * size**3,
            lambda context: _product_fp8(context, size),
        ),
        Ceiling(
            COPY,
            f"{copied >> 20} MiB copied, bytes read and written",
            "GB/s",
            2.0 * copied,
            lambda context: _copy(context, copied),
        ),
        Ceiling(
            "peer pull",
            f"{_PEER_BYTES >> 20} MiB from the next rank, every rank at once, one direction",
            "GB/s",
            float(_PEER_BYTES),
            lambda context: _peer(context, _PEER_BYTES, push=False),
        ),
        Ceiling(
            "peer push",
            f"{_PEER_BYTES >> 20} MiB to the next rank, every rank at once, one direction",
            "GB/s",
            float(_PEER_BYTES),
            lambda context: _peer(context, _PEER_BYTES, push=True),
        ),
    )


def measure_ceiling(
    ceiling: Ceiling, protocols: Sequence[Protocol], timer: Timer, context: Context
) -> list[CeilingRow]:
    """One row per protocol, or one refused row. Collective over the ranks."""
    operation = ceiling.prepare(context)
    if isinstance(operation, str):
        return [_row(ceiling, Outcome("refused", (operation,), None))]
    rows = []
    for protocol in protocols:
        timing = measure(operation.calls, protocol, timer, context, poison=operation.poison)
        wrong = context.first_reason(operation.finished())
        rows.append(
            _row(ceiling, Outcome("failed", (wrong,), None) if wrong else Outcome("measured", (), timing))
        )
    return rows


def _row(ceiling: Ceiling, outcome: Outcome) -> CeilingRow:
    scale = 1e-12 if ceiling.unit == "TF/s" else 1e-9
    rate = ceiling.work / outcome.timing.seconds * scale if outcome.timing else None
    return CeilingRow("ceiling", ceiling.name, ceiling.what, ceiling.unit, ceiling.work, rate, outcome)  # type: ignore[arg-type]


def _product(context: Context, size: int, dtype: torch.dtype) -> Operation:
    lefts = [_random(context, size, size).to(dtype) for _ in range(INPUT_SETS)]
    right = _random(context, size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=context.device)
    # The second operand is read along its rows, as weights [N, K] are.
    calls = [_bind(torch.mm, left, right.t(), out=out) for left in lefts]
    return Operation(calls, lambda: _spoil(out), lambda: _not_finite(out))


def _product_fp8(context: Context, size: int) -> Operation | str:
    if context.device.type != "cuda":
        return f"the fp8 product runs on CUDA devices only, the device is {context.device.type}"
    capability = torch.cuda.get_device_capability(context.device)
    if capability < (8, 9):
        return f"fp8 products need compute capability 8.9, the device has {capability[0]}.{capability[1]}"
    lefts = [_random(context, size, size).to(torch.float8_e4m3fn) for _ in range(INPUT_SETS)]
    right = _random(context, size, size).to(torch.float8_e4m3fn)
    out = torch.empty(size, size, dtype=torch.bfloat16, device=context.device)
    one = torch.ones((), device=context.device)
    calls = [
        _bind(
            torch._scaled_mm,
            left,
            right.t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out,
        )
        for left in lefts
    ]
    return Operation(calls, lambda: _spoil(out), lambda: _not_finite(out))


def _copy(context: Context, num_bytes: int) -> Operation:
    sources = [
        torch.full((num_bytes,), value, dtype=torch.uint8, device=context.device)
        for value in range(1, INPUT_SETS + 1)
    ]
    target = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    calls = [_bind(target.copy_, source) for source in sources]
    return Operation(calls, lambda: _spoil(target), lambda: _not_copied(target))


def _peer(context: Context, num_bytes: int, *, push: bool) -> Operation | str:
    if context.device.type != "cuda":
        return f"peer memory is a matter of CUDA devices, the device is {context.device.type}"
    if context.group is None:
        return "one rank has no peer; torchrun with two ranks or more measures it"
    reason: str | None = None
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        shared = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=context.device)
        handle = symmetric_memory.rendezvous(shared, group=context.group)
        peer = handle.get_buffer((context.rank + 1) % context.num_ranks, (num_bytes,), torch.uint8)
    except (ImportError, RuntimeError) as error:
        reason = f"symmetric memory cannot be set up: {first_line(error)}"
    reason = context.first_reason(reason)
    if reason is not None:
        return reason
    sources = [
        torch.full((num_bytes,), value, dtype=torch.uint8, device=context.device)
        for value in range(1, INPUT_SETS + 1)
    ]
    if push:
        calls = [_bind(peer.copy_, source) for source in sources]
        # The rank before this one pushes into `shared`, so what arrived is seen here.
        return Operation(calls, lambda: _spoil(shared), lambda: _not_copied(shared), (shared, handle))
    shared.copy_(sources[0])
    target = torch.empty_like(shared)
    calls = [_bind(target.copy_, peer)]
    # The previous rank reads `shared` as long as this one does.
    return Operation(calls, lambda: _spoil(target), lambda: _not_copied(target), (shared, handle))


def _random(context: Context, *size: int) -> torch.Tensor:
    return torch.randn(*size, device=context.device)


def _bind(function: Callable[..., object], *arguments: object, **named: object) -> Callable[[], object]:
    return lambda: function(*arguments, **named)


def _spoil(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xFF)


def _not_finite(tensor: torch.Tensor) -> str | None:
    return None if bool(torch.isfinite(tensor).all()) else "the output holds NaN or Inf after the last window"


def _not_copied(tensor: torch.Tensor) -> str | None:
    smallest, largest = int(tensor.min()), int(tensor.max())
    if 1 <= smallest == largest <= INPUT_SETS:
        return None
    return f"the target holds bytes {smallest} to {largest} after the last window, wanted one source's value"
