"""What callers may hand to the fused forward: dtypes, alignments, masks, weights, clamps, values without a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ._forward import (
    LONG,
    SHORT,
    Layer,
    assert_right,
    assert_same_bits,
    random_experts,
    random_layer,
    same_bits,
)
from ._forward_ranks import new_ranks
from ._virtual import random_ids

pytestmark = pytest.mark.timeout(60, method="thread")

RANKS = pytest.mark.parametrize("num_ranks", [1, 4])


def layer_of(
    device: torch.device,
    num_ranks: int,
    *,
    weights: str = "signed",
    kind: str = "random",
    intermediate: int = SHORT,
) -> Layer:
    """Three slots: the rows of ids and weights then start at odd multiples of their size."""
    tokens = [200 - 30 * rank for rank in range(num_ranks)]
    return random_layer(
        random_ids(kind, tokens, 3, 8, device), random_experts(device, 8, 512, intermediate), weights=weights
    )


@RANKS
def test_smoke_dtypes_of_ids_and_weights(cuda_device: torch.device, num_ranks: int) -> None:
    """int32 or int64, bf16 or fp32: the same values give the same bits."""
    layer = layer_of(cuda_device, num_ranks, weights="bf16", kind="masked")
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    assert_right(layer, want)
    for id_type in (torch.int32, torch.int64):
        for weight_type in (torch.bfloat16, torch.float32):
            other = replace(
                layer,
                ids=[own.to(id_type) for own in layer.ids],
                weights=[own.to(weight_type) for own in layer.weights],
            )
            assert_same_bits(ranks.forward(other), want, f"{id_type}, {weight_type}")
    ranks.check()


def shifted(value: Tensor, elements: int) -> Tensor:
    """A copy that starts so many elements after a block of the allocator."""
    room = torch.empty(value.numel() + elements, dtype=value.dtype, device=value.device)
    room[elements:] = value.reshape(-1)
    return room[elements:].view(value.shape)


@RANKS
def test_alignment(cuda_device: torch.device, num_ranks: int) -> None:
    """16 bytes for x and the weights of the experts, no more than an element for ids and routing weights."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    other = Layer(
        [shifted(own, 8) for own in layer.x],
        [shifted(own, 1) for own in layer.ids],
        [shifted(own, 1) for own in layer.weights],
        shifted(layer.gate_up, 8),
        shifted(layer.down, 24),
        layer.clamp,
    )
    assert all(
        own.data_ptr() % 16 == 0 and own.data_ptr() % 32 for own in (*other.x, other.gate_up, other.down)
    )
    ranks.synchronize()
    assert_same_bits(ranks.forward(other), want, "shifted")
    ranks.check()


@RANKS
def test_weights_scale_their_slots(cuda_device: torch.device, num_ranks: int) -> None:
    """Nothing is normalized: powers of two and signs of the weights pass through every rounding exactly."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    for factor in (2.0, -0.25, -1.0):
        scaled = ranks.forward(replace(layer, weights=[own * factor for own in layer.weights]))
        for got, plain in zip(scaled, want):
            assert torch.equal(got, plain * factor), factor  # +0 equals -0
    nothing = ranks.forward(replace(layer, weights=[own * 0 for own in layer.weights]))
    assert all(torch.count_nonzero(own) == 0 for own in nothing)
    ranks.check()


@RANKS
def test_slots_of_weight_zero_are_as_if_masked(cuda_device: torch.device, num_ranks: int) -> None:
    layer = layer_of(cuda_device, num_ranks)
    for own in layer.weights:
        own[::2, 1] = 0
        own[5] = 0
    masked = replace(
        layer,
        ids=[torch.where(own == 0, -1, ids).to(ids.dtype) for own, ids in zip(layer.weights, layer.ids)],
    )
    ranks = new_ranks(cuda_device, layer)
    for got, want in zip(ranks.forward(layer), ranks.forward(masked)):
        assert torch.equal(got, want)
        assert torch.count_nonzero(want[5]) == 0
    ranks.check()


@RANKS
@pytest.mark.parametrize("intermediate", [SHORT, LONG])
@pytest.mark.parametrize("clamp", [0.25, 1.0, float("inf")])
def test_clamp(cuda_device: torch.device, num_ranks: int, clamp: float, intermediate: int) -> None:
    layer = layer_of(cuda_device, num_ranks, weights="positive", intermediate=intermediate)
    ranks = new_ranks(cuda_device, layer)
    plain = ranks.forward(layer)
    clamped = ranks.forward(replace(layer, clamp=clamp))
    assert_right(replace(layer, clamp=clamp), clamped)
    if clamp == float("inf"):
        assert_same_bits(clamped, plain, "no clamp")
    else:
        assert not any(same_bits(*pair) for pair in zip(clamped, plain))
    ranks.check()


@RANKS
@pytest.mark.parametrize("size", [0.0, 1e-25, 100.0])
def test_small_and_large_values(cuda_device: torch.device, num_ranks: int, size: float) -> None:
    """Gates beyond 88, whose exponential is no fp32 number; values whose products are none; zeros."""
    layer = layer_of(cuda_device, num_ranks, weights="positive")
    layer = replace(layer, x=[own * size for own in layer.x])
    ranks = new_ranks(cuda_device, layer)
    y = ranks.forward(layer)
    if size == 100:
        assert_right(layer, y)
    for own in y:
        assert own.isfinite().all()
        if size < 1:  # the product of two such gates is below the smallest bf16
            assert torch.count_nonzero(own) == 0
    ranks.check()


@RANKS
@pytest.mark.parametrize("intermediate", [SHORT, LONG])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_smoke_a_token_that_is_no_number_stays_alone(
    cuda_device: torch.device, num_ranks: int, value: float, intermediate: int
) -> None:
    """It reaches its own y and no other; masked, not even that."""
    layer = layer_of(cuda_device, num_ranks, intermediate=intermediate)
    layer.ids[0][9] = -1
    ranks = new_ranks(cuda_device, layer)
    clean = ranks.forward(layer)
    touched, masked = [0, 64, 127], 9
    x = [own.clone() for own in layer.x]
    for token in [*touched, masked]:
        x[0][token, 17 * token % 512] = value
    ranks.synchronize()
    got = ranks.forward(replace(layer, x=x))
    for token in touched:
        assert not got[0][token].isfinite().any(), token
    assert torch.count_nonzero(got[0][masked]) == 0
    got[0][touched] = clean[0][touched]
    assert_same_bits(got, clean, f"other tokens than those of {value}")
    ranks.check()


@RANKS
def test_experts_without_tokens_may_hold_anything(cuda_device: torch.device, num_ranks: int) -> None:
    layer = layer_of(cuda_device, num_ranks)
    layer = replace(layer, ids=[own - own % 2 for own in layer.ids])  # even experts only
    ranks = new_ranks(cuda_device, layer)
    want = ranks.forward(layer)
    gate_up, down = layer.gate_up.clone(), layer.down.clone()
    gate_up[1::2], down[1::2] = torch.nan, torch.nan
    ranks.synchronize()
    assert_same_bits(ranks.forward(replace(layer, gate_up=gate_up, down=down)), want, "NaN in odd experts")
    ranks.check()


@RANKS
def test_inputs_are_left_alone(cuda_device: torch.device, num_ranks: int) -> None:
    layer = layer_of(cuda_device, num_ranks)
    before = layer.copies()
    ranks = new_ranks(cuda_device, layer)
    ranks.forward(layer)
    for got, want in zip(layer.inputs(), before):
        assert torch.equal(got, want)
    ranks.check()


@RANKS
def test_every_slot_of_a_token_on_one_expert(cuda_device: torch.device, num_ranks: int) -> None:
    """Sixteen rows of one token side by side: it travels once and is summed in slot order."""
    tokens = [100 - 10 * rank for rank in range(num_ranks)]
    ids = random_ids("one expert", tokens, 16, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 512, 384), weights="signed")
    ranks = new_ranks(cuda_device, layer)
    assert_right(layer, ranks.forward(layer))
    ranks.check()
