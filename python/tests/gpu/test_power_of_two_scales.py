"""Both directions in fp8 with scales that are powers of two: values, and the scales that lie in the kernels' memory.

What is parametrised with fp32 scales lies with those: weights, staging, tokens of extreme size.
"""

from __future__ import annotations

import pytest
import torch

import mega_moe
from mega_moe._backends.fused.memory import workspace_layout
from mega_moe._backends.plain.activation import activate, rounded_sigmoid
from mega_moe._backends.plain.quantize import quantize_rows, quantize_weight, scaled_gemm
from mega_moe._base.activation import SWIGLU
from mega_moe._base.layer import Gradients
from mega_moe._base.mode import Mode
from mega_moe.testing import random_problem

from . import _backward_fp8, _forward_fp8
from ._backward import random_dy
from ._backward_ranks import WITH_DW, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward_ranks import new_ranks, pool_of, shape_of
from ._scales import assert_powers_of_two, part_of, scales_of
from ._tensor_core import block_product_of
from ._virtual import random_ids

_WHY = _forward_fp8.why_no_kernel() or _backward_fp8.why_no_kernel()
pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(_WHY is not None, reason=str(_WHY)),
]
_WHY_DW = _backward_fp8.why_no_gradients()
_OF_GRADIENTS = pytest.mark.skipif(_WHY_DW is not None, reason=str(_WHY_DW))
PRECISIONS = pytest.mark.parametrize(
    "precision", ["fp8", "fp8_bwd", *(pytest.param(name, marks=_OF_GRADIENTS) for name in WITH_DW)]
)
CHUNKS = pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])


def layer_of(device: torch.device, num_ranks: int) -> Layer:
    ids = random_ids("masked", [700 - 90 * rank for rank in range(num_ranks)], 4, 16, device)
    return random_layer(ids, random_experts(device, 16, 512, 384), weights="signed")


@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_forward(cuda_device: torch.device, num_ranks: int, chunks: str) -> None:
    layer = layer_of(cuda_device, num_ranks)
    pool = pool_of(chunks, shape_of(layer, mode=Mode("fp8")))
    ranks = new_ranks(cuda_device, layer, pool_rows=pool, precision="fp8", power_of_two=True)
    y = ranks.forward(layer)
    _forward_fp8.Judge(layer, power_of_two=True).assert_right(y)
    with pytest.raises(AssertionError, match="rank 0"):
        _forward_fp8.Judge(layer).assert_right(y)
    ranks.check()


@CHUNKS
@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_backward(cuda_device: torch.device, num_ranks: int, precision: str, chunks: str) -> None:
    layer = layer_of(cuda_device, num_ranks)
    dy = random_dy(layer)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool, precision=precision, power_of_two=True)
    gradients = ranks.backward(layer, dy)
    _backward_fp8.Judge(layer, dy, ranks.shape, power_of_two=True).assert_right(gradients)
    other = _backward_fp8.Judge(layer, dy, ranks.shape)
    for name in Gradients._fields:
        alone = [Gradients(None, None, None, None)._replace(**{name: getattr(g, name)}) for g in gradients]
        with pytest.raises(AssertionError, match=name):
            other.assert_right(alone)
    ranks.check()


def one_expert(device: torch.device) -> Layer:
    """Its rows lie in the pools as its tokens do."""
    return random_layer(random_ids("one expert", [200], 1, 1, device), random_experts(device, 1, 512, 384))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_the_forward_quantizes(cuda_device: torch.device, power_of_two: bool) -> None:
    """x bit for bit; scales of h as the emulation's, but for the last bits of a sigmoid."""
    layer = one_expert(cuda_device)
    ranks = new_ranks(cuda_device, layer, precision="fp8", power_of_two=power_of_two)
    ranks.forward(layer)
    (kernels,) = ranks.kernels
    x = quantize_rows(layer.x[0], power_of_two)
    for name, got, want in zip(("codes", "scales"), kernels.staged_codes(), x, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
    weight = quantize_weight(layer.gate_up[0], power_of_two)
    z = scaled_gemm(x, weight, block_product_of(cuda_device)).bfloat16()
    h = activate(z, SWIGLU, rounded_sigmoid) * layer.weights[0].float()
    _, want = quantize_rows(h, power_of_two)
    scales = scales_of(kernels, "h_sf_pool", 3)
    got = scales[: len(want)]
    if power_of_two:
        assert_powers_of_two(scales, want.numel())
        assert int((got == want).sum()) >= 0.998 * want.numel()
    else:
        torch.testing.assert_close(got, want, rtol=0.02, atol=0)
        assert int(((got / want - 1).abs() < 1e-5).sum()) >= 0.998 * want.numel()
        with pytest.raises(AssertionError, match="no powers of two"):
            assert_powers_of_two(scales, want.numel())


@pytest.mark.parametrize("power_of_two", [False, True])
@PRECISIONS
def test_what_the_backward_quantizes(cuda_device: torch.device, precision: str, power_of_two: bool) -> None:
    """x and dy bit for bit, those of the first tokens, which all warps copy, and those behind; dz of gate and up."""
    layer = one_expert(cuda_device)
    dy = random_dy(layer)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision, power_of_two=power_of_two)
    ranks.backward(layer, dy)
    (kernels,) = ranks.kernels
    for name, value in (("x", layer.x[0]), ("dy", dy[0])):
        codes, scales = quantize_rows(value, power_of_two)
        got = part_of(kernels, f"{name}_e4m3_pool", torch.uint8, 512)[: len(codes)]
        assert torch.equal(got, codes.view(torch.uint8)), f"codes of {name}"
        assert torch.equal(scales_of(kernels, f"{name}_sf_pool", 4)[: len(scales)], scales), (
            f"scales of {name}"
        )
    parts = [(scales_of(kernels, "dz_sf_pool", 6), 200 * 6)]
    if ranks.shape.mode.wgrad == "fp8":
        # Of two blocks of rows: of each column of dz and dy, of 128 of x and h.
        of_gradients = workspace_layout(ranks.shape).view(kernels.memory[1], "dw_sf_pool", torch.float32)
        parts.append((of_gradients, 2 * (2 * 384 + 512 + 4 + 3)))
    for scales, written in parts:
        if power_of_two:
            assert_powers_of_two(scales, written)
        else:
            with pytest.raises(AssertionError, match="no powers of two"):
                assert_powers_of_two(scales, written)


@PRECISIONS
def test_a_buffer_asks_for_it(cuda_device: torch.device, precision: str) -> None:
    """Fused against the reference; with the other format the same call is further off than any tolerance."""
    problem = random_problem(700, 512, 384, 16, 4, masked=0.1, device=cuda_device)
    form = dict(zip(("precision", "dw_precision"), WITH_DW.get(precision, (precision, "bf16"))))
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in problem.inputs]

    def gradients(backend: str, scale_format: str) -> list[torch.Tensor]:
        with mega_moe.MoEBuffer(
            **problem.sizes, backend=backend, **form, scale_format=scale_format
        ) as buffer:
            y = mega_moe.moe(*inputs, buffer=buffer)
            wanted = [t for t in inputs if t.requires_grad]
            made = [y.detach(), *torch.autograd.grad(y, wanted, problem.dy)]
            buffer.check()
        return [t.double() for t in made]

    got, want, other = (
        gradients(*how)
        for how in (("fused", "power_of_two"), ("reference", "power_of_two"), ("reference", "fp32"))
    )
    for place, (a, b, c) in enumerate(zip(got, want, other, strict=True)):
        most = 1e-2  # docs/semantics.md
        assert float((a - b).norm()) <= most * float(b.norm()), place
        # y of fp8_bwd is made in bf16.
        if place or form["precision"] == "fp8":
            assert float((a - c).norm()) > 1.5 * most * float(c.norm()), place
