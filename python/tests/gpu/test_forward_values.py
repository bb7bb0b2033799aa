"""The fused forward against fp64 fed the same inputs, for 1, 2, 4 and 8 ranks that share one GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.rows import pool_rows

from ._emulated import emulated
from ._forward import (
    LONG,
    SHORT,
    TOLERANCE,
    Layer,
    assert_right,
    exact,
    random_experts,
    random_layer,
    same_bits,
)
from ._forward_ranks import new_ranks, pool_of, shape_of, smallest_pool
from ._virtual import random_ids

# A kernel that hangs ends the run: no signal reaches Python inside a call that waits for the device.
pytestmark = pytest.mark.timeout(90, method="thread")

FEW = 700
LARGEST = 8192  # H
TOKENS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 4096)


class Case(NamedTuple):
    """Extents of a layer; the experts are those of each rank."""

    hidden: int
    intermediate: int
    local: int
    top_k: int


CASES = {
    "smoke": Case(512, 256, 4, 2),
    "one expert each": Case(256, 128, 1, 1),
    "three experts each": Case(768, 640, 3, 6),
    "16 slots": Case(512, 384, 8, 16),
    "H 7168": Case(7168, 256, 2, 4),
    "I 1408": Case(1024, 1408, 2, 3),
    "I 1536": Case(256, LONG, 3, 4),
    "48 experts each": Case(256, 128, 48, 8),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens(cuda_device: torch.device, name: str, num_ranks: int) -> None:
    """Different on each rank, in a buffer for the most; prefixes of one layer, so fp64 is asked once."""
    case = CASES[name]
    experts, most = case.local * num_ranks, max(TOKENS)
    ids = random_ids(
        "masked" if case.top_k > 4 else "random", [most] * num_ranks, case.top_k, experts, cuda_device
    )
    layer = random_layer(ids, random_experts(cuda_device, experts, case.hidden, case.intermediate))
    want = exact(layer)
    ranks = new_ranks(cuda_device, layer)
    for step in range(len(TOKENS)):
        tokens = [TOKENS[(step + 3 * rank) % len(TOKENS)] for rank in range(num_ranks)]
        part = layer.first(tokens)
        assert_right(part, ranks.forward(part), want.first(tokens))
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("extent", ["hidden", "intermediate"])
def test_every_extent(cuda_device: torch.device, extent: str, num_ranks: int) -> None:
    """Multiples of 256 for H and of 128 for I, with every number of columns of tiles and of bytes of a row."""
    sizes = range(256, LARGEST + 1, 256) if extent == "hidden" else range(128, LARGEST // 2 + 1, 128)
    for size in sizes:
        hidden, intermediate = (size, 128) if extent == "hidden" else (256, size)
        top_k = 1 + size // 128 % 7
        ids = random_ids("random", [70] * num_ranks, top_k, 8, cuda_device)
        layer = random_layer(ids, random_experts(cuda_device, 8, hidden, intermediate))
        ranks = new_ranks(cuda_device, layer)
        assert_right(layer, ranks.forward(layer))
        ranks.check()


def many_experts(device: torch.device, experts: int) -> Layer:
    return random_layer(
        random_ids("random", [300], 8, experts, device), random_experts(device, experts, 256, 128)
    )


@pytest.mark.parametrize("experts", [384, 512, 1024])
def test_many_experts_of_one_rank(cuda_device: torch.device, experts: int) -> None:
    layer = many_experts(cuda_device, experts)
    ranks = new_ranks(cuda_device, layer)
    assert_right(layer, ranks.forward(layer))
    ranks.check()


def test_what_the_routing_has_no_room_for_is_refused_with_the_reason(cuda_device: torch.device) -> None:
    """The most experts in many chunks of many tokens: the tables of the chunks do not fit alongside the experts'."""
    layer = many_experts(cuda_device, 2048)
    most = 1 << 18
    ranks = new_ranks(
        cuda_device, layer, max_tokens=most, pool_rows=smallest_pool(shape_of(layer, max_tokens=most))
    )
    with pytest.raises(
        RuntimeError, match=rf"2048 experts per rank and {most} tokens need \d+ bytes of shared memory"
    ):
        ranks.forward(layer)


# Of the routing: as in random_ids, and experts of odd number without a token, and ranks of odd number without tokens.
KINDS = (
    "random",
    "one expert",
    "one rank",
    "empty",
    "masked",
    "duplicates",
    "odd experts empty",
    "odd ranks empty",
)


def ids_of(
    kind: str, tokens: list[int], top_k: int, experts: int, device: torch.device
) -> list[torch.Tensor]:
    if kind == "odd experts empty":
        return [own - own % 2 for own in random_ids("random", tokens, top_k, experts, device)]
    if kind == "odd ranks empty":
        return random_ids(
            "random", [n * (rank % 2 == 0) for rank, n in enumerate(tokens)], top_k, experts, device
        )
    return random_ids(kind, tokens, top_k, experts, device)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
def test_any_routing(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    """Weights of both signs, a tenth of them 0; the weight of a masked slot is NaN and means nothing."""
    counts = [max(FEW - 90 * rank, 5) for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 16, 512, 256)
    ranks = None
    for seed, kind in enumerate(KINDS):
        layer = random_layer(ids_of(kind, counts, 4, 16, cuda_device), experts, weights="signed", seed=seed)
        for own, weights in zip(layer.ids, layer.weights):
            weights[own < 0] = torch.nan
        if ranks is None:
            pool = pool_of(chunks, shape_of(layer, max_tokens=FEW))
            ranks = new_ranks(cuda_device, layer, max_tokens=FEW, pool_rows=pool)
        y = ranks.forward(layer)
        assert_right(layer, y)
        if kind == "empty":
            assert all(torch.count_nonzero(own) == 0 for own in y)
    assert ranks is not None
    ranks.check()


class Model(NamedTuple):
    hidden: int
    intermediate: int
    experts: int = 128
    top_k: int = 8


MODELS = {"30B": Model(2048, 768), "235B": Model(4096, 1536)}


def layer_of_model(name: str, num_ranks: int, most: int, device: torch.device) -> tuple[Layer, int]:
    """``most`` tokens of each rank, and the rows of the pools that a buffer has for them."""
    model = MODELS[name]
    request = Request(model.experts, most, model.top_k, model.hidden, model.intermediate, num_ranks=num_ranks)
    experts = random_experts(device, model.experts, model.hidden, model.intermediate)
    ids = random_ids("random", [most] * num_ranks, model.top_k, model.experts, device)
    return random_layer(ids, experts), pool_rows(request)


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [
        pytest.param("30B", 1, 2048, id="smoke-30B-1"),
        pytest.param("30B", 1, 16384, id="30B-1"),
        pytest.param("30B", 2, 8192, id="30B-2"),
        pytest.param("30B", 8, 4096, id="30B-8"),
        pytest.param("235B", 1, 16384, id="235B-1"),
        pytest.param("235B", 8, 2048, id="235B-8"),
    ],
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents in the memory that a buffer takes for them; at the end an imbalance as bad as can be."""
    layer, rows = layer_of_model(name, num_ranks, most, cuda_device)
    want = exact(layer)
    ranks = new_ranks(cuda_device, layer, pool_rows=rows)
    for share in (1, 2, 16, most):
        tokens = [most // share - rank * (most // share // 16) for rank in range(num_ranks)]
        part = layer.first(tokens)
        assert_right(part, ranks.forward(part), want.first(tokens))
    top_k, experts = layer.ids[0].shape[1], layer.num_experts
    worst = random_layer(
        random_ids("one expert", [most] * num_ranks, top_k, experts, cuda_device), (layer.gate_up, layer.down)
    )
    assert_right(worst, ranks.forward(worst))
    ranks.check()


def single_entries(ids: list[torch.Tensor], experts: tuple[torch.Tensor, torch.Tensor]) -> Layer:
    """A layer whose products have one term each, so that no order of sums matters and rounding alone is left."""
    gate_up, down = experts
    layer = random_layer(ids, experts, weights="signed")
    xs = []
    for rank, x in enumerate(layer.x):
        column = (torch.arange(len(x), device=x.device) * 37 + rank) % x.shape[1]
        xs.append(torch.zeros_like(x).scatter_(1, column[:, None], x.gather(1, column[:, None])))
    # Row h of the down projection reads feature 5h + e of h.
    features = down.shape[2]
    rows = torch.arange(down.shape[1], device=down.device)
    feature = (5 * rows[None, :] + torch.arange(len(down), device=down.device)[:, None]) % features
    kept = torch.zeros_like(down).scatter_(2, feature[:, :, None], down.gather(2, feature[:, :, None]))
    return Layer(xs, layer.ids, layer.weights, gate_up * 30, kept)


@pytest.mark.parametrize("intermediate", [SHORT, LONG])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_smoke_rounding_points(cuda_device: torch.device, num_ranks: int, intermediate: int) -> None:
    """Each token, row and column where it belongs, and every value rounded where the definition says.

    Only the exponential is not exact: it may flip the rounding of h, in less than five of a thousand values.
    """
    ids = random_ids("random", [300 - 20 * rank for rank in range(num_ranks)], 4, 16, cuda_device)
    layer = single_entries(ids, random_experts(cuda_device, 16, 512, intermediate))
    want = emulated(layer)
    ranks = new_ranks(cuda_device, layer)
    for rank, (got, expected) in enumerate(zip(ranks.forward(layer), want)):
        differ = got.view(torch.int16) != expected.view(torch.int16)
        # +0 and -0 are one value here.
        differ &= (got != 0) | (expected != 0)
        assert int(differ.sum()) <= differ.numel() * 5e-3, (rank, int(differ.sum()), differ.numel())
        assert torch.allclose(got.float(), expected.float(), rtol=2**-5, atol=1e-4)
    ranks.check()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_do_not_change_the_result(cuda_device: torch.device, num_ranks: int) -> None:
    """The same tokens on one rank and on several: equal within what one more rounding costs, and bitwise where the
    experts of a token lie on one rank."""
    counts = [FEW // num_ranks + 7 * rank for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 32, 512, 256)
    layer = random_layer(random_ids("random", counts, 4, 32, cuda_device), experts)
    local = 32 // num_ranks
    for own in layer.ids:  # every third token stays on one rank
        own[::3] = own[::3, :1] // local * local + own[::3] % local
    one = layer.as_one_rank()
    got = torch.cat(new_ranks(cuda_device, layer).forward(layer))
    alone = new_ranks(cuda_device, one).forward(one)[0]
    assert_right(one, [got])
    assert_right(one, [alone])
    error = float((got.double() - alone.double()).norm() / alone.double().norm())
    assert error <= TOLERANCE / 2
    rank_of = one.ids[0] // local
    together = (rank_of == rank_of[:, :1]).all(1)
    assert int(together.sum()) >= len(got) // 3
    assert same_bits(got[together], alone[together])
