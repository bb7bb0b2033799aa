"""The same bits again: over launches, over what memory held before, over delays of its roles, alongside the forward."""

from __future__ import annotations

import pytest
import torch

from ._backward import assert_same_bits, random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import pool_of, shape_of
from ._precision import OF_BACKWARD, assert_gradients_right
from ._virtual import HUGE, NAN, NUMBER
from .test_forward_repeat import layers_of

pytestmark = pytest.mark.timeout(120, method="thread")

FEW, REPEATS, SEEDS = 700, 100, 30
CHUNKS = pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])


def made(
    device: torch.device, num_ranks: int, chunks: str, precision: str
) -> tuple[list[Layer], BackwardRanks]:
    layers = layers_of(device, num_ranks, FEW)
    pool = pool_of(chunks, shape_of(layers[0]))
    return layers, new_backward_ranks(device, layers[0], pool_rows=pool, precision=precision)


@OF_BACKWARD
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_smoke_what_memory_held_before(
    cuda_device: torch.device, num_ranks: int, chunks: str, precision: str
) -> None:
    layers, ranks = made(cuda_device, num_ranks, chunks, precision)
    for seed, layer in enumerate(layers):
        dy, want = random_dy(layer, seed), None
        for word in (NAN, HUGE, NUMBER):
            ranks.poison(word)
            got = ranks.backward(layer, dy)
            if want is None:
                assert_gradients_right(layer, dy, got, ranks.shape)
                want = got
            assert_same_bits(got, want, f"layer {seed}, memory of {word:#x}")
    ranks.check()


@OF_BACKWARD
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_repeats(cuda_device: torch.device, num_ranks: int, chunks: str, precision: str) -> None:
    layers, ranks = made(cuda_device, num_ranks, chunks, precision)
    dy = random_dy(layers[0])
    want = ranks.backward(layers[0], dy)
    for step in range(REPEATS):
        assert_same_bits(ranks.backward(layers[0], dy), want, f"repeat {step}")
    ranks.check()


@OF_BACKWARD
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_delays(cuda_device: torch.device, num_ranks: int, chunks: str, precision: str) -> None:
    """Pauses at random places of the communication, any number of SMs: orders that a quiet GPU never shows."""
    layers, ranks = made(cuda_device, num_ranks, chunks, precision)
    layers = layers[:2]
    dy = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
    want = [ranks.backward(layer, own) for layer, own in zip(layers, dy)]
    for seed in range(1, SEEDS + 1):
        if seed % 4 == 1:
            ranks.poison(NAN if seed % 8 == 1 else HUGE)
        ranks.use_sms(2 * (seed % 8) + 2)
        at = seed % len(layers)
        got = ranks.backward(layers[at], dy[at], delay_seed=seed)
        assert_same_bits(got, want[at], f"delays of seed {seed}")
    ranks.check()


@OF_BACKWARD
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_both_directions_on_one_buffer(
    cuda_device: torch.device, num_ranks: int, chunks: str, precision: str
) -> None:
    """In fp8 the forward stages x as e4m3 where the backward stages it in bf16."""
    layers, ranks = made(cuda_device, num_ranks, chunks, precision)
    dy = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
    y = [ranks.forward(layer) for layer in layers]
    gradients = [ranks.backward(layer, own) for layer, own in zip(layers, dy)]
    for step in range(3 * len(layers)):
        at = step % len(layers)
        assert_same_y(ranks.forward(layers[at]), y[at], f"forward {step}")
        other = (at + 1) % len(layers)
        assert_same_bits(ranks.backward(layers[other], dy[other]), gradients[other], f"backward {step}")
    ranks.check()
