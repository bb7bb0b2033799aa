"""The form of the fused backward in fp8 whose weight gradients are products of e4m3.

What it does as the others do, they test too: see `_precision.OF_BACKWARD`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import mega_moe
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.rows import pool_rows
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, random_problem, relative_l2

from ._backward import assert_same_bits, exact_gradients, random_dy
from ._backward_fp8 import Judge, why_no_gradients, with_exact_gate_and_up
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward_ranks import pool_of, shape_of
from ._virtual import random_ids
from .test_forward_fp8_values import MODELS
from .test_forward_values import KINDS, ids_of

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(why_no_gradients() is not None, reason=str(why_no_gradients())),
]

FEW = 700
CHUNKS = pytest.mark.parametrize("chunks", ["one chunk", "both pools", "many chunks"])
# Relative L2 of a weight gradient of many rows against fp64, docs/semantics.md: a format of 3 bits leaves 3 to 4 % of
# a product of two, and gate, up and dh, of which dz and h are made, are as far off before.
LOW, HIGH = 0.02, 0.08


def ranks_of(layer: Layer, pool_rows: int = 0) -> BackwardRanks:
    return new_backward_ranks(layer.device, layer, pool_rows=pool_rows, precision="fp8_dw")


def random_layer_of(device: torch.device, num_ranks: int, seed: int = 0, clamp: float | None = None) -> Layer:
    ids = random_ids("random", [FEW - 90 * rank for rank in range(num_ranks)], 4, 16, device, seed)
    return random_layer(ids, random_experts(device, 16, 512, 384), weights="signed", seed=seed, clamp=clamp)


def assert_right(ranks: BackwardRanks, layer: Layer, seed: int = 0) -> None:
    dy = random_dy(layer, seed)
    Judge(layer, dy, ranks.shape).assert_right(ranks.backward(layer, dy))


def test_smoke_one_expert_one_tile(cuda_device: torch.device) -> None:
    """One block of rows, and each gradient alone first: descriptors, scales and the order of rows show here."""
    ids = random_ids("random", [128], 1, 1, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 1, 512, 256))
    ranks, dy = ranks_of(layer), random_dy(layer)
    judge = Judge(layer, dy, ranks.shape)
    for needs in ((True, True, False, False), (False, False, True, False), (False, False, False, True)):
        judge.assert_right(ranks.backward(layer, dy, needs=needs))
    judge.assert_right(ranks.backward(layer, dy))
    ranks.check()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 385])
def test_smoke_edges_of_one_expert(cuda_device: torch.device, tokens: int) -> None:
    ids = random_ids("one expert", [tokens], 1, 3, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 3, 512, 384))
    ranks = ranks_of(layer)
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("hidden", [512, 768, 1280])
def test_tiles_that_transpose(cuda_device: torch.device, hidden: int) -> None:
    """Of 256 columns where 512 do not divide them; half a tile of w_down."""
    ids = random_ids("random", [300], 3, 4, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 4, hidden, 128))
    ranks = new_backward_ranks(cuda_device, layer, precision="fp8_bwd_dw")
    assert_right(ranks, layer)
    ranks.check()


@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_routing(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    """With several chunks an expert's rows begin a block of 128 with each of them."""
    counts = [FEW - 90 * rank for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 16, 512, 384)
    ranks = None
    for seed, kind in enumerate(KINDS):
        layer = random_layer(ids_of(kind, counts, 4, 16, cuda_device), experts, weights="signed", seed=seed)
        if ranks is None:
            pool = pool_of(chunks, shape_of(layer, max_tokens=FEW))
            ranks = new_backward_ranks(cuda_device, layer, max_tokens=FEW, pool_rows=pool, precision="fp8_dw")
        assert_right(ranks, layer, seed)
    assert ranks is not None
    ranks.check()


@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_same_bits_again_and_for_each_need(
    cuda_device: torch.device, num_ranks: int, chunks: str
) -> None:
    layer = random_layer_of(cuda_device, num_ranks)
    ranks, dy = ranks_of(layer, pool_of(chunks, shape_of(layer))), random_dy(layer)
    whole = ranks.backward(layer, dy)
    for seed in range(1, 6):
        assert_same_bits(ranks.backward(layer, dy, delay_seed=seed), whole, f"seed {seed}")
    for needs in itertools.product((False, True), repeat=4):
        got = ranks.backward(layer, dy, needs=needs)
        want = [type(own)(*(value if needed else None for value, needed in zip(own, needs))) for own in whole]
        assert_same_bits(got, want, f"needs {needs}")
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dx_and_dtopk_are_those_of_the_other_form(cuda_device: torch.device, num_ranks: int) -> None:
    """Bit by bit: the operands of dW alone differ."""
    layer = random_layer_of(cuda_device, num_ranks, clamp=2.0)
    dy, needs = random_dy(layer), (True, True, False, False)
    got, want = (
        new_backward_ranks(cuda_device, layer, precision=form).backward(layer, dy, needs=needs)
        for form in ("fp8_dw", "fp8")
    )
    assert_same_bits(got, want, "dx and dtopk")


@pytest.mark.parametrize("clamp", [0.5, 2.0])
def test_clamp(cuda_device: torch.device, clamp: float) -> None:
    layer = with_exact_gate_and_up(random_layer_of(cuda_device, 2, clamp=clamp))
    ranks = ranks_of(layer)
    assert_right(ranks, layer)
    ranks.check()


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_accumulate(cuda_device: torch.device, dtype: torch.dtype, chunks: str) -> None:
    """Into zeros gives the gradient itself; twice into fp32 gives it twice, to the last bit."""
    layer = random_layer_of(cuda_device, 2)
    ranks, dy = ranks_of(layer, pool_of(chunks, shape_of(layer))), random_dy(layer)
    want = ranks.backward(layer, dy, dw_dtype=dtype)
    Judge(layer, dy, ranks.shape).assert_right(want)
    into = [tuple(torch.zeros_like(weight, dtype=dtype) for weight in layer.experts(rank)) for rank in (0, 1)]
    torch.cuda.synchronize(cuda_device)
    for times in (1, 2) if dtype is torch.float32 and chunks == "one chunk" else (1,):
        ranks.backward(layer, dy, into=into)
        for own, (gate_up, down) in zip(want, into, strict=True):
            assert own.dw_gate_up is not None
            assert own.dw_down is not None
            assert torch.equal(gate_up, own.dw_gate_up * times)
            assert torch.equal(down, own.dw_down * times)
    ranks.check()


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"), [("30B", 1, 4096), ("235B", 1, 2048), ("30B", 4, 1024)]
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents in the memory that a buffer takes for them."""
    model, experts = MODELS[name], 16
    request = Request(
        experts, most, model.top_k, model.hidden, model.intermediate, "fp8", num_ranks=num_ranks
    )
    ids = random_ids("random", [most] * num_ranks, model.top_k, experts, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, experts, model.hidden, model.intermediate))
    ranks = ranks_of(layer, pool_rows(request))
    assert_right(ranks, layer)
    ranks.check()


@pytest.mark.parametrize("inputs", ["normal", "channels"])
def test_error_against_fp64(cuda_device: torch.device, inputs: str) -> None:
    """``channels``: log-normal ones of x and dy, of sigma 1 and 0.7."""
    ids = random_ids("random", [4096], 4, 16, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 16, 1024, 512))
    dy = random_dy(layer)
    if inputs == "channels":
        made = torch.Generator(cuda_device).manual_seed(9)
        sizes = torch.randn(2, 1024, generator=made, device=cuda_device)
        layer = replace(layer, x=[layer.x[0] * sizes[0].exp().bfloat16()])
        dy = [dy[0] * (0.7 * sizes[1]).exp().bfloat16()]
        torch.cuda.synchronize(cuda_device)
    want = exact_gradients(layer, dy)
    for precision in ("fp8", "fp8_dw"):
        ranks = new_backward_ranks(cuda_device, layer, precision=precision)
        (got,) = ranks.backward(layer, dy, dw_dtype=torch.float32)
        assert got.dw_gate_up is not None
        assert got.dw_down is not None
        found = [
            relative_l2(got.dw_gate_up, want.dw_gate_up),
            relative_l2(got.dw_down, want.dw_down),
        ]
        print(f"error against fp64: {inputs}, {precision}: dw_gate_up {found[0]:.4f}, dw_down {found[1]:.4f}")
        assert all(error <= HIGH for error in found), found
        assert precision == "fp8" or min(found) >= LOW, found


# Through the public API


def results(problem: Problem, backend: str, **settings: str) -> Gradients:
    leaves = problem.requires_grad()
    with mega_moe.MoEBuffer(**leaves.sizes, backend=backend, **settings) as buffer:
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        y.backward(leaves.dy)
        buffer.check()
    return Gradients(y.detach(), *(grad for grad in leaves.grads() if grad is not None))


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_a_buffer_with_it(cuda_device: torch.device, precision: str) -> None:
    problem = random_problem(1000, 512, 384, 16, 4, masked=0.1, device=cuda_device)
    form = {"precision": precision, "dw_precision": "fp8"}
    with mega_moe.MoEBuffer(**problem.sizes, **form) as buffer:
        assert (buffer.reason, buffer.dw_precision) == ("fused", "fp8")
    got, emulated = results(problem, "fused", **form), results(problem, "reference", **form)
    exact = fp64_moe_grads(problem.dy, *problem.inputs)
    for name, a, b, c in zip(got._fields, got, emulated, exact, strict=True):
        assert relative_l2(a, b) <= 1e-2, name  # docs/semantics.md
        assert relative_l2(a, c) <= HIGH, name


def test_gradients_are_added_into_buffers(cuda_device: torch.device) -> None:
    problem = random_problem(1000, 512, 384, 16, 4, device=cuda_device)
    form = {"precision": "fp8", "dw_precision": "fp8"}
    want, leaves = results(problem, "fused", **form), problem.requires_grad()
    into = tuple(
        torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
        for weight in (leaves.w_gate_up, leaves.w_down)
    )
    with mega_moe.MoEBuffer(**leaves.sizes, backend="fused", **form) as buffer:
        for _ in range(2):
            mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)  # type: ignore[arg-type]
    for added, alone in zip(into, (want.dw_gate_up, want.dw_down)):
        assert relative_l2(added / 2, alone) <= 6e-3


def test_memory_is_what_nbytes_says(cuda_device: torch.device) -> None:
    sizes = dict(num_experts=8, max_tokens_per_rank=4096, top_k=2, hidden=2048, intermediate=128)
    form = {"precision": "fp8", "dw_precision": "fp8", "backend": "fused"}
    before = torch.cuda.memory_allocated()
    buffer = mega_moe.MoEBuffer(**sizes, **form, device=cuda_device)
    held = torch.cuda.memory_allocated() - before
    # Of the copies of weights, which a call makes: gate and up both ways, the other one transposed, and scales.
    weights = 8 * 2048 * 128
    copies = 2 * 2 * weights + weights + (3 * weights // 128**2) * 4
    assert 0 <= held + copies - mega_moe.MoEBuffer.nbytes(**sizes, **form) < 1024
    buffer.destroy()
    assert torch.cuda.memory_allocated() == before
