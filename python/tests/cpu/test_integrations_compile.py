"""Compiled blocks whose experts are spread over two ranks, with and without activation checkpointing."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mega_moe.integrations import convert, make_meshes
from mega_moe.integrations.adapters import _warn_of_eager
from mega_moe.testing import relative_l2

from ._ranks import shared_world
from ._trainers import GROUPED, Model, OwnAdapter

TWO = shared_world(2)
REASON = "is compiled and activation-checkpointed runs eagerly where its experts are sharded"


def gradients(order: str, fullgraph: bool) -> tuple[dict[str, Tensor], int, list[str]]:
    """Local gradients of one step, graphs compiled, and what the layer warned of."""
    torch._dynamo.reset()
    _warn_of_eager.cache_clear()
    model = Model(layers=2)
    convert(model, GROUPED, sequence_length=64, mesh=make_meshes("cpu", 2).expert, adapters=[OwnAdapter()])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=counter, fullgraph=fullgraph)
    checkpointed = lambda f: partial(checkpoint, f, use_reentrant=False)  # noqa: E731
    for block in model.blocks:
        inner: Any = block.forward
        if order == "compiled":
            block.forward = compiled(inner)
        elif order == "compiled, then checkpointed":
            block.forward = checkpointed(compiled(inner))
        elif order == "checkpointed, then compiled":
            block.forward = compiled(checkpointed(inner))
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(x).square().sum().backward()
    grads = {n: getattr(p.grad, "_local_tensor", p.grad) for n, p in model.named_parameters()}
    return grads, counter.frame_count, [str(w.message) for w in said if REASON in str(w.message)]


def one_graph(rank: int, order: str) -> None:
    want, _, _ = gradients("eager", False)
    got, graphs, said = gradients(order, True)
    assert graphs >= 1
    assert not said
    for name, grad in want.items():
        assert relative_l2(got[name], grad) < 1e-5, name


@pytest.mark.parametrize("order", ["compiled", "compiled, then checkpointed"])
def test_a_block_is_one_graph(order: str) -> None:
    TWO.values(one_graph, order, limit=150)


def eager_with_a_word(rank: int) -> None:
    want, _, _ = gradients("eager", False)
    got, graphs, said = gradients("checkpointed, then compiled", False)
    assert graphs == 0
    assert len(said) == 1  # for both blocks
    for name, grad in want.items():
        assert relative_l2(got[name], grad) < 1e-5, name


def test_a_checkpoint_inside_the_compiled_region_runs_eagerly_and_says_so() -> None:
    TWO.values(eager_with_a_word, limit=150)


def refused(rank: int) -> None:
    with pytest.raises(Exception, match=REASON):
        gradients("checkpointed, then compiled", True)


def test_a_checkpoint_inside_one_graph_is_refused_with_the_reason() -> None:
    TWO.values(refused, limit=150)
