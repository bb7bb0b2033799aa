"""What the fused backward does when ranks call differently, and when a rank does not come."""

from __future__ import annotations

import pytest
import torch

from mega_moe import PeerError, RankTimeoutError

from ._backward import assert_same_bits, random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._precision import OF_BACKWARD
from ._virtual import random_ids
from .test_forward_faults import settle

pytestmark = pytest.mark.timeout(90, method="thread")


def two_ranks(
    device: torch.device, limit: float, precision: str
) -> tuple[Layer, list[torch.Tensor], BackwardRanks]:
    layer = random_layer(
        random_ids("random", [300, 200], 2, 8, device), random_experts(device, 8, 512, 256), weights="signed"
    )
    ranks = new_backward_ranks(device, layer, limit=limit, precision=precision)
    dy = random_dy(layer)
    ranks.forward(layer)
    ranks.backward(layer, dy)
    return layer, dy, ranks


@OF_BACKWARD
@pytest.mark.parametrize("other", ["forward", "route", "without dx", "without dtopk"])
def test_smoke_ranks_that_call_differently(cuda_device: torch.device, precision: str, other: str) -> None:
    """Told at once, and not after a time limit, by both."""
    layer, dy, ranks = two_ranks(cuda_device, 30.0, precision)

    def backward(rank: int, needs: tuple[bool, bool, bool, bool]) -> None:
        ranks.start_backward_of(rank, layer, dy, needs=needs)

    with ranks.on(0):
        backward(0, (True, True, True, True))
    with ranks.on(1):
        if other == "forward":
            ranks.start(1, layer)
        elif other == "route":
            ranks.kernels[1].route(layer.ids[1], layer.weights[1])
        else:
            backward(1, (other != "without dx", other != "without dtopk", True, True))
    for kernels in ranks.kernels:
        with pytest.raises(PeerError, match="called"):
            kernels.check()


@OF_BACKWARD
def test_a_rank_that_does_not_come(cuda_device: torch.device, precision: str) -> None:
    layer, dy, ranks = two_ranks(cuda_device, 1.0, precision)
    with ranks.on(0):
        got = ranks.start_backward_of(0, layer, dy)
    ranks.synchronize()
    for value in got:
        assert value is not None
        assert bool(value.isnan().all())
    with pytest.raises(RankTimeoutError, match="rank 1 to launch"):
        ranks.kernels[0].check()


@OF_BACKWARD
def test_a_refused_call(cuda_device: torch.device, precision: str) -> None:
    """The other rank learns of it at once, its dx and dtopk are NaN, and the next call is right."""
    layer, dy, ranks = two_ranks(cuda_device, 30.0, precision)
    want = ranks.backward(layer, dy)
    ranks.have_room_for_gradients(layer, torch.bfloat16)
    with ranks.on(0):
        got = ranks.start_backward_of(0, layer, dy)
    settle()
    with ranks.on(1):
        ranks.kernels[1].refuse(1)
    ranks.synchronize()
    for value in got[:2]:
        assert value is not None
        assert bool(value.isnan().all())
    with pytest.raises(PeerError, match="was refused by rank 1: its arguments were refused there"):
        ranks.kernels[0].check()
    assert_same_bits(ranks.backward(layer, dy), want, "after a refusal")
    ranks.check()


@OF_BACKWARD
def test_a_bad_id(cuda_device: torch.device, precision: str) -> None:
    """The rank's dx and dtopk are NaN, its next call raises and is right all the same."""
    layer, dy, ranks = two_ranks(cuda_device, 30.0, precision)
    want = ranks.backward(layer, dy)
    wrong = layer.rows([slice(None)] * 2)
    wrong.ids[1] = wrong.ids[1].clone()
    wrong.ids[1][7, 1] = 8
    got = ranks.backward(wrong, dy)
    for value in got[1][:2]:
        assert value is not None
        assert bool(value.isnan().all())
    assert got[0].dx is not None
    assert bool(got[0].dx.isfinite().all())
    with pytest.raises(ValueError, match=r"topk_idx\[7, 1\]: got expert 8, want -1 or 0 to 7"):
        ranks.kernels[1].check()
    assert_same_bits(ranks.backward(layer, dy), want, "after a bad id")
    ranks.check()
