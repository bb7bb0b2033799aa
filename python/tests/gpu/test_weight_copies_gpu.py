"""Copies of weights that are kept, on streams and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mega_moe._backends.fused.weight_copies import WeightCopies, WeightCopy
from mega_moe._backends.plain.quantize import quantize_weight


def parameter(device: torch.device, *shape: int, seed: int = 0) -> nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return nn.Parameter(values.to(device))


def assert_copies(got: WeightCopy, weight: Tensor) -> None:
    """Of ``weight``, which the device is done with, in both orientations."""
    torch.cuda.synchronize(weight.device)
    assert got.codes is not None
    assert got.transposed is not None
    for expert, plain in enumerate(weight.detach()):
        codes, scales = quantize_weight(plain)
        assert torch.equal(got.codes[expert].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(got.transposed[expert].view(torch.uint8), codes.view(torch.uint8).T)
        assert torch.equal(got.scales[expert], scales)


def of(copies: WeightCopies, weight: Tensor) -> WeightCopy:
    return copies.of(weight, codes=True, transposed=True)


def test_copies_are_those_of_the_reference(cuda_device: torch.device) -> None:
    weight = parameter(cuda_device, 3, 256, 512)
    assert_copies(of(WeightCopies(backward=True), weight), weight)


def test_a_fused_optimizer_step(cuda_device: torch.device) -> None:
    """It leaves the version of the weight as it was."""
    copies, weight = WeightCopies(backward=True), parameter(cuda_device, 2, 128, 256)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    with copies.reused():
        first = of(copies, weight)
        assert of(copies, weight) is first
        optimizer.step()
        assert_copies(of(copies, weight), weight)


def test_another_stream_waits_for_the_copy(cuda_device: torch.device) -> None:
    copies, weight = WeightCopies(backward=True), parameter(cuda_device, 2, 256, 256)
    late = parameter(cuda_device, 2, 256, 256, seed=1)
    first, second = torch.cuda.Stream(cuda_device), torch.cuda.Stream(cuda_device)
    torch.cuda.synchronize(cuda_device)
    with copies.reused():
        with torch.cuda.stream(first):
            torch.cuda._sleep(50_000_000)
            with torch.no_grad():
                weight.copy_(late)
            made = of(copies, weight)
        with torch.cuda.stream(second):
            again = of(copies, weight)
            assert again is made
            assert again.codes is not None
            seen = again.codes.view(torch.uint8).clone()
        second.synchronize()
        assert torch.equal(seen[0], quantize_weight(late.detach()[0])[0].view(torch.uint8))


@pytest.mark.parametrize("inside", [False, True])
def test_a_replayed_graph_quantizes_what_it_finds(cuda_device: torch.device, inside: bool) -> None:
    """Even where a copy was kept when the graph was captured."""
    copies, weight = WeightCopies(backward=True), parameter(cuda_device, 2, 256, 256)
    of(copies, weight)
    graph = torch.cuda.CUDAGraph()
    with copies.reused():
        kept = of(copies, weight) if inside else None
        torch.cuda.synchronize(cuda_device)
        with torch.cuda.graph(graph):
            captured = of(copies, weight)
        assert captured is not kept
        if inside:
            assert of(copies, weight) is kept
    for seed in range(3):
        with torch.no_grad():
            weight.copy_(parameter(cuda_device, 2, 256, 256, seed=5 + seed))
        graph.replay()
        assert_copies(captured, weight)
