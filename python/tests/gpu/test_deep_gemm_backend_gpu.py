"""The backend deep_gemm with an installed DeepGEMM: values, empty experts, recycled memory."""

from __future__ import annotations

import pytest
import torch

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._backends.deep_gemm import library as deep_gemm_library
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, random_problem, relative_l2

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(cuda_device: torch.device) -> torch.device:
    reason = deep_gemm_library.status().reason
    if reason is not None:
        pytest.skip(reason)
    return cuda_device


def results(problem: Problem, backend: str) -> Gradients:
    with MoEBuffer(**problem.sizes, backend=backend) as buffer:
        assert buffer.backend == backend
        leaves = problem.requires_grad()
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        y.backward(leaves.dy)
        return Gradients(y.detach(), *leaves.grads())  # type: ignore[arg-type]


def poison(problem: Problem) -> None:
    """Fill and free more than a call takes, so that memory it does not write is NaN."""
    torch.full((1 << 26,), float("nan"), device=problem.x.device)


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "top_k"),
    [(512, 512, 256, 8, 2), (1000, 2048, 768, 32, 8), (131, 256, 128, 16, 4), (1, 256, 128, 8, 2)],
)
def test_against_fp64(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, device: torch.device
) -> None:
    problem = random_problem(tokens, hidden, inner, experts, top_k, device=device, masked=0.1)
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    for _ in range(2):
        poison(problem)
        got = results(problem, "deep_gemm")
        for name, a, b in zip(want._fields, got, want):
            assert relative_l2(a, b) < 6e-3, name


def test_empty_experts_and_no_token(device: torch.device) -> None:
    counts = [130, 0, 300, 7, 0, 70]
    problem = random_problem(hidden=512, intermediate=256, counts=counts, device=device)
    poison(problem)
    got = results(problem, "deep_gemm")
    for expert, count in enumerate(counts):
        for grad in (got.dw_gate_up[expert], got.dw_down[expert]):
            assert bool(grad.any()) == (count > 0)
            assert grad.isfinite().all()
    none = results(problem.tokens(slice(0, 0)), "deep_gemm")
    assert not none.dw_gate_up.any()
    assert not none.dw_down.any()
