"""The fused backward in fp8 against fp64 and the emulation, for 1, 2, 4 and 8 ranks that share one GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.rows import pool_rows

from ._backward import assert_same_bits, random_dy
from ._backward_fp8 import Judge, why_no_kernel, with_exact_gate_and_up
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import pool_of, shape_of
from ._virtual import random_ids
from .test_forward_fp8_values import CASES, MODELS
from .test_forward_values import KINDS, ids_of

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(why_no_kernel() is not None, reason=str(why_no_kernel())),
]

FEW = 700
BOTH = pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])


def small_layer(device: torch.device, num_ranks: int, seed: int = 0, clamp: float | None = None) -> Layer:
    ids = random_ids("random", [FEW - 90 * rank for rank in range(num_ranks)], 4, 16, device, seed)
    return random_layer(ids, random_experts(device, 16, 512, 384), weights="signed", seed=seed, clamp=clamp)


def assert_right(ranks: BackwardRanks, layer: Layer, seed: int = 0) -> None:
    dy = random_dy(layer, seed)
    Judge(layer, dy).assert_right(ranks.backward(layer, dy))


@BOTH
def test_smoke_one_expert_one_tile(cuda_device: torch.device, precision: str) -> None:
    """The least that there is to do: if this is wrong, begin here."""
    ids = random_ids("random", [64], 1, 1, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 1, 512, 128))
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    dy = random_dy(layer)
    judge = Judge(layer, dy)
    for needs in ((False, True, False, False), (True, False, False, False), (False, False, True, True)):
        judge.assert_right(ranks.backward(layer, dy, needs=needs))
    judge.assert_right(ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 385])
def test_smoke_edges_of_one_expert(cuda_device: torch.device, tokens: int) -> None:
    """Rows of one expert around the borders of blocks, tiles and pairs of tiles."""
    ids = random_ids("one expert", [tokens], 1, 3, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 3, 512, 384))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8")
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("hidden", [256, 768, 1280])
def test_rows_that_are_no_whole_pieces(cuda_device: torch.device, hidden: int) -> None:
    """The forward in fp8 takes multiples of 512, that in bf16 others too."""
    ids = random_ids("random", [200, 150], 3, 4, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 4, hidden, 128))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8_bwd")
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens(cuda_device: torch.device, name: str, num_ranks: int) -> None:
    case = CASES[name]
    experts, most = case.local * num_ranks, 1024
    kind = "masked" if case.top_k > 4 else "random"
    ids = random_ids(kind, [most] * num_ranks, case.top_k, experts, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, experts, case.hidden, case.intermediate))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8")
    few = (0, 1, 63, 65, 128, 129, most)
    for step in range(0, len(few), 2):
        part = layer.first([few[(step + 3 * rank) % len(few)] for rank in range(num_ranks)])
        assert_right(ranks, part, step)
    ranks.check()


@BOTH
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_any_routing(cuda_device: torch.device, num_ranks: int, chunks: str, precision: str) -> None:
    """Weights of both signs, a tenth of them 0; the weight of a masked slot is NaN and means nothing."""
    counts = [max(FEW - 90 * rank, 5) for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 16, 512, 384)
    ranks = None
    for seed, kind in enumerate(KINDS):
        layer = random_layer(ids_of(kind, counts, 4, 16, cuda_device), experts, weights="signed", seed=seed)
        for own, weights in zip(layer.ids, layer.weights):
            weights[own < 0] = torch.nan
        if ranks is None:
            pool = pool_of(chunks, shape_of(layer, max_tokens=FEW))
            ranks = new_backward_ranks(
                cuda_device, layer, max_tokens=FEW, pool_rows=pool, precision=precision
            )
        assert_right(ranks, layer, seed)
    assert ranks is not None
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("clamp", [0.5, 2.0])
def test_clamp(cuda_device: torch.device, num_ranks: int, clamp: float) -> None:
    layer = with_exact_gate_and_up(small_layer(cuda_device, num_ranks, clamp=clamp))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8")
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_only_what_is_needed(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    """Each subset gives the bits that all of them give."""
    layer = small_layer(cuda_device, num_ranks)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool, precision="fp8")
    dy = random_dy(layer)
    whole = ranks.backward(layer, dy)
    Judge(layer, dy).assert_right(whole)
    for needs in itertools.product((False, True), repeat=4):
        got = ranks.backward(layer, dy, needs=needs)
        want = [type(own)(*(value if needed else None for value, needed in zip(own, needs))) for own in whole]
        assert_same_bits(got, want, f"needs {needs}")
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate(cuda_device: torch.device, num_ranks: int, dtype: torch.dtype) -> None:
    """Into zeros gives the gradient itself; twice into fp32 gives it twice, to the last bit."""
    layer = small_layer(cuda_device, num_ranks)
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8")
    dy = random_dy(layer)
    want = ranks.backward(layer, dy, dw_dtype=dtype)
    into = [
        tuple(torch.zeros_like(weight, dtype=dtype) for weight in layer.experts(rank))
        for rank in range(num_ranks)
    ]
    torch.cuda.synchronize(cuda_device)
    for times in (1, 2) if dtype is torch.float32 else (1,):
        ranks.backward(layer, dy, into=into)
        for own, (gate_up, down) in zip(want, into, strict=True):
            assert own.dw_gate_up is not None
            assert own.dw_down is not None
            assert torch.equal(gate_up, own.dw_gate_up * times)
            assert torch.equal(down, own.dw_down * times)
    ranks.check()


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [
        pytest.param("30B", 1, 1024, id="smoke-30B-1"),
        pytest.param("30B", 1, 8192, id="30B-1"),
        pytest.param("30B", 8, 1024, id="30B-8"),
        pytest.param("235B", 1, 2048, id="235B-1"),
    ],
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents, a few experts, in the memory that a buffer takes for them."""
    model, experts = MODELS[name], 16
    request = Request(
        experts, most, model.top_k, model.hidden, model.intermediate, "fp8", num_ranks=num_ranks
    )
    ids = random_ids("random", [most] * num_ranks, model.top_k, experts, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, experts, model.hidden, model.intermediate))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool_rows(request), precision="fp8")
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_extreme_size_reach_their_own_tokens_alone(
    cuda_device: torch.device, power_of_two: bool
) -> None:
    """Of dx and dtopk; a weight's gradient sums over tokens, so NaN in dy reaches that of its experts."""
    ids = random_ids("random", [200], 2, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 256))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8", power_of_two=power_of_two)
    dy = random_dy(layer)
    plain = ranks.backward(layer, dy, needs=(True, True, False, False))[0]
    others = torch.arange(200, device=cuda_device) != 77
    for value in (0.0, 2.0**-133, 1e-38, 3e38, torch.inf, torch.nan):
        kept = dy[0][77].clone()
        dy[0][77] = value
        got = ranks.backward(layer, dy, needs=(True, True, False, False))[0]
        dy[0][77] = kept
        assert got.dx is not None
        assert got.dtopk is not None
        assert plain.dx is not None
        assert_same_y([got.dx[others]], [plain.dx[others]], f"dx alongside {value}")
        if value != 3e38:  # whose sums may overflow
            assert bool(got.dx[77].isfinite().all()) == (value < 1), value
        if value == 0.0:
            assert torch.count_nonzero(got.dx[77]) == 0
            assert torch.count_nonzero(got.dtopk[77]) == 0
    ranks.check()
