"""The kernel that makes a weight's e4m3 copies against its definition in plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._ops import library

E4M3 = torch.float8_e4m3fn
POISON = 0xA5
CANARY = 4096  # bytes before and after each result that nobody may touch


@pytest.fixture(scope="module")
def ops() -> Any:
    return library.require()


class Result:
    """A poisoned tensor with canaries on both sides."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        self.memory = torch.full((size + 2 * CANARY,), POISON, dtype=torch.uint8, device=device)
        self.tensor = self.memory[CANARY : CANARY + size].view(dtype).view(shape)

    def bytes(self) -> Tensor:
        return self.memory[CANARY:-CANARY].cpu()

    def assert_canaries(self) -> None:
        edges = torch.cat((self.memory[:CANARY], self.memory[-CANARY:]))
        assert bool((edges == POISON).all())


def power_of_two_above(value: Tensor) -> Tensor:
    """The smallest power of two that is not below ``value`` (fp32, positive); Inf and NaN stay."""
    mantissa, exponent = torch.frexp(value.double())
    rounded = torch.where(mantissa == 0.5, value.double(), torch.ldexp(torch.ones_like(mantissa), exponent))
    return torch.where(value.isfinite(), rounded, value.double()).float()


def definition(weight: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes as bytes ``[E, N, K]`` and scales ``[E, N / 128, K / 128]`` of ``weight``, on the CPU."""
    experts, rows, columns = weight.shape
    blocks = weight.cpu().float().view(experts, rows // 128, 128, columns // 128, 128)
    amax = blocks.abs().amax(dim=(2, 4), keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, 448.0))
    if power_of_two:
        scale = power_of_two_above(scale)
    codes = (blocks / scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8).view(weight.shape)
    return codes, scale[:, :, 0, :, 0]


def assert_same_codes(got: Tensor, want: Tensor) -> None:
    """Equal bytes; any NaN code equals any other."""
    differs = (got != want) & ~((got & 0x7F == 0x7F) & (want & 0x7F == 0x7F))
    assert not differs.any(), (
        f"{int(differs.sum())} codes differ, the first at {differs.nonzero()[0].tolist()}: "
        f"{got[differs][0]} for {want[differs][0]}"
    )


def run(weight: Tensor, ops: Any, *, wanted: str = "both", power_of_two: bool = False) -> None:
    """One call, compared; ``wanted``: both, codes, transposed or neither."""
    experts, rows, columns = weight.shape
    device = weight.device
    codes = Result((experts, rows, columns), E4M3, device)
    transposed = Result((experts, columns, rows), E4M3, device)
    scales = Result((experts, rows // 128, columns // 128), torch.float32, device)
    ops.quantize_weights(
        weight,
        codes.tensor if wanted in ("both", "codes") else None,
        transposed.tensor if wanted in ("both", "transposed") else None,
        scales.tensor,
        power_of_two,
    )
    torch.cuda.synchronize(device)
    want, want_scales = definition(weight, power_of_two)
    got_scales = scales.bytes().view(torch.float32).view(want_scales.shape)
    torch.testing.assert_close(got_scales, want_scales, rtol=0, atol=0, equal_nan=True)
    for name, result, expected in (
        ("codes", codes, want),
        ("transposed", transposed, want.transpose(1, 2)),
    ):
        got = result.bytes().view(expected.shape)
        if wanted in ("both", name):
            assert_same_codes(got, expected)
        else:
            assert bool((got == POISON).all())
    for result in (codes, transposed, scales):
        result.assert_canaries()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (0, 128, 128),
        (1, 128, 128),
        (3, 256, 128),
        (2, 128, 384),
        (2, 384, 640),
        (5, 1536, 2048),
        (1, 4096, 7168),
    ],
)
def test_shapes(cuda_device: torch.device, ops: Any, shape: tuple[int, int, int], power_of_two: bool) -> None:
    run(normal(*shape).to(cuda_device), ops, power_of_two=power_of_two)


@pytest.mark.parametrize("wanted", ["codes", "transposed", "neither"])
def test_either_copy_can_be_left_out(cuda_device: torch.device, ops: Any, wanted: str) -> None:
    run(normal(2, 256, 384).to(cuda_device), ops, wanted=wanted)


def special_blocks() -> Iterator[tuple[str, Tensor]]:
    """Blocks whose scale, quotients or codes are at an edge of the formats."""
    plain = normal(128, 128, seed=1).float()

    def with_one(value: float, at: tuple[int, int] = (77, 101)) -> Tensor:
        block = plain.clone()
        block[at] = value
        return block

    yield "zeros", torch.zeros(128, 128)
    yield "negative zeros", torch.full((128, 128), -0.0)
    yield (
        "one value",
        torch.zeros(128, 128).index_put((torch.tensor(127), torch.tensor(127)), torch.tensor(1.0)),
    )
    yield "denormal scale", plain * 1e-38
    yield "smallest denormal of bf16", torch.full((128, 128), 2.0**-133)
    yield "denormals", torch.arange(128 * 128).view(128, 128) % 128 * 2.0**-133
    yield "largest", torch.full((128, 128), 3.3895e38)
    yield "3e38", plain.clamp(-1, 1) * 3e38
    yield "one Inf", with_one(float("inf"))
    yield "one -Inf in a corner", with_one(-float("inf"), (0, 0))
    yield "all Inf", torch.full((128, 128), float("inf"))
    yield "one NaN", with_one(float("nan"))
    yield "one NaN in the last corner", with_one(float("nan"), (127, 127))
    yield (
        "NaN alongside Inf",
        with_one(float("nan")).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(float("inf"))),
    )
    yield "all NaN", torch.full((128, 128), float("nan"))
    yield "ties", torch.arange(128 * 128).view(128, 128) % 256 * (448.0 / 256.0)
    yield "amax at a power of two times 448", with_one(448.0 * 2.0**5)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_special_blocks(cuda_device: torch.device, ops: Any, power_of_two: bool) -> None:
    """Bit for bit, and the eight blocks around keep their own scales."""
    for name, block in special_blocks():
        weight = normal(2, 384, 384, seed=2)
        weight[1, 128:256, 128:256] = block.bfloat16()
        try:
            run(weight.to(cuda_device), ops, power_of_two=power_of_two)
        except AssertionError as error:
            raise AssertionError(f"block of {name}: {error}") from error


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_amax(cuda_device: torch.device, ops: Any, power_of_two: bool) -> None:
    """Each 16th positive bf16 as amax of a block of random bf16 up to it, denormals, Inf and NaN included."""
    generator = torch.Generator().manual_seed(3)
    amax = torch.arange(0, 0x8000, 16, dtype=torch.int32)
    drop = torch.randint(0, 16 * 128, (len(amax), 128 * 128), generator=generator, dtype=torch.int32)
    bits = (amax.unsqueeze(1) - drop).clamp(min=0)
    bits[torch.arange(len(amax)), torch.randint(0, 128 * 128, (len(amax),), generator=generator)] = amax
    sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int32) << 15
    weight = (bits | sign).to(torch.uint16).view(torch.bfloat16).view(-1, 128, 128)
    run(weight.to(cuda_device), ops, power_of_two=power_of_two)


def test_both_copies_hold_the_codes_of_the_reference(cuda_device: torch.device, ops: Any) -> None:
    from mega_moe._backends.plain.quantize import quantize_weight

    weight = normal(1, 256, 512, seed=4).to(cuda_device)
    codes, transposed = (torch.empty(1, *s, dtype=E4M3, device=cuda_device) for s in ((256, 512), (512, 256)))
    scales = torch.empty(1, 2, 4, device=cuda_device)
    ops.quantize_weights(weight, codes, transposed, scales, False)
    want, want_scales = quantize_weight(weight[0])
    assert torch.equal(codes[0].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[0], want_scales)
    want, want_scales = quantize_weight(weight[0].T)
    assert torch.equal(transposed[0].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[0].T, want_scales)


def test_runs_on_the_current_stream(cuda_device: torch.device, ops: Any) -> None:
    weight, late = (normal(1, 128, 256, seed=s).to(cuda_device) for s in (5, 6))
    codes = torch.empty(1, 128, 256, dtype=E4M3, device=cuda_device)
    scales = torch.empty(1, 1, 2, device=cuda_device)
    torch.cuda.synchronize(cuda_device)
    stream = torch.cuda.Stream(cuda_device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        weight.copy_(late)  # on any other stream the kernel would have read the weight before this
        ops.quantize_weights(weight, codes, None, scales, False)
    stream.synchronize()
    want, _ = definition(late, False)
    assert_same_codes(codes.view(torch.uint8).cpu(), want)


def test_graph_replay_reads_new_values(cuda_device: torch.device, ops: Any) -> None:
    weight = normal(2, 256, 128).to(cuda_device)
    codes, transposed = (torch.empty(2, *s, dtype=E4M3, device=cuda_device) for s in ((256, 128), (128, 256)))
    scales = torch.empty(2, 2, 1, device=cuda_device)
    ops.quantize_weights(weight, codes, transposed, scales, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.quantize_weights(weight, codes, transposed, scales, False)
    for seed in range(3):
        weight.copy_(normal(2, 256, 128, seed=10 + seed))
        graph.replay()
        torch.cuda.synchronize(cuda_device)
        want, want_scales = definition(weight, False)
        assert_same_codes(codes.view(torch.uint8).cpu(), want)
        assert_same_codes(transposed.view(torch.uint8).cpu(), want.transpose(1, 2))
        assert torch.equal(scales.cpu(), want_scales)


def test_arguments_on_two_devices_are_refused(cuda_device: torch.device, ops: Any) -> None:
    weight = normal(1, 128, 128).to(cuda_device)
    with pytest.raises(RuntimeError, match=r"quantize_weights: scales: device is cpu, must be cuda:\d"):
        ops.quantize_weights(weight, None, None, torch.empty(1, 1, 1), False)
