"""Tensors of more than 2^31 elements: the last tokens of a call are those of a small one, and right."""

from __future__ import annotations

import pytest
import torch

from ._forward import Layer, assert_right, assert_same_bits, random_experts, random_layer
from ._forward_ranks import new_ranks
from ._virtual import random_ids

# The time that a test waits for another of its kind does not count.
pytestmark = [pytest.mark.big_memory, pytest.mark.timeout(90, method="thread", func_only=True)]

LIMIT = 1 << 31


def assert_ends(layer: Layer, y: list[torch.Tensor]) -> None:
    """First, middle and last tokens of each rank against fp64, and in the same bits when they come alone."""
    which = []
    for own in layer.x:
        n = len(own)
        picked = torch.cat(
            [torch.arange(max(at, 0), min(at + 150, n)) for at in (0, n // 2, n - 150)]
        ).unique()
        which.append(picked.to(own.device))
    part = layer.rows(which)
    got = [own[rows] for own, rows in zip(y, which)]
    assert_right(part, got)
    assert_same_bits(new_ranks(layer.device, part).forward(part), got, "alone")


def test_x_y_and_pools(cuda_device: torch.device) -> None:
    """x, y and the pools of x and of outputs, a row of each for a token."""
    tokens = 300_032
    assert tokens * 7168 > LIMIT
    ids = random_ids("random", [tokens], 1, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 7168, 128))
    ranks = new_ranks(cuda_device, layer)
    assert_ends(layer, ranks.forward(layer))
    ranks.check()


def test_pools_of_more_rows_than_tokens(cuda_device: torch.device) -> None:
    """The pool of activations, and every row of one expert."""
    tokens = 75_000
    assert tokens * 8 * 4096 > LIMIT
    ids = random_ids("one expert", [tokens], 8, 4, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 4, 256, 4096))
    ranks = new_ranks(cuda_device, layer)
    assert_ends(layer, ranks.forward(layer))
    ranks.check()


def test_what_ranks_send_home(cuda_device: torch.device) -> None:
    """Room for the sums of all ranks, in chunks of 32768 rows; the other rank has few tokens."""
    tokens = 150_016
    assert tokens * 2 * 7168 > LIMIT
    ids = random_ids("random", [tokens, 70], 1, 8, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 8, 7168, 128))
    ranks = new_ranks(cuda_device, layer, pool_rows=32768)
    assert_ends(layer, ranks.forward(layer))
    ranks.check()


def test_weights_of_experts(cuda_device: torch.device) -> None:
    """The last experts, whose weights lie behind the first 2^31 elements."""
    first = 360
    assert first * 2 * 1536 * 2048 > LIMIT
    ids = [own % 24 + first for own in random_ids("random", [500], 4, 384, cuda_device)]
    layer = random_layer(ids, random_experts(cuda_device, 384, 2048, 1536))
    ranks = new_ranks(cuda_device, layer)
    assert_right(layer, ranks.forward(layer))
    ranks.check()
