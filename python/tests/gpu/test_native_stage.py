"""The staging kernel against its definition in plain torch, bit for bit, and the clock probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._ops import library

from .test_quantize_weights import power_of_two_above

POISON = 0xA5
CANARY = 4096  # bytes before and after the buffer that nobody may touch
PARTS = ("x", "x_sf", "topk_idx", "topk_weights", "error")
NUM_EXPERTS = 256


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.require()


@dataclass(frozen=True)
class Case:
    """One call: x [T, H] bf16, ids and weights [T, K]."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    quantize: bool
    max_tokens: int
    power_of_two: bool = False


class Target:
    """A poisoned buffer with canaries on both sides."""

    def __init__(self, case: Case, ops: Any, device: torch.device) -> None:
        tokens, hidden = case.x.shape
        top_k = case.topk_idx.shape[1]
        self.offsets = list(ops.staging_layout(case.max_tokens, top_k, hidden, case.quantize))
        self.memory = torch.full((2 * CANARY + self.offsets[-1],), POISON, dtype=torch.uint8, device=device)
        self.buffer = self.memory[CANARY:-CANARY]
        self.buffer[self.offsets[4] :].zero_()
        self.ops = ops
        slots = tokens * top_k
        self.used = {
            "x": tokens * hidden * (1 if case.quantize else 2),
            "x_sf": tokens * (hidden // 128) * 4 if case.quantize else 0,
            "topk_idx": slots * 2,
            "topk_weights": slots * 4,
            "error": 32,
        }

    def stage(self, case: Case) -> None:
        arguments = (case.x, case.topk_idx, case.topk_weights, self.buffer.data_ptr(), self.buffer.numel())
        self.ops.stage(*arguments, case.max_tokens, NUM_EXPERTS, case.quantize, case.power_of_two)

    def part(self, name: str, dtype: torch.dtype) -> Tensor:
        """The bytes that a call has to write, on the CPU."""
        start = self.offsets[PARTS.index(name)]
        return self.buffer[start : start + self.used[name]].cpu().view(dtype)

    def assert_rest_untouched(self) -> None:
        rest = self.memory.cpu()
        for name in PARTS:
            start = CANARY + self.offsets[PARTS.index(name)]
            rest[start : start + self.used[name]] = POISON
        rest[CANARY + self.offsets[4] : -CANARY] = POISON  # zeroed by the constructor up to its end
        touched = (rest != POISON).nonzero().flatten()
        assert touched.numel() == 0, (
            f"bytes written outside the parts, the first at {int(touched[0]) - CANARY}"
        )


def quantized(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The definition: codes as bytes [T, H] and scales [T, H / 128] of bf16 x, on the CPU."""
    groups = x.cpu().float().view(x.shape[0], x.shape[1] // 128, 128)
    amax = groups.abs().amax(-1)
    scale = amax / torch.full_like(amax, 448.0)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if power_of_two:
        scale = power_of_two_above(scale)
    quotient = (groups / scale.unsqueeze(-1)).clamp(-448.0, 448.0)
    return quotient.to(torch.float8_e4m3fn).view(torch.uint8).view(x.shape), scale


def assert_same_codes(got: Tensor, want: Tensor) -> None:
    """Equal bytes; any NaN code equals any other."""
    differs = (got != want) & ~((got & 0x7F == 0x7F) & (want & 0x7F == 0x7F))
    assert not differs.any(), (
        f"{int(differs.sum())} codes differ, the first {got[differs][0]} for {want[differs][0]}"
    )


def assert_staged(target: Target, case: Case) -> None:
    tokens, hidden = case.x.shape
    if case.quantize:
        codes, scale = quantized(case.x, case.power_of_two)
        assert_same_codes(target.part("x", torch.uint8), codes.flatten())
        torch.testing.assert_close(
            target.part("x_sf", torch.float32), scale.flatten(), rtol=0, atol=0, equal_nan=True
        )
    else:
        assert torch.equal(target.part("x", torch.int16), case.x.cpu().view(torch.int16).flatten())
    ids = case.topk_idx.cpu().long().flatten()
    ids[(ids < 0) | (ids >= NUM_EXPERTS)] = 0xFFFF
    assert torch.equal(target.part("topk_idx", torch.uint16).long(), ids)
    weights = case.topk_weights.cpu().float().flatten()
    torch.testing.assert_close(
        target.part("topk_weights", torch.float32), weights, rtol=0, atol=0, equal_nan=True
    )
    target.assert_rest_untouched()
    assert hidden == case.x.shape[1]
    assert tokens <= case.max_tokens


def make_case(
    device: torch.device,
    tokens: int,
    hidden: int,
    top_k: int,
    *,
    quantize: bool,
    idx: torch.dtype = torch.int64,
    weights: torch.dtype = torch.float32,
    x: Tensor | None = None,
    power_of_two: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    if x is None:
        x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (tokens, top_k), generator=generator)
    values = torch.rand(tokens, top_k, generator=generator)
    inputs = x.to(device), ids.to(idx).to(device), values.to(weights).to(device)
    return Case(*inputs, quantize, tokens + 5, power_of_two)


def run(case: Case, ops: Any, device: torch.device) -> Target:
    target = Target(case, ops, device)
    target.stage(case)
    torch.cuda.synchronize(device)
    assert_staged(target, case)
    return target


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("hidden", [128, 640, 2048, 4096, 7168])
@pytest.mark.parametrize("tokens", [0, 1, 7, 129, 4096])
def test_shapes(cuda_device: torch.device, ops: Any, tokens: int, hidden: int, quantize: bool) -> None:
    target = run(make_case(cuda_device, tokens, hidden, 8, quantize=quantize), ops, cuda_device)
    assert not target.part("error", torch.int32).any()


@pytest.mark.parametrize("hidden", [8, 24, 136, 1000])
def test_copying_form_takes_any_multiple_of_a_vector(
    cuda_device: torch.device, ops: Any, hidden: int
) -> None:
    run(make_case(cuda_device, 129, hidden, 2, quantize=False), ops, cuda_device)


@pytest.mark.parametrize("top_k", range(1, 17))
@pytest.mark.parametrize("idx", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_slots(
    cuda_device: torch.device, ops: Any, top_k: int, idx: torch.dtype, weights: torch.dtype
) -> None:
    for tokens in (1, 129, 1031):
        case = make_case(
            cuda_device, tokens, 128, top_k, quantize=False, idx=idx, weights=weights, seed=top_k
        )
        run(case, ops, cuda_device)


def test_all_masked(cuda_device: torch.device, ops: Any) -> None:
    case = make_case(cuda_device, 64, 128, 8, quantize=True)
    case.topk_idx.fill_(-1)
    target = run(case, ops, cuda_device)
    assert not target.part("error", torch.int32).any()


@pytest.mark.parametrize("bad", [-2, NUM_EXPERTS, 2**31 - 1, -(2**31), 2**40, -(2**40)])
def test_bad_id_is_masked_and_recorded(cuda_device: torch.device, ops: Any, bad: int) -> None:
    case = make_case(cuda_device, 300, 128, 6, quantize=False)
    case.topk_idx[211, 4] = bad
    record = run(case, ops, cuda_device).part("error", torch.int32).tolist()
    assert record == [1, 211, 4, max(min(bad, 2**31 - 1), -(2**31)), 0, 0, 0, 0]


def test_one_of_several_bad_ids_is_recorded_whole(cuda_device: torch.device, ops: Any) -> None:
    case = make_case(cuda_device, 4096, 128, 8, quantize=False)
    case.topk_idx[::3, 5] = -7
    case.topk_idx[1::3, 2] = 9000
    target = run(case, ops, cuda_device)
    flag, token, slot, value, *rest = target.part("error", torch.int32).tolist()
    assert flag == 1
    assert int(case.topk_idx[token, slot]) == value
    assert value in {-7, 9000}
    assert rest == [0, 0, 0, 0]
    # The record is the reader's to clear: a second call leaves the first finding in place.
    case.topk_idx[token, slot] = 0
    target.stage(case)
    assert target.part("error", torch.int32).tolist()[:4] == [1, token, slot, value]


def special_groups() -> Iterator[tuple[str, Tensor]]:
    """Groups of 128 whose scale, quotients or codes are at an edge of the formats."""
    normal = torch.randn(128, generator=torch.Generator().manual_seed(1))
    yield "zeros", torch.zeros(128)
    yield "negative zeros", torch.full((128,), -0.0)
    yield (
        "zeros of both signs and one value",
        torch.cat((torch.zeros(63), torch.full((64,), -0.0), torch.ones(1))),
    )
    yield "denormal scale", normal * 1e-38
    yield "smallest denormal of bf16", torch.full((128,), 2.0**-133)
    yield "denormals", torch.arange(128) * 2.0**-133
    yield "denormals alongside normals", torch.cat((torch.arange(64) * -(2.0**-133), normal[64:]))
    yield "largest", torch.full((128,), 3.3895e38)
    yield "3e38", normal.clamp(-1, 1) * 3e38
    yield "one Inf", torch.cat((normal[:127], torch.tensor([float("inf")])))
    yield "one -Inf", torch.cat((torch.tensor([-float("inf")]), normal[1:]))
    yield "all Inf", torch.full((128,), float("inf"))
    yield "one NaN", torch.cat((normal[:77], torch.tensor([float("nan")]), normal[78:]))
    yield "NaN alongside Inf", torch.cat((torch.tensor([float("nan"), float("inf")]), normal[2:]))
    yield "all NaN", torch.full((128,), float("nan"))
    yield "ties", torch.arange(128) * (448.0 / 256.0)
    yield "codes near zero", torch.cat((torch.full((1,), 448.0), torch.arange(127) * 2.0**-12))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_special_groups(cuda_device: torch.device, ops: Any, power_of_two: bool) -> None:
    for name, group in special_groups():
        # Neighbours of ordinary size, so that a group that leaks into its warp is seen.
        x = torch.randn(3, 640, generator=torch.Generator().manual_seed(2)).bfloat16()
        x[1, 256:384] = group.bfloat16()
        try:
            case = make_case(cuda_device, 3, 640, 1, quantize=True, x=x, power_of_two=power_of_two)
            run(case, ops, cuda_device)
        except AssertionError as error:
            raise AssertionError(f"group of {name}: {error}") from error


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_amax(cuda_device: torch.device, ops: Any, power_of_two: bool) -> None:
    """Each positive bf16 as amax of a group of random bf16 up to it, denormals and NaN included."""
    generator = torch.Generator().manual_seed(3)
    amax = torch.arange(0x8000, dtype=torch.int32)
    drop = torch.randint(0, 16 * 128, (0x8000, 128), generator=generator, dtype=torch.int32)
    bits = (amax.unsqueeze(1) - drop).clamp(min=0)
    bits[torch.arange(0x8000), torch.randint(0, 128, (0x8000,), generator=generator)] = amax
    sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int32) << 15
    x = (bits | sign).to(torch.uint16).view(torch.bfloat16).view(-1, 2048)
    case = make_case(cuda_device, x.shape[0], 2048, 1, quantize=True, x=x, power_of_two=power_of_two)
    run(case, ops, cuda_device)


@pytest.mark.parametrize("quantize", [False, True])
def test_runs_on_the_current_stream(cuda_device: torch.device, ops: Any, quantize: bool) -> None:
    case = make_case(cuda_device, 129, 640, 8, quantize=quantize)
    late = torch.randn(129, 640, device=cuda_device).bfloat16()
    target = Target(case, ops, cuda_device)
    torch.cuda.synchronize(cuda_device)
    stream = torch.cuda.Stream(cuda_device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.x.copy_(late)  # on any other stream the kernel would have read x before this
        target.stage(case)
    stream.synchronize()
    assert_staged(target, case)


@pytest.mark.parametrize("quantize", [False, True])
def test_graph_replay_reads_new_values(cuda_device: torch.device, ops: Any, quantize: bool) -> None:
    case = make_case(cuda_device, 257, 2048, 8, quantize=quantize)
    target = run(case, ops, cuda_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.stage(case)
    for seed in range(3):
        new = make_case(cuda_device, 257, 2048, 8, quantize=quantize, seed=10 + seed)
        for old, values in (
            (case.x, new.x),
            (case.topk_idx, new.topk_idx),
            (case.topk_weights, new.topk_weights),
        ):
            old.copy_(values)
        target.buffer[: target.offsets[4]] = POISON
        graph.replay()
        torch.cuda.synchronize(cuda_device)
        assert_staged(target, case)


def test_repeats_bitwise(cuda_device: torch.device, ops: Any) -> None:
    case = make_case(cuda_device, 4096, 2048, 8, quantize=True)
    first = run(case, ops, cuda_device).memory.clone()
    for _ in range(20):
        target = Target(case, ops, cuda_device)
        target.stage(case)
        assert torch.equal(target.memory, first)


def test_arguments_on_two_devices_are_refused(cuda_device: torch.device, ops: Any) -> None:
    case = make_case(cuda_device, 4, 128, 2, quantize=True)
    target = Target(case, ops, cuda_device)
    moved = Case(case.x, case.topk_idx.cpu(), case.topk_weights, True, case.max_tokens)
    with pytest.raises(RuntimeError, match=r"stage: topk_idx: device is cpu, must be cuda:\d"):
        target.stage(moved)


@pytest.mark.multi_gpu
def test_device_that_is_not_current(cuda_devices: list[torch.device], ops: Any) -> None:
    with torch.cuda.device(cuda_devices[0]):
        run(make_case(cuda_devices[1], 129, 640, 8, quantize=True), ops, cuda_devices[1])
        assert torch.cuda.current_device() == cuda_devices[0].index


def test_clock_probe(cuda_device: torch.device, ops: Any) -> None:
    """Two probes around work: each SM once, and a clock between what idles and what no device reaches."""
    num_sms = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    before, after = (torch.full((num_sms, 3), -1, dtype=torch.int64, device=cuda_device) for _ in range(2))
    a = torch.randn(4096, 4096, device=cuda_device, dtype=torch.bfloat16)
    ops.clock_probe(before)
    for _ in range(50):
        a @ a
    ops.clock_probe(after)
    first, last = before.cpu(), after.cpu()
    assert torch.equal(first[:, 0], torch.arange(num_sms))
    assert torch.equal(last[:, 0], torch.arange(num_sms))
    ticks, ns = (last[:, 1:] - first[:, 1:]).double().unbind(1)
    mhz = ticks / ns * 1000
    assert mhz.min() > 200
    assert mhz.max() < 3000
    # While the clock rises, SMs that were read some microseconds apart differ: 2.1 % was seen.
    assert mhz.max() / mhz.min() < 1.1


def test_clock_probe_wants_a_row_per_sm(cuda_device: torch.device, ops: Any) -> None:
    num_sms = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    out = torch.zeros(num_sms + 1, 3, dtype=torch.int64, device=cuda_device)
    with pytest.raises(RuntimeError, match=rf"out: shape is \[{num_sms + 1}, 3\], must be \[{num_sms}, 3\]"):
        ops.clock_probe(out)
