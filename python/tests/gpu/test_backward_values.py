"""The fused backward against fp64 fed the same inputs, for 1, 2, 4 and 8 ranks that share one GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from ._backward import assert_right, assert_same_bits, exact_gradients, random_dy
from ._backward_ranks import new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward_ranks import pool_of, shape_of
from ._virtual import random_ids
from .test_forward_values import CASES, FEW, KINDS, TOKENS, ids_of, layer_of_model

pytestmark = pytest.mark.timeout(120, method="thread")


def small_layer(device: torch.device, num_ranks: int, seed: int = 0, clamp: float | None = None) -> Layer:
    ids = random_ids("random", [FEW - 90 * rank for rank in range(num_ranks)], 4, 16, device, seed)
    return random_layer(ids, random_experts(device, 16, 512, 384), weights="signed", seed=seed, clamp=clamp)


def test_smoke_one_expert_one_tile(cuda_device: torch.device) -> None:
    """The least that there is to do: if this is wrong, begin here."""
    ids = random_ids("random", [64], 1, 1, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 1, 256, 128))
    ranks = new_backward_ranks(cuda_device, layer)
    dy = random_dy(layer)
    assert_right(layer, dy, ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 385])
def test_smoke_edges_of_one_expert(cuda_device: torch.device, tokens: int) -> None:
    """Rows of one expert around the borders of blocks, tiles and pairs of tiles."""
    ids = random_ids("one expert", [tokens], 1, 3, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 3, 512, 384))
    ranks = new_backward_ranks(cuda_device, layer)
    dy = random_dy(layer)
    assert_right(layer, dy, ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens(cuda_device: torch.device, name: str, num_ranks: int) -> None:
    case = CASES[name]
    experts, most = case.local * num_ranks, 1024
    ids = random_ids(
        "masked" if case.top_k > 4 else "random", [most] * num_ranks, case.top_k, experts, cuda_device
    )
    layer = random_layer(ids, random_experts(cuda_device, experts, case.hidden, case.intermediate))
    ranks = new_backward_ranks(cuda_device, layer)
    few = [n for n in TOKENS if n <= most] + [most]
    for step in range(0, len(few), 2):
        part = layer.first([few[(step + 3 * rank) % len(few)] for rank in range(num_ranks)])
        dy = random_dy(part, step)
        assert_right(part, dy, ranks.backward(part, dy))
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_routing(cuda_device: torch.device, num_ranks: int, chunks: str, dtype: torch.dtype) -> None:
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
            ranks = new_backward_ranks(cuda_device, layer, max_tokens=FEW, pool_rows=pool)
        dy = random_dy(layer, seed)
        assert_right(layer, dy, ranks.backward(layer, dy, dw_dtype=dtype))
    assert ranks is not None
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("clamp", [0.5, 10.0])
def test_clamp(cuda_device: torch.device, num_ranks: int, clamp: float) -> None:
    layer = small_layer(cuda_device, num_ranks, clamp=clamp)
    ranks = new_backward_ranks(cuda_device, layer)
    dy = random_dy(layer)
    assert_right(layer, dy, ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
def test_only_what_is_needed(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    """Each subset gives the bits that all of them give."""
    layer = small_layer(cuda_device, num_ranks)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool)
    dy = random_dy(layer)
    whole = ranks.backward(layer, dy)
    assert_right(layer, dy, whole)
    for needs in itertools.product((False, True), repeat=4):
        got = ranks.backward(layer, dy, needs=needs)
        want = [type(own)(*(value if needed else None for value, needed in zip(own, needs))) for own in whole]
        assert_same_bits(got, want, f"needs {needs}")
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate(cuda_device: torch.device, num_ranks: int, chunks: str, dtype: torch.dtype) -> None:
    """Twice into one buffer is twice the gradient, and experts without rows keep what is there."""
    layer = small_layer(cuda_device, num_ranks)
    for own in layer.ids:
        own[own == 3] = 5
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool)
    dy = random_dy(layer)
    want = exact_gradients(layer, dy)
    into = [
        tuple(torch.zeros_like(weight, dtype=dtype) for weight in layer.experts(rank))
        for rank in range(num_ranks)
    ]
    into[0][0][3] = 7
    torch.cuda.synchronize(cuda_device)
    for times in (1, 2):
        ranks.backward(layer, dy, into=into, dw_dtype=dtype)
        share = 16 // num_ranks
        for rank, (gate_up, down) in enumerate(into):
            for e in range(share):
                expert = rank * share + e
                if expert == 3:
                    assert bool((gate_up[e] == 7).all())
                    assert torch.count_nonzero(down[e]) == 0
                    continue
                for got, exact in ((gate_up[e], want.dw_gate_up[expert]), (down[e], want.dw_down[expert])):
                    error = float((got.double() - times * exact).norm() / exact.norm() / times)
                    assert error < 1.2e-2, f"expert {expert}, {times} times: {error:.2e}"
    ranks.check()


def test_parts_of_one_expert(cuda_device: torch.device) -> None:
    """More rows than a part holds, in both dtypes: sums that go on over parts."""
    ids = random_ids("one expert", [40000], 1, 2, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 2, 512, 256))
    ranks = new_backward_ranks(cuda_device, layer)
    dy = random_dy(layer)
    want = exact_gradients(layer, dy)
    for dtype in (torch.bfloat16, torch.float32):
        assert_right(layer, dy, ranks.backward(layer, dy, dw_dtype=dtype), want)
    ranks.check()


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [
        pytest.param("30B", 1, 2048, id="smoke-30B-1"),
        pytest.param("30B", 1, 16384, id="30B-1"),
        pytest.param("30B", 8, 4096, id="30B-8"),
        pytest.param("235B", 1, 4096, id="235B-1", marks=pytest.mark.big_memory),
    ],
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents in the memory that a buffer takes for them."""
    layer, rows = layer_of_model(name, num_ranks, most, cuda_device)
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=rows)
    dy = random_dy(layer)
    assert_right(layer, dy, ranks.backward(layer, dy))
    ranks.check()
