"""What the fused backward does when ranks call differently, and when a rank does not come."""

from __future__ import annotations

import pytest
import torch

from mega_moe import PeerError, RankTimeoutError

from ._backward import random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._virtual import random_ids

pytestmark = pytest.mark.timeout(90, method="thread")


def two_ranks(device: torch.device, limit: float) -> tuple[Layer, list[torch.Tensor], BackwardRanks]:
    layer = random_layer(
        random_ids("random", [300, 200], 2, 8, device), random_experts(device, 8, 512, 256), weights="signed"
    )
    ranks = new_backward_ranks(device, layer, limit=limit)
    dy = random_dy(layer)
    ranks.forward(layer)
    ranks.backward(layer, dy)
    return layer, dy, ranks


@pytest.mark.parametrize("other", ["forward", "route", "without dx", "without dtopk"])
def test_smoke_ranks_that_call_differently(cuda_device: torch.device, other: str) -> None:
    """Told at once, and not after a time limit, by both."""
    layer, dy, ranks = two_ranks(cuda_device, limit=30.0)

    def backward(rank: int, needs: tuple[bool, bool, bool, bool]) -> None:
        ranks.backwards[rank].backward(
            dy[rank], layer.x[rank], layer.ids[rank], layer.weights[rank], *layer.experts(rank), needs=needs
        )

    with ranks.on(0):
        backward(0, (True, True, True, True))
    with ranks.on(1):
        if other == "forward":
            ranks.start(1, layer)
        elif other == "route":
            ranks.routers[1].route(layer.ids[1], layer.weights[1])
        else:
            backward(1, (other != "without dx", other != "without dtopk", True, True))
    for kernels in ranks.kernels:
        with pytest.raises(PeerError, match="called"):
            kernels.check()


def test_a_rank_that_does_not_come(cuda_device: torch.device) -> None:
    layer, dy, ranks = two_ranks(cuda_device, limit=1.0)
    with ranks.on(0):
        got, _ = ranks.backwards[0].backward(
            dy[0], layer.x[0], layer.ids[0], layer.weights[0], *layer.experts(0)
        )
    ranks.synchronize()
    for value in got:
        assert value is not None
        assert bool(value.isnan().all())
    with pytest.raises(RankTimeoutError, match="rank 1 to launch"):
        ranks.kernels[0].check()
