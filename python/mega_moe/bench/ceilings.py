"""What the machine does on plain operations, in the same run and protocol as the rates judged against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mega_moe.bench.protocols import Protocol, Timer, measure
from mega_moe.bench.ranks import Context, first_line
from mega_moe.bench.schema import CeilingRow, Outcome

INPUT_SETS = 3

_COPY_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
_PEER_BYTES = 256 << 20
_GEMM_SIZE = {"cuda": 8192, "cpu": 512}


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
    """Name of the ceiling of GEMMs that read this element type."""
    return f"product {dtype}"


def ceilings(device_type: str, dtype: str) -> tuple[Ceiling, ...]:
    """The ceilings of a run whose tensors have `dtype`: two GEMMs, the copy, peer pull and push."""
    size, copied = _GEMM_SIZE[device_type], _COPY_BYTES[device_type]
    flops, own = 2.0 * size**3, getattr(torch, dtype)
    peer = f"{_PEER_BYTES >> 20} MiB {{}} the next rank, every rank at once, one direction"
    pull, push = (lambda context, push=push: _peer(context, _PEER_BYTES, push=push) for push in (False, True))
    return (
        Ceiling(
            product_name(dtype),
            f"{size}^3 product, random data",
            "TF/s",
            flops,
            lambda context: _gemm(context, size, own),
        ),
        Ceiling(
            product_name("float8_e4m3fn"),
            f"{size}^3 product, per-tensor scales, fast accumulation",
            "TF/s",
            flops,
            lambda context: _gemm_fp8(context, size),
        ),
        Ceiling(
            "device copy",
            f"{copied >> 20} MiB copied, bytes read and written",
            "GB/s",
            2.0 * copied,
            lambda context: _copy(context, copied),
        ),
        Ceiling("peer pull", peer.format("from"), "GB/s", float(_PEER_BYTES), pull),
        Ceiling("peer push", peer.format("to"), "GB/s", float(_PEER_BYTES), push),
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


def _gemm(context: Context, size: int, dtype: torch.dtype) -> Operation:
    lefts, right = _operands(context, size, dtype)
    out = torch.empty(size, size, dtype=dtype, device=context.device)
    return _into(out, [partial(torch.mm, left, right, out=out) for left in lefts])


def _gemm_fp8(context: Context, size: int) -> Operation | str:
    if context.device.type != "cuda":
        return f"the fp8 GEMM runs on CUDA devices only, the device is {context.device.type}"
    capability = torch.cuda.get_device_capability(context.device)
    if capability < (8, 9):
        return f"fp8 GEMMs need compute capability 8.9, the device has {capability[0]}.{capability[1]}"
    lefts, right = _operands(context, size, torch.float8_e4m3fn)
    out = torch.empty(size, size, dtype=torch.bfloat16, device=context.device)
    one = torch.ones((), device=context.device)
    gemm = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=out.dtype, use_fast_accum=True)
    return _into(out, [partial(gemm, left, right, out=out) for left in lefts])


def _operands(context: Context, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    # The second operand is read along its rows, as weights [N, K] are.
    *lefts, right = (torch.randn(size, size, device=context.device).to(dtype) for _ in range(INPUT_SETS + 1))
    return lefts, right.t()


def _into(out: Tensor, calls: Sequence[Callable[[], object]]) -> Operation:
    def fault() -> str | None:
        finite = bool(torch.isfinite(out).all())
        return None if finite else "the output holds NaN or Inf after the last window"

    return Operation(calls, lambda: _spoil(out), fault)


def _copy(context: Context, num_bytes: int) -> Operation:
    target = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    calls = [partial(target.copy_, source) for source in _sources(context, num_bytes)]
    return _copied(target, calls)


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
    sources = _sources(context, num_bytes)
    if push:
        # The rank before this one pushes into `shared`, so what arrived is seen here.
        return _copied(shared, [partial(peer.copy_, source) for source in sources], (shared, handle))
    shared.copy_(sources[0])
    target = torch.empty_like(shared)
    # The previous rank reads `shared` as long as this one does.
    return _copied(target, [partial(target.copy_, peer)], (shared, handle))


def _sources(context: Context, num_bytes: int) -> list[Tensor]:
    """Each filled with a value of its own, from 1."""
    values = range(1, INPUT_SETS + 1)
    return [torch.full((num_bytes,), value, dtype=torch.uint8, device=context.device) for value in values]


def _copied(
    target: Tensor, calls: Sequence[Callable[[], object]], keep: tuple[object, ...] = ()
) -> Operation:
    def fault() -> str | None:
        smallest, largest = int(target.min()), int(target.max())
        if 1 <= smallest == largest <= INPUT_SETS:
            return None
        return (
            f"the target holds bytes {smallest} to {largest} after the last window, wanted one source's value"
        )

    return Operation(calls, lambda: _spoil(target), fault, keep)


def _spoil(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xFF)
