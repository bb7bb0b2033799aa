"""The same bits again: over launches of changing size, over what memory held before, and over delays of its roles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_moe import MegaMoEError
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.memory import symmetric_layout, workspace_layout
from mega_moe._backends.fused.rows import pool_rows

from ._forward import LONG, SHORT, Layer, assert_right, assert_same_bits, random_experts, random_layer
from ._forward_ranks import ForwardRanks, new_ranks, pool_of, shape_of
from ._virtual import HUGE, NAN, NUMBER, random_ids

pytestmark = pytest.mark.timeout(90, method="thread")

EXTENTS = pytest.mark.parametrize("intermediate", [SHORT, LONG])
MOST, STEPS = 1500, 1000  # tokens of each rank, launches
FEW, SEEDS = 700, 40

KINDS = ("random", "one expert", "masked", "duplicates", "one rank", "empty")


class Counted:
    """Compares on the device, without a wait: how many calls of each rank gave other bits than wanted."""

    def __init__(self, ranks: ForwardRanks, layer: Layer) -> None:
        self.ranks = ranks
        self.wrong = [torch.zeros((), dtype=torch.int64, device=own.device) for own in layer.x]
        # Loads what compares: between launches that wait for one another that could wait for them.
        self.compare(layer.x, layer.x)
        ranks.synchronize()

    def compare(self, got: list[Tensor], want: list[Tensor]) -> None:
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            with self.ranks.on(rank):
                self.wrong[rank] += (a.view(torch.int16) != b.view(torch.int16)).any()

    def numbers(self) -> list[int]:
        self.ranks.synchronize()
        return [int(own) for own in self.wrong]


def layers_of(
    device: torch.device, num_ranks: int, most: int, kinds: tuple[str, ...] = KINDS, intermediate: int = SHORT
) -> list[Layer]:
    experts = random_experts(device, 16, 512, intermediate)
    return [
        random_layer(
            random_ids(kind, [most] * num_ranks, 4, 16, device, seed), experts, weights="signed", seed=seed
        )
        for seed, kind in enumerate(kinds)
    ]


@EXTENTS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
def test_thousand_launches(cuda_device: torch.device, num_ranks: int, chunks: str, intermediate: int) -> None:
    """T and routing change with every launch and nothing waits in between; each result is that of a larger call."""
    layers = layers_of(cuda_device, num_ranks, MOST, intermediate=intermediate)
    pool = pool_of(chunks, shape_of(layers[0]))
    ranks = new_ranks(cuda_device, layers[0], pool_rows=pool)
    want = []
    for layer in layers:
        want.append(ranks.forward(layer))
        assert_right(layer, want[-1])
    made = torch.Generator().manual_seed(3)
    sizes = torch.randint(0, MOST + 1, (STEPS, num_ranks), generator=made).tolist()
    counted = Counted(ranks, layers[0])
    for step, tokens in enumerate(sizes):
        part = layers[step % len(layers)].first(tokens)
        expected = [own[:count] for own, count in zip(want[step % len(layers)], tokens)]
        counted.compare(ranks.start_all(part), expected)
    assert counted.numbers() == [0] * num_ranks
    ranks.check()


@pytest.mark.parametrize(
    ("num_ranks", "most", "hidden", "intermediate", "repeats"),
    [
        pytest.param(1, 1024, 2048, 768, 20, id="smoke-30B-1"),
        pytest.param(1, 16384, 2048, 768, 100, id="30B-1"),
        pytest.param(8, 2048, 2048, 768, 100, id="30B-8"),
        pytest.param(1, 16384, 4096, 1536, 100, id="235B-1"),
    ],
)
def test_repeats_of_models(
    cuda_device: torch.device,
    num_ranks: int,
    most: int,
    hidden: int,
    intermediate: int,
    repeats: int,
) -> None:
    rows = pool_rows(Request(128, most, 8, hidden, intermediate, num_ranks=num_ranks))
    ids = random_ids("random", [most] * num_ranks, 8, 128, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 128, hidden, intermediate))
    ranks = new_ranks(cuda_device, layer, pool_rows=rows)
    want = ranks.forward(layer)
    counted = Counted(ranks, layer)
    for _ in range(repeats):
        counted.compare(ranks.start_all(layer), want)
    assert counted.numbers() == [0] * num_ranks
    ranks.check()


@EXTENTS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
def test_smoke_what_memory_held_before(
    cuda_device: torch.device, num_ranks: int, chunks: str, intermediate: int
) -> None:
    """All of it but the state, before each call: NaN, 3e38, a number. And what y held."""
    layers = layers_of(cuda_device, num_ranks, FEW, intermediate=intermediate)
    pool = pool_of(chunks, shape_of(layers[0]))
    ranks = new_ranks(cuda_device, layers[0], pool_rows=pool)
    for layer, kind in zip(layers, KINDS):
        tokens = [FEW - 77 * rank for rank in range(num_ranks)]
        part = layer.first(tokens)
        want = None
        for word in (NAN, HUGE, NUMBER):
            ranks.poison(word)
            ranks.fill_results(part, word)
            got = ranks.forward(part)
            if want is None:
                assert_right(part, got)
                want = [own.clone() for own in got]
            assert_same_bits(got, want, f"{kind}, memory of {word:#x}")
            ranks.check()


@EXTENTS
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
def test_delays(cuda_device: torch.device, num_ranks: int, chunks: str, intermediate: int) -> None:
    """Pauses at random places of the communication, in memory that holds NaN: orders that a quiet GPU never shows."""
    layers = layers_of(cuda_device, num_ranks, FEW, ("random", "duplicates"), intermediate)
    pool = pool_of(chunks, shape_of(layers[0]))
    ranks = new_ranks(cuda_device, layers[0], pool_rows=pool)
    want = [ranks.forward(layer) for layer in layers]
    assert_right(layers[0], want[0])
    for seed in range(1, SEEDS + 1):
        if seed % 4 == 1:
            ranks.poison(NAN if seed % 8 == 1 else HUGE)
        ranks.use_sms(2 * (seed % 8) + 2)
        at = seed % len(layers)
        assert_same_bits(ranks.forward(layers[at], delay_seed=seed), want[at], f"delays of seed {seed}")
    ranks.check()


def test_smoke_canaries_find_a_planted_write(cuda_device: torch.device) -> None:
    """Behind each part of both memories."""
    (layer,) = layers_of(cuda_device, 2, 100, ("random",))
    ranks = new_ranks(cuda_device, layer)
    ranks.forward(layer)
    for kernels in ranks.kernels:
        layouts = symmetric_layout(ranks.shape), workspace_layout(ranks.shape)
        for memory, layout in zip(kernels.memory, layouts):
            for start, size in layout.parts.values():
                held = int(memory[start + size])
                memory[start + size] = 0
                with pytest.raises(MegaMoEError, match="wrote between the parts"):
                    kernels.check()
                memory[start + size] = held
    ranks.check()
