"""The fused forward in fp8 against fp64 and the emulation, for 1, 2, 4 and 8 ranks that share one GPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.rows import pool_rows
from mega_moe._base.mode import Mode

from ._emulated import emulated
from ._forward import Layer, random_experts, random_layer, same_bits
from ._forward_fp8 import TOLERANCE, Judge, why_no_kernel
from ._forward_ranks import ForwardRanks, new_ranks, pool_of, shape_of
from ._virtual import random_ids

pytestmark = [
    # A kernel that hangs ends the run: no signal reaches Python inside a call that waits for the device.
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(why_no_kernel() is not None, reason=str(why_no_kernel())),
]

TOKENS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 2048)


class Case(NamedTuple):
    """Extents of a layer; the experts are those of each rank."""

    hidden: int
    intermediate: int
    local: int
    top_k: int


CASES = {
    "smoke": Case(512, 256, 4, 2),
    "one expert each": Case(512, 128, 1, 1),
    "three experts each": Case(1536, 640, 3, 6),
    "16 slots": Case(512, 384, 8, 16),
    "H 7168": Case(7168, 256, 2, 4),
    "I 1408": Case(1024, 1408, 2, 3),
    "48 experts each": Case(512, 128, 48, 8),
}


def ranks_of(device: torch.device, layer: Layer, **settings: Any) -> ForwardRanks:
    return new_ranks(device, layer, precision="fp8", **settings)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens(cuda_device: torch.device, name: str, num_ranks: int) -> None:
    """Different on each rank, in a buffer for the most; prefixes of one layer, so the judge is asked once."""
    case = CASES[name]
    experts, most = case.local * num_ranks, max(TOKENS)
    kind = "masked" if case.top_k > 4 else "random"
    ids = random_ids(kind, [most] * num_ranks, case.top_k, experts, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, experts, case.hidden, case.intermediate))
    judge, ranks = Judge(layer), ranks_of(cuda_device, layer)
    for step in range(len(TOKENS)):
        tokens = [TOKENS[(step + 3 * rank) % len(TOKENS)] for rank in range(num_ranks)]
        judge.assert_right(ranks.forward(layer.first(tokens)), tokens)
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("extent", ["hidden", "intermediate"])
def test_every_extent(cuda_device: torch.device, extent: str, num_ranks: int) -> None:
    sizes = range(512, 8193, 512) if extent == "hidden" else range(128, 4097, 128)
    for size in sizes:
        hidden, intermediate = (size, 128) if extent == "hidden" else (512, size)
        ids = random_ids("random", [70] * num_ranks, 1 + size // 128 % 7, 8, cuda_device)
        layer = random_layer(ids, random_experts(cuda_device, 8, hidden, intermediate))
        ranks = ranks_of(cuda_device, layer)
        Judge(layer).assert_right(ranks.forward(layer))
        ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_any_routing(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    """Weights of both signs, a tenth of them 0: h carries them into its own scale."""
    counts = [max(700 - 90 * rank, 5) for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 16, 512, 256)
    ranks = None
    for seed, kind in enumerate(("random", "one expert", "one rank", "empty", "masked", "duplicates")):
        ids = random_ids(kind, counts, 4, 16, cuda_device)
        layer = random_layer(ids, experts, weights="signed", seed=seed)
        for own, weights in zip(layer.ids, layer.weights):
            weights[own < 0] = torch.nan
        if ranks is None:
            shape = shape_of(layer, max_tokens=700, mode=Mode("fp8"))
            pool = pool_of(chunks, shape)
            ranks = ranks_of(cuda_device, layer, max_tokens=700, pool_rows=pool)
        y = ranks.forward(layer)
        Judge(layer).assert_right(y)
        if kind == "empty":
            assert all(torch.count_nonzero(own) == 0 for own in y)
    assert ranks is not None
    ranks.check()


@pytest.mark.parametrize("clamp", [0.5, 7.0, math.inf])
def test_clamp(cuda_device: torch.device, clamp: float) -> None:
    ids = random_ids("random", [500, 300], 4, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 256), clamp=clamp)
    ranks = ranks_of(cuda_device, layer)
    Judge(layer).assert_right(ranks.forward(layer))
    ranks.check()


class Model(NamedTuple):
    hidden: int
    intermediate: int
    experts: int = 128
    top_k: int = 8


MODELS = {"30B": Model(2048, 768), "235B": Model(4096, 1536)}


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [
        pytest.param("30B", 1, 2048, id="smoke-30B-1"),
        pytest.param("30B", 1, 16384, id="30B-1"),
        pytest.param("30B", 8, 2048, id="30B-8"),
        pytest.param("235B", 1, 8192, id="235B-1"),
        pytest.param("235B", 8, 1024, id="235B-8"),
    ],
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents in the memory that a buffer takes for them."""
    model = MODELS[name]
    request = Request(
        model.experts, most, model.top_k, model.hidden, model.intermediate, "fp8", num_ranks=num_ranks
    )
    experts = random_experts(cuda_device, model.experts, model.hidden, model.intermediate)
    ids = random_ids("random", [most] * num_ranks, model.top_k, model.experts, cuda_device)
    layer = random_layer(ids, experts)
    judge, ranks = Judge(layer), ranks_of(cuda_device, layer, pool_rows=pool_rows(request))
    for share in (1, 2, 16, most):
        tokens = [most // share - rank * (most // share // 16) for rank in range(num_ranks)]
        judge.assert_right(ranks.forward(layer.first(tokens)), tokens)
    ranks.check()


# --- scales ----------------------------------------------------------------------------------------------

TINY = 2.0**-133  # the smallest number of bf16


def special_tokens() -> dict[str, Tensor]:
    """Rows of 512 elements whose first block of 128, or all of it, is at an edge of the formats."""
    plain = torch.randn(512, generator=torch.Generator().manual_seed(3))

    def first_block(values: Tensor | float) -> Tensor:
        row = plain.clone()
        row[:128] = values
        return row

    return {
        "a block of zeros": first_block(0.0),
        "zeros": torch.zeros(512),
        "a block of denormals": first_block(TINY),
        "denormals": torch.full((512,), TINY),
        "a denormal scale": first_block(plain[:128] * 1e-38),
        "one element": torch.zeros(512).index_fill(0, torch.tensor(300), 2.0),
        "3e38": first_block(plain[:128].clamp(-1, 1) * 3e38),
        "Inf": first_block(torch.cat((plain[:100], torch.tensor([math.inf]), plain[101:128]))),
        "-Inf": first_block(torch.cat((torch.tensor([-math.inf]), plain[1:128]))),
        "NaN": first_block(torch.cat((plain[:127], torch.tensor([math.nan])))),
        "all NaN": torch.full((512,), math.nan),
    }


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_special_tokens_reach_nobody_else(
    cuda_device: torch.device, num_ranks: int, power_of_two: bool
) -> None:
    """Bit for bit: the other tokens are what they are without it. The token itself is as the emulation says."""
    ids = random_ids("random", [200] * num_ranks, 4, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 256))
    ranks = ranks_of(cuda_device, layer, power_of_two=power_of_two)
    plain = ranks.forward(layer)
    for name, row in special_tokens().items():
        kept = layer.x[0][77].clone()
        layer.x[0][77] = row.bfloat16().to(cuda_device)
        got, like = ranks.forward(layer), emulated(layer, "fp8", power_of_two)
        layer.x[0][77] = kept
        for rank, (a, b) in enumerate(zip(got, plain, strict=True)):
            others = torch.arange(len(a), device=cuda_device) != 77 if rank == 0 else slice(None)
            assert same_bits(a[others], b[others]), f"{name}: rank {rank}"
        mine, wanted = got[0][77], like[0][77]
        assert bool(mine.isfinite().all()) == bool(wanted.isfinite().all()), name
        if bool(wanted.isfinite().all()):
            error = float((mine.double() - wanted.double()).norm())
            assert error <= 5e-2 * float(wanted.double().norm()), (name, error)
    ranks.check()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["gate_up", "down"])
def test_a_bad_weight_reaches_the_tokens_of_its_expert_alone(
    cuda_device: torch.device, which: str, value: float
) -> None:
    ids = random_ids("random", [300], 2, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 256))
    plain = ranks_of(cuda_device, layer).forward(layer)[0]
    getattr(layer, which)[5, 200, 100] = value
    got = ranks_of(cuda_device, layer).forward(layer)[0]
    touched = (layer.ids[0] == 5).any(1)
    assert 0 < int(touched.sum()) < len(got)
    assert same_bits(got[~touched], plain[~touched])
    assert not bool(got[touched].isfinite().all(1).any())


def test_experts_of_zeros_and_of_tiny_and_huge_weights(cuda_device: torch.device) -> None:
    ids = random_ids("random", [400], 1, 4, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 4, 512, 256))
    layer.gate_up[0].zero_()
    layer.down[1].mul_(2.0**-120)
    layer.gate_up[2].mul_(2.0**-60)
    layer.down[2].mul_(2.0**60)
    ranks = ranks_of(cuda_device, layer)
    y, like = ranks.forward(layer)[0].double(), emulated(layer, "fp8")[0].double()
    for expert in range(4):
        rows = layer.ids[0][:, 0] == expert
        error = float((y[rows] - like[rows]).norm())
        assert error <= TOLERANCE * float(like[rows].norm()), expert
    ranks.check()


# --- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_bits_do_not_depend_on_time_sms_or_chunks(
    cuda_device: torch.device, num_ranks: int, chunks: str
) -> None:
    ids = random_ids("masked", [700 - 50 * rank for rank in range(num_ranks)], 4, 16, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 16, 512, 384), weights="signed")
    want = ranks_of(cuda_device, layer).forward(layer)
    shape = shape_of(layer, mode=Mode("fp8"))
    ranks = ranks_of(cuda_device, layer, pool_rows=pool_of(chunks, shape))
    for num_sms, seed in ((0, 0), (0, 1), (2, 0), (6, 2), (14, 3)):
        if num_sms:
            ranks.use_sms(num_sms)
        got = ranks.forward(layer, delay_seed=seed)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), (num_sms, seed)
    ranks.check()


def test_a_token_does_not_depend_on_the_others(cuda_device: torch.device) -> None:
    ids = random_ids("random", [1000], 4, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 1024, 256))
    ranks = ranks_of(cuda_device, layer)
    whole = ranks.forward(layer)[0]
    some = torch.arange(3, 1000, 7, device=cuda_device)
    assert same_bits(ranks.forward(layer.rows([some]))[0], whole[some])
    ranks.check()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_do_not_change_the_result(cuda_device: torch.device, num_ranks: int) -> None:
    """Equal within what one more rounding costs, and bitwise where the experts of a token lie on one rank."""
    experts = random_experts(cuda_device, 32, 512, 256)
    counts = [700 // num_ranks + 7 * rank for rank in range(num_ranks)]
    layer = random_layer(random_ids("random", counts, 4, 32, cuda_device), experts)
    local = 32 // num_ranks
    for own in layer.ids:  # every third token stays on one rank
        own[::3] = own[::3, :1] // local * local + own[::3] % local
    one = layer.as_one_rank()
    y = ranks_of(cuda_device, layer).forward(layer)
    Judge(layer).assert_right(y)
    got, alone = torch.cat(y), ranks_of(cuda_device, one).forward(one)[0]
    assert float((got.double() - alone.double()).norm() / alone.double().norm()) <= 4e-3
    rank_of = one.ids[0] // local
    together = (rank_of == rank_of[:, :1]).all(1)
    assert int(together.sum()) >= len(got) // 3
    assert same_bits(got[together], alone[together])


def test_graph_replays_are_the_call(cuda_device: torch.device) -> None:
    ids = random_ids("random", [300], 4, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 256))
    ranks = ranks_of(cuda_device, layer)
    ranks.forward(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = ranks.start(0, layer)
    for seed in range(3):
        other = random_layer(ids, (layer.gate_up, layer.down), seed=20 + seed)
        layer.x[0].copy_(other.x[0])
        graph.replay()
        torch.cuda.synchronize(cuda_device)
        replayed = y.clone()
        assert same_bits(replayed, ranks.forward(layer)[0])
    ranks.check()
