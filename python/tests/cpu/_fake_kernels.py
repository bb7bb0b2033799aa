"""The fused backend on a CPU: in the library's place, operators that compute as the reference and note each launch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mega_moe._backends import build
from mega_moe._backends.choice import explanation
from mega_moe._backends.choice.decide import Verdict
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused import faults, launch, memory
from mega_moe._backends.group import Control
from mega_moe._backends.plain.executor import PlainExecutor
from mega_moe._backends.plain.quantize import quantize_weight
from mega_moe._backends.plain.reference import ReferenceArithmetic
from mega_moe._base.activation import Activation
from mega_moe._base.layer import LayerInputs, Needs
from mega_moe._base.mode import Mode
from mega_moe._ops import library

from ._fake_arithmetic import BackwardOfCopies, OfCopies

NOTE = "the backward runs on something else"
STAGED = 256  # where x begins in the symmetric part


class Launch(NamedTuple):
    op: str
    tokens: int
    in_order: bool
    clamp: float | None = None
    num_sms: int = 0
    delay_seed: int = 0
    traced: bool = False
    saved_rows: int = 0


class Rank(NamedTuple):
    """What `KernelRank.words` packs, as the library unpacks it."""

    max_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int
    num_ranks: int
    pool_rows: int
    mode: Mode
    canaries: int
    rank: int
    num_sms: int
    arrival_ns: int
    progress_ns: int
    workspace: int
    record: int
    buffers: list[int]

    @classmethod
    def of(cls, words: list[int]) -> Rank:
        precision, formats = ("none", "bf16", "fp8"), ("fp32", "power_of_two")
        mode = Mode(*(precision[word] for word in words[7:10]), formats[words[10]])
        rank = cls(*words[:7], mode, *words[11:18], words[18:])
        assert len(rank.buffers) == rank.num_ranks
        return rank


class FakeKernels:
    """What `library.require()` gives. ``report`` makes the next launches leave a record, as a kernel would.

    With several ranks y is zero: nothing travels.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.needs: list[tuple[bool, ...]] = []  # of the backwards
        self.quantized: list[tuple[tuple[int, ...], bool, bool]] = []  # weight, codes, transposed
        self.fp8_forwards: list[bool] = []  # of the backwards in fp8: whether their forward is too
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
        return "control staged_x staged_scales"

    def symmetric_layout(self, words: list[int]) -> list[int]:
        max_tokens, _, _, hidden = words[:4]
        x, scales = max_tokens * hidden, max_tokens * (hidden // 128) * 4
        return [0, 256, STAGED, x, STAGED + x, scales, -(-(STAGED + x + scales) // 256) * 256]

    def workspace_parts(self) -> str:
        return "sync x_pool"

    def workspace_layout(self, words: list[int]) -> list[int]:
        return [0, 256, 256, 256, 512]

    def route(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        summary: Tensor,
        words: list[int],
        refused_tokens: int,
    ) -> None:
        op = "refuse" if refused_tokens else "route"
        self._launched(Launch(op, refused_tokens or len(topk_idx), self._ordering), Rank.of(words))
        summary.zero_()

    def quantize_weights(
        self,
        weight: Tensor,
        codes: Tensor | None,
        codes_t: Tensor | None,
        scales: Tensor,
        power_of_two: bool,
    ) -> None:
        experts, rows, columns = weight.shape
        assert weight.is_contiguous()
        assert scales.shape == (experts, rows // 128, columns // 128)
        self.quantized.append((tuple(weight.shape), codes is not None, codes_t is not None))
        for expert in range(experts):
            got, scales[expert] = quantize_weight(weight[expert], power_of_two)
            if codes is not None:
                codes[expert] = got
            if codes_t is not None:
                assert codes_t.shape == (experts, columns, rows)
                codes_t[expert] = got.T

    def moe_forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        gate_up_sf: Tensor | None,
        down_sf: Tensor | None,
        y: Tensor,
        saved_gate_up: Tensor | None,
        summary: Tensor,
        words: list[int],
        activation: str,
        clamp: float | None,
        alpha: float | None,
        trace: Tensor | None,
        delay_seed: int,
    ) -> None:
        rank, fp8 = Rank.of(words), gate_up_sf is not None
        assert fp8 == (rank.mode.forward == "fp8")
        for tensor in (x, topk_idx, topk_weights, w_gate_up, w_down, gate_up_sf, down_sf, y):
            if tensor is not None:
                assert tensor.is_contiguous()
                assert tensor.data_ptr() % 16 == 0
        assert len(x) <= rank.max_tokens
        assert rank.pool_rows % 128 == 0
        self._launched(
            Launch(
                "forward fp8" if fp8 else "forward",
                len(x),
                self._ordering,
                clamp,
                rank.num_sms,
                delay_seed,
                trace is not None,
                saved_rows(saved_gate_up, w_down.shape[2]),
            ),
            rank,
        )
        if saved_gate_up is not None:
            # No two calls' alike, so that a backward which is given another's is seen.
            saved_gate_up.fill_(self._mark(x))
        summary.zero_()
        if len(rank.buffers) > 1:
            y.zero_()
            return
        experts = rank.num_experts
        request = Request(experts, rank.max_tokens, topk_idx.shape[1], x.shape[1], w_down.shape[2])
        arithmetic = ReferenceArithmetic("bf16")
        wrong = (topk_idx < -1) | (topk_idx >= experts)
        # As the library counts: behind the words of the call and of its ranks.
        ids = topk_idx[(topk_idx >= 0) & ~wrong].long()
        summary[3 : 3 + experts] = torch.bincount(ids, minlength=experts)
        if fp8:
            assert w_gate_up.dtype == w_down.dtype == torch.float8_e4m3fn
            power_of_two = rank.mode.power_of_two
            self.rounded.append(power_of_two)
            found = None
            if x.dtype == torch.float8_e4m3fn:
                found, x = self._found(x, rank), torch.zeros(x.shape, dtype=torch.bfloat16)
            assert gate_up_sf is not None
            assert down_sf is not None
            arithmetic = OfCopies(gate_up_sf, down_sf, power_of_two=power_of_two, found=found)
        plain = PlainExecutor(request, arithmetic, Control())
        inputs = LayerInputs(x, topk_idx.masked_fill(wrong, -1), topk_weights, w_gate_up, w_down)
        y.copy_(plain.forward(inputs, Activation(activation, clamp=clamp, alpha=alpha))[0])
        if wrong.any():
            y.fill_(float("nan"))

    def _found(self, x: Tensor, rank: Rank) -> tuple[Tensor, Tensor]:
        """Codes where the buffer stages them, and their scales."""
        staged = rank.buffers[rank.rank] + STAGED
        assert len(x) == 0 or x.data_ptr() == staged
        hidden = x.shape[1]
        return x, _floats_at(staged + rank.max_tokens * hidden, len(x), hidden // 128)

    def moe_backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor | None,
        w_gate_up_t: Tensor | None,
        w_down_t: Tensor | None,
        gate_up_sf: Tensor | None,
        down_sf: Tensor | None,
        saved_gate_up: Tensor | None,
        dx: Tensor | None,
        dtopk: Tensor | None,
        dw_gate_up: Tensor | None,
        dw_down: Tensor | None,
        summary: Tensor,
        words: list[int],
        activation: str,
        clamp: float | None,
        alpha: float | None,
        accumulate: bool,
        trace: Tensor | None,
        delay_seed: int,
    ) -> None:
        rank, fp8 = Rank.of(words), gate_up_sf is not None
        assert fp8 == (rank.mode.backward == "fp8") == (w_down is None)
        results = (dx, dtopk, dw_gate_up, dw_down)
        needs = Needs(*(result is not None for result in results))
        copies = [t for t in (w_gate_up, w_gate_up_t, gate_up_sf, w_down_t, down_sf) if t is not None]
        for tensor in (x, dy, topk_idx, topk_weights, w_down, *copies, *results):
            if tensor is not None:
                assert tensor.is_contiguous()
                assert tensor.data_ptr() % 16 == 0
        wide = [t.dtype for t in results[2:] if t is not None]
        assert len(set(wide)) <= 1
        assert dtopk is None or dtopk.dtype == torch.float32
        op = "backward into" if accumulate else "backward"
        op += " fp8" if fp8 else ""
        op += " wgrad" if rank.mode.wgrad == "fp8" else ""
        self._launched(
            Launch(
                op,
                len(x),
                self._ordering,
                clamp,
                rank.num_sms,
                delay_seed,
                trace is not None,
                saved_rows(saved_gate_up, w_down_t.shape[1] if w_down is None else w_down.shape[2]),
            ),
            rank,
        )
        if saved_gate_up is not None:
            assert bool((saved_gate_up == self._mark(x)).all())
        self.needs.append(tuple(needs))
        summary.zero_()
        experts, hidden = rank.num_experts, x.shape[1]
        arithmetic, inner = ReferenceArithmetic("bf16"), 0 if w_down is None else w_down.shape[2]
        if fp8:
            assert w_down_t is not None
            assert all(copy.dtype == torch.float8_e4m3fn for copy in (copies[0], copies[1], copies[3]))
            self.fp8_forwards.append(rank.mode.forward == "fp8")
            self.rounded.append(rank.mode.power_of_two)
            if len(rank.buffers) > 1:
                return
            inner = w_down_t.shape[1]
            arithmetic = BackwardOfCopies(
                *copies, dw_precision=rank.mode.wgrad, power_of_two=rank.mode.power_of_two
            )
            w_gate_up = x.new_empty(experts, 2 * inner, hidden)
            w_down = x.new_empty(experts, hidden, inner)
        assert w_down is not None
        request = Request(experts, rank.max_tokens, topk_idx.shape[1], hidden, inner)
        plain = PlainExecutor(request, arithmetic, Control())
        got = plain.backward(
            dy,
            LayerInputs(x, topk_idx, topk_weights.float(), w_gate_up, w_down),
            Activation(activation, clamp=clamp, alpha=alpha),
            needs,
            torch.float32 if accumulate else next(iter(wide), x.dtype),
        )
        for at, (result, value) in enumerate(zip(results, got, strict=True)):
            if result is not None and value is not None:
                (result.add_ if accumulate and at >= 2 else result.copy_)(value)

    def _mark(self, x: Tensor) -> Tensor:
        return x.sum().to(torch.bfloat16)

    def _launched(self, launch: Launch, rank: Rank) -> None:
        self.launches.append(launch)
        if self._reports:
            words = self._reports.pop(0)
            ctypes.memmove(rank.record, (ctypes.c_int64 * len(words))(*words), 8 * len(words))

    @contextlib.contextmanager
    def _in_order(self, device: torch.device, lane: int = 0) -> Iterator[None]:
        self._ordering = True
        yield
        self._ordering = False


def saved_rows(saved_gate_up: Tensor | None, intermediate: int) -> int:
    if saved_gate_up is None:
        return 0
    assert saved_gate_up.dtype == torch.bfloat16
    assert saved_gate_up.is_contiguous()
    assert saved_gate_up.shape[1] == 2 * intermediate
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

    def of_group(nbytes: int, device: torch.device, group: Any, control: Control) -> memory.SymmetricMemory:
        part = memory.allocate(nbytes, device)
        return memory.SymmetricMemory(part, [part.data_ptr()] * control.size)

    layouts = (memory.symmetric_layout, memory.workspace_layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "require", lambda: fake)
        patch.setattr(explanation, "decide", decide)
        patch.setattr(build, "why_no_kernel_router", lambda request, facts: [])
        patch.setattr(build, "of_group", of_group)
        patch.setattr(launch, "_new_record", lambda: torch.zeros(faults.RECORD_WORDS, dtype=torch.int64))
        patch.setattr(launch, "in_order", fake._in_order)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
        patch.setattr(memory, "_ALIGNMENT", 64)  # what torch gives on a CPU
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
