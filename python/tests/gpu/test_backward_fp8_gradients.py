"""The form of the fused backward in fp8 whose weight gradients are products of e4m3, in one chunk.

With several chunks an expert's rows share scales with others than in the emulation.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mega_moe._backends.facts import variants

from ._backward import assert_same_bits, random_dy
from ._backward_fp8 import Judge
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._virtual import random_ids
from .test_forward_fp8_values import MODELS

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(
        not any(v.op == "backward_gradients" for v in variants()), reason="this wheel holds no such kernel"
    ),
]


def ranks_of(layer: Layer) -> BackwardRanks:
    return new_backward_ranks(layer.device, layer, precision="fp8", dw_precision="fp8")


def random_layer_of(device: torch.device, num_ranks: int, seed: int = 0) -> Layer:
    ids = random_ids("random", [700 - 90 * rank for rank in range(num_ranks)], 4, 16, device, seed)
    return random_layer(ids, random_experts(device, 16, 512, 384), weights="signed", seed=seed)


def test_smoke_one_expert_one_tile(cuda_device: torch.device) -> None:
    """One block of rows, and each gradient alone first: descriptors, scales and the order of rows show here."""
    ids = random_ids("random", [128], 1, 1, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 1, 512, 256))
    ranks, dy = ranks_of(layer), random_dy(layer)
    judge = Judge(layer, dy, "fp8")
    for needs in ((True, True, False, False), (False, False, True, False), (False, False, False, True)):
        judge.assert_right(ranks.backward(layer, dy, needs=needs))
    judge.assert_right(ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 385])
def test_smoke_edges_of_one_expert(cuda_device: torch.device, tokens: int) -> None:
    ids = random_ids("one expert", [tokens], 1, 3, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 3, 512, 384))
    ranks, dy = ranks_of(layer), random_dy(layer)
    Judge(layer, dy, "fp8").assert_right(ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("hidden", [512, 768, 1280])
def test_tiles_that_transpose(cuda_device: torch.device, hidden: int) -> None:
    """Of 256 columns where 512 do not divide them; half a tile of w_down."""
    ids = random_ids("random", [300], 3, 4, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 4, hidden, 128))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8_bwd", dw_precision="fp8")
    dy = random_dy(layer)
    Judge(layer, dy, "fp8").assert_right(ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_same_bits_again_and_for_each_need(cuda_device: torch.device, num_ranks: int) -> None:
    layer = random_layer_of(cuda_device, num_ranks)
    ranks, dy = ranks_of(layer), random_dy(layer)
    whole = ranks.backward(layer, dy)
    Judge(layer, dy, "fp8").assert_right(whole)
    for seed in range(1, 6):
        assert_same_bits(ranks.backward(layer, dy, delay_seed=seed), whole, f"seed {seed}")
    for needs in itertools.product((False, True), repeat=4):
        got = ranks.backward(layer, dy, needs=needs)
        want = [type(own)(*(value if needed else None for value, needed in zip(own, needs))) for own in whole]
        assert_same_bits(got, want, f"needs {needs}")
    ranks.check()


@pytest.mark.parametrize("name", ["30B", "235B"])
def test_models(cuda_device: torch.device, name: str) -> None:
    model = MODELS[name]
    ids = random_ids("random", [2048], model.top_k, 16, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 16, model.hidden, model.intermediate))
    ranks, dy = ranks_of(layer), random_dy(layer)
    Judge(layer, dy, "fp8").assert_right(ranks.backward(layer, dy))
    ranks.check()
