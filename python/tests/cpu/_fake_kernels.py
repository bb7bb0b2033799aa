"""The fused backend on a CPU: in the library's place, operators that compute as the reference and note each launch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mega_moe._backends import faults, kernel_build, kernel_rank, plan, symmetric
from mega_moe._backends.control import Control, LocalControl
from mega_moe._backends.decide import Verdict
from mega_moe._backends.plain import PlainExecutor
from mega_moe._backends.quantize import quantize_weight
from mega_moe._backends.reference import ReferenceArithmetic
from mega_moe._backends.request import Request
from mega_moe._backends.staging import TorchStager
from mega_moe._backends.transport import LocalTransport
from mega_moe._ops import library

from ._fake_arithmetic import BackwardOfCopies, FoundCodes, OfCopies

NOTE = "the backward runs on something else"
STAGING = 256  # where it begins in the symmetric part


class Launch(NamedTuple):
    op: str
    tokens: int
    in_order: bool
    clamp: float = 0.0
    num_sms: int = 0
    delay_seed: int = 0
    trace: tuple[int, int] = (0, 0)
    saved_rows: int = 0


class FakeKernels:
    """What `library.require()` gives. ``report`` makes the next launches leave a record, as a kernel would.

    With several ranks y is zero: nothing travels.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.needs: list[tuple[bool, ...]] = []  # of the backwards
        self.quantized: list[tuple[tuple[int, ...], bool, bool]] = []  # weight, codes, transposed
        self.quantized_forwards: list[bool] = []  # of the backwards in fp8: whether their forward is too
        self.rounded: list[bool] = []  # of the launches in fp8: whether scales are powers of two
        self.synchronized = 0
        self.capturing = False
        self._ordering = False
        self._reports: list[tuple[int, ...]] = []

    def report(
        self, kind: int, role: int = faults.PUBLISH, index: int = 0, seen: int = 0, wanted: int = 0
    ) -> None:
        self._reports.append((1, 0, role, kind, index, seen, wanted, len(self.launches) + 1))

    def symmetric_parts(self) -> str:
        return "control staging home"

    def symmetric_layout(self, *arguments: Any) -> list[int]:
        max_tokens, top_k, _, hidden = arguments[:4]
        staging = self.staging_layout(max_tokens, top_k, hidden, True)[-1]
        return [0, 256, STAGING, staging, STAGING + staging, 256, STAGING + staging + 256]

    def staging_layout(self, max_tokens: int, top_k: int, hidden: int, quantize: bool) -> list[int]:
        """Of x and its scales; the rest is of no length."""
        scales = max_tokens * hidden
        end = scales + max_tokens * (hidden // 128) * 4
        return [0, scales, end, end, end, -(-end // 256) * 256]

    def workspace_parts(self) -> str:
        return "sync x_pool"

    def workspace_layout(self, *arguments: Any) -> list[int]:
        return [0, 256, 256, 256, 512]

    def route(self, topk_idx: Tensor, topk_weights: Tensor, summary: Tensor, *rest: Any) -> None:
        refused = rest[-2]
        self._launched(
            Launch("refuse" if refused else "route", refused or len(topk_idx), self._ordering), rest[2]
        )
        summary.zero_()

    def moe_forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        y: Tensor,
        saved_gate_up: Tensor,
        summary: Tensor,
        buffers: list[int],
        workspace: int,
        record: int,
        max_tokens: int,
        num_experts: int,
        pool_rows: int,
        canaries: bool,
        backward: bool,
        rank: int,
        num_sms: int,
        arrival_ns: int,
        progress_ns: int,
        clamp: float,
        delay_seed: int,
        trace: int,
        trace_bytes: int,
    ) -> None:
        for tensor in (x, topk_idx, topk_weights, w_gate_up, w_down, y):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
        assert len(x) <= max_tokens
        assert pool_rows % 128 == 0
        self._launched(
            Launch(
                "forward",
                len(x),
                self._ordering,
                clamp,
                num_sms,
                delay_seed,
                (trace, trace_bytes),
                saved_rows(saved_gate_up, w_down),
            ),
            record,
        )
        # No two calls' alike, so that a backward which is given another's is seen.
        saved_gate_up.fill_(self._mark(x))
        summary.zero_()
        if len(buffers) > 1:
            y.zero_()
            return
        request = Request(num_experts, max_tokens, topk_idx.shape[1], x.shape[1], w_down.shape[2])
        plain = PlainExecutor(
            request, ReferenceArithmetic("bf16"), TorchStager(num_experts), LocalControl(), LocalTransport()
        )
        wrong = (topk_idx < -1) | (topk_idx >= num_experts)
        y.copy_(plain.forward(x, topk_idx.masked_fill(wrong, -1), topk_weights, w_gate_up, w_down, clamp))
        if wrong.any():
            y.fill_(float("nan"))

    def quantize_weights(
        self, weight: Tensor, codes: Tensor, transposed: Tensor, scales: Tensor, power_of_two: bool
    ) -> None:
        experts, rows, columns = weight.shape
        assert weight.is_contiguous()
        assert scales.shape == (experts, rows // 128, columns // 128)
        self.quantized.append((tuple(weight.shape), codes.dim() > 1, transposed.dim() > 1))
        for expert in range(experts):
            got, scales[expert] = quantize_weight(weight[expert], power_of_two)
            if codes.dim() > 1:
                codes[expert] = got
            if transposed.dim() > 1:
                assert transposed.shape == (experts, columns, rows)
                transposed[expert] = got.T

    def moe_forward_fp8(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        gate_up_scales: Tensor,
        w_down: Tensor,
        down_scales: Tensor,
        y: Tensor,
        summary: Tensor,
        buffers: list[int],
        workspace: int,
        record: int,
        max_tokens: int,
        num_experts: int,
        pool_rows: int,
        canaries: bool,
        backward: bool,
        rank: int,
        num_sms: int,
        arrival_ns: int,
        progress_ns: int,
        clamp: float,
        power_of_two: bool,
        delay_seed: int,
        trace: int,
        trace_bytes: int,
    ) -> None:
        assert w_gate_up.dtype == w_down.dtype == torch.float8_e4m3fn
        for tensor in (topk_idx, topk_weights, w_gate_up, gate_up_scales, w_down, down_scales, y):
            assert tensor.is_contiguous()
        self._launched(
            Launch("forward fp8", len(x), self._ordering, clamp, num_sms, delay_seed, (trace, trace_bytes)),
            record,
        )
        summary.zero_()
        if len(buffers) > 1:
            y.zero_()
            return
        hidden, top_k = x.shape[1], topk_idx.shape[1]
        request = Request(num_experts, max_tokens, top_k, hidden, w_down.shape[2])
        self.rounded.append(power_of_two)
        stager = TorchStager(num_experts, power_of_two)
        if x.dtype == torch.float8_e4m3fn:
            staged = buffers[rank] + STAGING
            assert len(x) == 0 or x.data_ptr() == staged
            offset = self.staging_layout(max_tokens, top_k, hidden, True)[1]
            scales = _floats_at(staged + offset, len(x), hidden // 128)
            stager, x = FoundCodes(num_experts, x, scales), torch.zeros(x.shape, dtype=torch.bfloat16)
        # As the library counts: behind the words of the call and of its ranks.
        ids = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)].long()
        summary[3 : 3 + num_experts] = torch.bincount(ids, minlength=num_experts)
        arithmetic = OfCopies(gate_up_scales, down_scales, power_of_two=power_of_two)
        plain = PlainExecutor(request, arithmetic, stager, LocalControl(), LocalTransport())
        y.copy_(plain.forward(x, topk_idx, topk_weights, w_gate_up, w_down, clamp))

    def moe_backward(
        self,
        x: Tensor,
        dy: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        saved_gate_up: Tensor,
        dx: Tensor,
        dtopk: Tensor,
        dw_gate_up: Tensor,
        dw_down: Tensor,
        summary: Tensor,
        buffers: list[int],
        workspace: int,
        record: int,
        max_tokens: int,
        num_experts: int,
        pool_rows: int,
        canaries: bool,
        rank: int,
        num_sms: int,
        arrival_ns: int,
        progress_ns: int,
        clamp: float,
        accumulate: bool,
        delay_seed: int,
        trace: int,
        trace_bytes: int,
    ) -> None:
        results = (dx, dtopk, dw_gate_up, dw_down)
        # An empty tensor of one dimension: nobody wants it.
        needs = tuple(t.dim() > 1 for t in results)
        for tensor in (x, dy, topk_idx, topk_weights, w_gate_up, w_down, *results):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
        assert len({t.dtype for t, needed in zip(results[2:], needs[2:]) if needed}) <= 1
        assert dtopk.dtype == torch.float32
        self._launched(
            Launch(
                "backward into" if accumulate else "backward",
                len(x),
                self._ordering,
                clamp,
                num_sms,
                delay_seed,
                saved_rows=saved_rows(saved_gate_up, w_down),
            ),
            record,
        )
        assert bool((saved_gate_up == self._mark(x)).all())
        self.needs.append(needs)
        summary.zero_()
        request = Request(num_experts, max_tokens, topk_idx.shape[1], x.shape[1], w_down.shape[2])
        plain = PlainExecutor(
            request, ReferenceArithmetic("bf16"), TorchStager(num_experts), LocalControl(), LocalTransport()
        )
        got = plain.backward(
            dy,
            x,
            topk_idx,
            topk_weights.float(),
            w_gate_up,
            w_down,
            None if clamp == float("inf") else clamp,
            needs,  # type: ignore[arg-type]
            torch.float32 if accumulate else next((t.dtype for t in results[2:] if t.dim() > 1), x.dtype),
        )
        for at, (result, value) in enumerate(zip(results, got, strict=True)):
            if value is not None and needs[at]:
                (result.add_ if accumulate and at >= 2 else result.copy_)(value)

    def moe_backward_fp8(
        self,
        x: Tensor,
        dy: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_gate_up_t: Tensor,
        gate_up_sf: Tensor,
        w_down_t: Tensor,
        down_sf: Tensor,
        dx: Tensor,
        dtopk: Tensor,
        dw_gate_up: Tensor,
        dw_down: Tensor,
        summary: Tensor,
        buffers: list[int],
        workspace: int,
        record: int,
        max_tokens: int,
        num_experts: int,
        pool_rows: int,
        canaries: bool,
        quantize: bool,
        quantize_gradients: bool,
        rank: int,
        num_sms: int,
        arrival_ns: int,
        progress_ns: int,
        clamp: float,
        power_of_two: bool,
        accumulate: bool,
        delay_seed: int,
        trace: int,
        trace_bytes: int,
    ) -> None:
        results = (dx, dtopk, dw_gate_up, dw_down)
        needs = tuple(t.dim() > 1 for t in results)
        copies = (w_gate_up, w_gate_up_t, gate_up_sf, w_down_t, down_sf)
        for tensor in (x, dy, topk_idx, topk_weights, *copies, *results):
            assert tensor.is_contiguous()
        for codes in (w_gate_up, w_gate_up_t, w_down_t):
            assert codes.dtype == torch.float8_e4m3fn
        op = "backward into fp8" if accumulate else "backward fp8"
        op += " gradients" if quantize_gradients else ""
        self._launched(Launch(op, len(x), self._ordering, clamp, num_sms, delay_seed), record)
        self.quantized_forwards.append(quantize)
        self.rounded.append(power_of_two)
        self.needs.append(needs)
        summary.zero_()
        if len(buffers) > 1:
            return
        hidden, inner = x.shape[1], w_down_t.shape[1]
        request = Request(num_experts, max_tokens, topk_idx.shape[1], hidden, inner)
        arithmetic = BackwardOfCopies(
            *copies, dw_precision="fp8" if quantize_gradients else "bf16", power_of_two=power_of_two
        )
        plain = PlainExecutor(request, arithmetic, TorchStager(num_experts), LocalControl(), LocalTransport())
        got = plain.backward(
            dy,
            x,
            topk_idx,
            topk_weights.float(),
            x.new_empty(num_experts, 2 * inner, hidden),
            x.new_empty(num_experts, hidden, inner),
            None if clamp == float("inf") else clamp,
            needs,  # type: ignore[arg-type]
            torch.float32 if accumulate else next((t.dtype for t in results[2:] if t.dim() > 1), x.dtype),
        )
        for at, (result, value) in enumerate(zip(results, got, strict=True)):
            if value is not None and needs[at]:
                (result.add_ if accumulate and at >= 2 else result.copy_)(value)

    def _mark(self, x: Tensor) -> Tensor:
        return x.sum().to(torch.bfloat16)

    def _launched(self, launch: Launch, record: int) -> None:
        self.launches.append(launch)
        if self._reports:
            words = self._reports.pop(0)
            ctypes.memmove(record, (ctypes.c_int64 * len(words))(*words), 8 * len(words))

    @contextlib.contextmanager
    def _in_order(self, device: torch.device, lane: int = 0) -> Iterator[None]:
        self._ordering = True
        yield
        self._ordering = False


def saved_rows(saved_gate_up: Tensor, w_down: Tensor) -> int:
    if saved_gate_up.dim() == 1:
        assert saved_gate_up.numel() == 0
        return 0
    assert saved_gate_up.dtype == torch.bfloat16
    assert saved_gate_up.is_contiguous()
    assert saved_gate_up.shape[1] == 2 * w_down.shape[2]
    assert saved_gate_up.shape[0] % 128 == 0
    return len(saved_gate_up)


def _floats_at(address: int, rows: int, columns: int) -> Tensor:
    words = (ctypes.c_float * (rows * columns)).from_address(address)
    return torch.tensor(list(words), dtype=torch.float32).view(rows, columns)


class _Stream:
    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def faked_kernels(backward: bool = False) -> Iterator[FakeKernels]:
    """`MoEBuffer(device="cpu", backend="fused")` works, and everything that it launches is noted.

    ``backward``: the library has a kernel for it.
    """
    fake = FakeKernels()

    def synchronize(device: Any = None) -> None:
        fake.synchronized += 1

    def decide(request: Request, facts: Any, named: str | None = None) -> tuple[Verdict, ...]:
        return (Verdict("fused", note=None if backward else NOTE), Verdict("grouped"), Verdict("reference"))

    def of_group(
        nbytes: int, device: torch.device, group: Any, control: Control
    ) -> symmetric.SymmetricMemory:
        memory = symmetric.allocate(nbytes, device)
        return symmetric.SymmetricMemory(memory, [memory.data_ptr()] * control.size)

    layouts = (symmetric.symmetric_layout, symmetric.workspace_layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "require", lambda: fake)
        patch.setattr(plan, "decide", decide)
        patch.setattr(plan, "why_no_kernel_router", lambda request, facts: [])
        patch.setattr(kernel_build, "of_group", of_group)
        patch.setattr(kernel_rank, "_new_record", lambda: torch.zeros(faults.RECORD_WORDS, dtype=torch.int64))
        patch.setattr(kernel_rank, "in_order", fake._in_order)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
        patch.setattr(symmetric, "_ALIGNMENT", 64)  # what torch gives on a CPU
        for layout in layouts:
            layout.cache_clear()
        yield fake
    for layout in layouts:
        layout.cache_clear()


@pytest.fixture
def fake_kernels() -> Iterator[FakeKernels]:
    with faked_kernels() as fake:
        yield fake


@pytest.fixture
def fake_both() -> Iterator[FakeKernels]:
    with faked_kernels(backward=True) as fake:
        yield fake
