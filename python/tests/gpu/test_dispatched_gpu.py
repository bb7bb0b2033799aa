"""The backend dispatched with the fused kernels as experts: several ranks in one process, and the public API."""

from __future__ import annotations

import pytest
import torch

import mega_moe
from mega_moe._base.layer import Gradients, Needs
from mega_moe.testing import fp64_moe_grads, random_problem, relative_l2

from ._backward import assert_right, assert_same_bits, exact_gradients, random_dy
from ._backward_ranks import new_backward_ranks
from ._forward import Layer, difference, exact, random_experts, random_layer
from ._in_process import InProcessRanks
from ._virtual import random_ids

pytestmark = pytest.mark.timeout(120, method="thread")

EXPERTS, TOP_K = 16, 4
TOKENS = {1: [300], 2: [300, 171], 4: [300, 0, 171, 7], 8: [300, 0, 171, 7, 129, 64, 1, 300]}
ROUTINGS = ("random", "masked", "one rank", "duplicates", "empty")


def layer_of(routing: str, num_ranks: int, device: torch.device, **changes: float) -> Layer:
    ids = random_ids(routing, TOKENS[num_ranks], TOP_K, EXPERTS, device)
    return random_layer(ids, random_experts(device, EXPERTS, 512, 384), weights="signed", **changes)  # type: ignore[arg-type]


def only_rows(gradients: list[Gradients]) -> list[Gradients]:
    return [g._replace(dw_gate_up=None, dw_down=None) for g in gradients]


@pytest.mark.parametrize("num_ranks", TOKENS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_the_same_bits_again(cuda_device: torch.device, routing: str, num_ranks: int) -> None:
    layer = layer_of(routing, num_ranks, cuda_device)
    dy, ranks = random_dy(layer), InProcessRanks(cuda_device, layer)
    assert all(executor.kernels is not None for executor in ranks.executors)
    y = ranks.forward(layer)
    assert difference(layer, y, exact(layer)) is None
    gradients = ranks.backward(layer, dy)
    assert_right(layer, dy, gradients)
    assert all(torch.equal(a, b) for a, b in zip(ranks.forward(layer), y, strict=True))
    assert_same_bits(ranks.backward(layer, dy), gradients, "again")
    ranks.check()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_bwd", "fp8_dw"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_sums_are_split_and_rounded_as_by_the_fused_kernel_over_ranks(
    cuda_device: torch.device, num_ranks: int, precision: str
) -> None:
    """What comes back for a token is the fused backend's to the bit; dW sums rows in another order."""
    layer = layer_of("masked", num_ranks, cuda_device)
    dy = random_dy(layer)
    fused = new_backward_ranks(cuda_device, layer, precision=precision)
    want_y, want = fused.forward(layer), fused.backward(layer, dy)
    ranks = InProcessRanks(cuda_device, layer, precision)
    assert all(torch.equal(a, b) for a, b in zip(ranks.forward(layer), want_y, strict=True))
    got = ranks.backward(layer, dy)
    for a, b in zip(got, want, strict=True):
        assert a.dx is not None
        assert b.dx is not None
        assert torch.equal(a.dx, b.dx)
        assert a.dtopk is not None
        assert b.dtopk is not None
        assert torch.equal(a.dtopk.float(), b.dtopk.to(a.dtopk.dtype).float())
        # e4m3 blocks along an expert's rows hold other rows.
        limit = 8e-2 if precision == "fp8_dw" else 6e-3
        for left, right in zip(a[2:], b[2:], strict=True):
            assert left is not None
            assert right is not None
            assert relative_l2(left, right) <= limit
    ranks.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_tokens_than_the_experts_take_are_several_calls(
    cuda_device: torch.device, dtype: torch.dtype
) -> None:
    layer = layer_of("masked", 4, cuda_device, clamp=1.0)
    dy, ranks = random_dy(layer), InProcessRanks(cuda_device, layer)
    y, whole = ranks.forward(layer), ranks.backward(layer, dy, dw_dtype=dtype)
    for executor in ranks.executors:
        executor.capacity = 50
    assert all(torch.equal(a, b) for a, b in zip(ranks.forward(layer), y, strict=True))
    parts = ranks.backward(layer, dy, dw_dtype=dtype)
    assert_same_bits(only_rows(parts), only_rows(whole), "in parts")
    assert_right(layer, dy, parts, exact_gradients(layer, dy))
    assert_same_bits(ranks.backward(layer, dy, dw_dtype=dtype), parts, "in parts again")
    ranks.check()


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, True, False), (False, False, True, True)]
)
def test_only_what_is_needed(cuda_device: torch.device, needs: tuple[bool, ...]) -> None:
    layer = layer_of("random", 2, cuda_device)
    dy, ranks = random_dy(layer), InProcessRanks(cuda_device, layer)
    every, some = ranks.backward(layer, dy), ranks.backward(layer, dy, needs=Needs(*needs))
    for a, b in zip(every, some, strict=True):
        for need, whole, part in zip(needs, a, b, strict=True):
            assert (part is not None) == need
            assert part is None or (whole is not None and torch.equal(part, whole))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_public_api_on_one_rank(cuda_device: torch.device, precision: str) -> None:
    """One rank is what fused computes, to the bit."""
    problem = random_problem(700, 512, 256, 16, 4, masked=0.1, device=cuda_device)
    found = []
    for backend in ("dispatched", "fused"):
        with mega_moe.MoEBuffer(**problem.sizes, backend=backend, precision=precision) as buffer:
            if backend == "dispatched":
                assert "experts by fused at EP=1" in buffer.reason
            leaves = problem.requires_grad()
            sums = tuple(torch.ones_like(w, dtype=torch.float32) for w in leaves.inputs[3:])
            y = mega_moe.moe(*leaves.inputs, buffer=buffer)
            y.backward(leaves.dy)
            with buffer.reuse_weight_copies():
                again = mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=sums)  # type: ignore[arg-type]
                again.backward(leaves.dy)
            assert torch.equal(y, again)
            buffer.check()
            found.append([y, *leaves.grads(), *sums])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    if precision == "bf16":
        assert relative_l2(found[0][0], fp64_moe_grads(problem.dy, *problem.inputs).y) <= 6e-3
