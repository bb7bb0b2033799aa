"""What the bits of a token's y must not depend on: the other tokens, their order, the chunks, the number of SMs."""

from __future__ import annotations

import pytest
import torch

from ._forward import LONG, SHORT, Layer, assert_right, assert_same_bits, random_experts, random_layer
from ._forward_ranks import new_ranks, shape_of, smallest_pool
from ._virtual import random_ids

pytestmark = pytest.mark.timeout(60, method="thread")

EXTENTS = pytest.mark.parametrize("intermediate", [SHORT, LONG])
FEW, MANY, BLOCKS = 512, 1400, 40  # tokens of the first rank, and blocks of 128


def layer_of(
    device: torch.device,
    num_ranks: int,
    tokens: int,
    kind: str = "random",
    experts: int = 16,
    intermediate: int = SHORT,
) -> Layer:
    counts = [max(tokens - 40 * rank, 3) for rank in range(num_ranks)]
    return random_layer(
        random_ids(kind, counts, 4, experts, device),
        random_experts(device, experts, 512, intermediate),
        weights="signed",
    )


@EXTENTS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_smoke_other_tokens(cuda_device: torch.device, num_ranks: int, intermediate: int) -> None:
    """Alone, among the first, among those after it, and in another order."""
    layer = layer_of(cuda_device, num_ranks, FEW, intermediate=intermediate)
    sizes = [len(own) for own in layer.x]
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    assert_right(layer, want)
    made = torch.Generator().manual_seed(5)
    orders = [torch.randperm(size, generator=made).to(cuda_device) for size in sizes]
    for what, which in {
        "alone": [torch.tensor([size // 2], device=cuda_device) for size in sizes],
        "the first": [torch.arange(min(size, 65), device=cuda_device) for size in sizes],
        "the last": [torch.arange(size // 3, size, device=cuda_device) for size in sizes],
        "one rank alone": [
            torch.arange(size if rank == num_ranks - 1 else 0, device=cuda_device)
            for rank, size in enumerate(sizes)
        ],
        "in another order": orders,
    }.items():
        got = ranks.forward(layer.rows(which))
        assert_same_bits(got, [own[rows] for own, rows in zip(want, which)], what)
    ranks.check()


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_rank_it_comes_from(cuda_device: torch.device, num_ranks: int) -> None:
    """The same tokens handed in by the next rank: the sums are those of the experts' ranks, in their order."""
    layer = layer_of(cuda_device, num_ranks, FEW)
    ranks = new_ranks(cuda_device, layer, max_tokens=FEW)
    want = ranks.forward(layer)
    x, ids, weights = ([*part[1:], part[0]] for part in (layer.x, layer.ids, layer.weights))
    turned = Layer(x, ids, weights, layer.gate_up, layer.down)
    assert_same_bits(ranks.forward(turned), [*want[1:], want[0]], "from the rank before")
    ranks.check()


@EXTENTS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("kind", ["random", "one expert", "one rank"])
def test_chunks(cuda_device: torch.device, num_ranks: int, kind: str, intermediate: int) -> None:
    """The smallest pools that hold a block of all ranks, half again as much, and one chunk for all."""
    layer = layer_of(cuda_device, num_ranks, MANY, kind, intermediate=intermediate)
    least = smallest_pool(shape_of(layer))
    want = None
    for pool in (0, least, least + least // 256 * 128, 2 * least + 128):
        ranks = new_ranks(cuda_device, layer, pool_rows=pool)
        got = ranks.forward(layer)
        ranks.check()
        if want is None:
            assert_right(layer, got)
            want = got
        assert_same_bits(got, want, f"pools of {pool} rows")
        # A call later the pools hold what this one left there.
        assert_same_bits(ranks.forward(layer), want, f"pools of {pool} rows, again")
        ranks.check()


def test_a_chunk_for_each_block(cuda_device: torch.device) -> None:
    """Many chunks through two pools, some of them without a row on a rank."""
    layer = layer_of(cuda_device, 2, 128 * BLOCKS, experts=2)
    block = torch.arange(len(layer.x[0]), device=cuda_device) // 128
    layer.ids[0][block % 3 == 0] = 0  # this block is for rank 0 alone,
    layer.ids[0][block % 7 == 1] = -1  # and this one for nobody
    layer.ids[1][:] = -1
    ranks = new_ranks(cuda_device, layer, pool_rows=smallest_pool(shape_of(layer)))
    got = ranks.forward(layer)
    assert_right(layer, got)
    one = new_ranks(cuda_device, layer)
    assert_same_bits(one.forward(layer), got, "one chunk")
    ranks.check()


@EXTENTS
@pytest.mark.parametrize(
    ("num_ranks", "numbers"), [(1, (132, 131, 130, 78, 64, 33, 8, 2)), (2, (66, 31, 4, 2)), (8, (16, 3, 2))]
)
@pytest.mark.parametrize("kind", ["random", "one rank"])
def test_number_of_sms(
    cuda_device: torch.device, num_ranks: int, numbers: tuple[int, ...], kind: str, intermediate: int
) -> None:
    layer = layer_of(cuda_device, num_ranks, FEW, kind, intermediate=intermediate)
    ranks = new_ranks(cuda_device, layer, pool_rows=smallest_pool(shape_of(layer)))
    want = None
    for number in numbers:
        ranks.use_sms(number)
        got = ranks.forward(layer)
        if want is None:
            assert_right(layer, got)
            want = got
        assert_same_bits(got, want, f"{number} SMs")
    ranks.check()


def test_ranks_with_different_numbers_of_sms(cuda_device: torch.device) -> None:
    layer = layer_of(cuda_device, 4, 500)
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    for kernels, number in zip(ranks.kernels, (2, 40, 7, 16)):
        kernels.num_sms = number
    assert_same_bits(ranks.forward(layer), want, "2, 40, 7 and 16 SMs")
    ranks.check()
