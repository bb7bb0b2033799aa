"""Tensors of more than 2^31 elements in the backward: every token and every expert against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._base.layer import Gradients

from ._backward import ExactGradients, assert_right, exact_gradients, random_dy
from ._backward_ranks import new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._virtual import random_ids
from .test_forward_offsets import LIMIT

# The time that a test waits for another of its kind does not count.
pytestmark = [pytest.mark.big_memory, pytest.mark.timeout(180, method="thread", func_only=True)]

TOKENS_AT_ONCE = 1 << 14  # of each rank, in fp64


def assert_all_right(layer: Layer, dy: Sequence[Tensor], got: Sequence[Gradients]) -> None:
    """In pieces: a token's gradients do not depend on the others, and those of the weights are sums over pieces."""
    sums: ExactGradients | None = None
    for start in range(0, max(len(own) for own in layer.x), TOKENS_AT_ONCE):
        rows = [slice(start, start + TOKENS_AT_ONCE) for _ in layer.x]
        part = layer.rows(rows)
        part_dy = [own[start : start + TOKENS_AT_ONCE] for own in dy]
        want = exact_gradients(part, part_dy)
        own = [Gradients(g.dx[where], g.dtopk[where], None, None) for g, where in zip(got, rows)]  # type: ignore[index]
        assert_right(part, part_dy, own, want)
        if sums is None:
            sums = want
        else:
            sums.dw_gate_up.add_(want.dw_gate_up)
            sums.dw_down.add_(want.dw_down)
    assert_right(layer, dy, [g._replace(dx=None, dtopk=None) for g in got], sums)


def run(layer: Layer, **options: Any) -> None:
    dy = random_dy(layer)
    ranks = new_backward_ranks(layer.device, layer, pool_rows=options.pop("pool_rows", 0), limit=20.0)
    assert_all_right(layer, dy, ranks.backward(layer, dy, **options))
    ranks.check()


def test_x_dy_and_dx(cuda_device: torch.device) -> None:
    """x, dy, dx and their pools, a row of each for a token."""
    tokens = 300_032
    assert tokens * 7168 > LIMIT
    ids = random_ids("random", [tokens], 1, 8, cuda_device)
    run(random_layer(ids, random_experts(cuda_device, 8, 7168, 128)))


def test_pools_of_more_rows_than_tokens(cuda_device: torch.device) -> None:
    """The pools of h and dz, and every row of one expert, in 37 parts."""
    tokens = 75_000
    assert tokens * 8 * 4096 > LIMIT
    ids = random_ids("one expert", [tokens], 8, 4, cuda_device)
    run(random_layer(ids, random_experts(cuda_device, 4, 256, 4096)))


def test_what_ranks_send_home(cuda_device: torch.device) -> None:
    """Room for the sums of all ranks, in chunks of 32768 rows; the other rank has few tokens."""
    tokens = 150_016
    assert tokens * 2 * 7168 > LIMIT
    ids = random_ids("random", [tokens, 70], 1, 8, cuda_device)
    run(random_layer(ids, random_experts(cuda_device, 8, 7168, 128)), pool_rows=32768)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_experts_and_their_gradients(cuda_device: torch.device, dtype: torch.dtype) -> None:
    """The last experts have the rows, and all others zeros: weights and gradients behind the first 2^31 elements."""
    first = 360
    assert first * 2 * 1536 * 2048 > LIMIT
    ids = [own % 24 + first for own in random_ids("random", [500], 4, 384, cuda_device)]
    run(random_layer(ids, random_experts(cuda_device, 384, 2048, 1536)), dw_dtype=dtype)
