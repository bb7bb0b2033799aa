"""DeepGEMM's names on a GPU: values through the fused kernels, graphs, and alongside a real DeepGEMM."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from mega_moe import deep_gemm as face
from mega_moe._backends.deep_gemm import library as deep_gemm_library
from mega_moe.testing import Problem, fp64_moe_grads, random_problem, relative_l2

from ._face_fp8 import bytes_taken

pytestmark = pytest.mark.gpu


def staged(problem: Problem, **options: Any) -> face.SymmBuffer:
    sizes = problem.sizes
    buffer = face.get_symm_buffer_for_mega_moe(
        None, sizes["num_experts"], 1024, sizes["top_k"], sizes["hidden"], sizes["intermediate"],
        mma_type="bf16xbf16", **options,
    )  # fmt: skip
    tokens = len(problem.x)
    assert buffer.x is not None
    assert buffer.topk_idx is not None
    assert buffer.topk_weights is not None
    buffer.x.fill_(float("nan"))
    buffer.x[:tokens] = problem.x
    buffer.topk_idx[:tokens] = problem.topk_idx
    buffer.topk_weights[:tokens] = problem.topk_weights
    return buffer


@pytest.fixture
def problem(cuda_device: torch.device) -> Problem:
    return random_problem(777, 512, 256, 16, 4, device=cuda_device, masked=0.1)


def test_against_fp64(problem: Problem) -> None:
    assert face.serves("bf16") == []
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    buffer = staged(problem)
    assert buffer.moe.backend == "fused"
    y = torch.full_like(problem.x, float("nan"))
    stats = torch.zeros(16, dtype=torch.int32, device=y.device)
    face.bf16_mega_moe(y, problem.w_gate_up, problem.w_down, buffer, cumulative_local_expert_recv_stats=stats)
    assert relative_l2(y, want.y) < 6e-3
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert stats.tolist() == torch.bincount(ids, minlength=16).tolist()
    for dw in (torch.bfloat16, torch.float32):
        dx, dtopk = torch.empty_like(problem.x), torch.empty_like(problem.topk_weights)
        dw1, dw2 = (torch.empty_like(w, dtype=dw) for w in (problem.w_gate_up, problem.w_down))
        face.bf16_mega_moe_backward(
            dx, dw1, dw2, dtopk, problem.dy, problem.w_gate_up, problem.w_down, buffer
        )
        for got, exact in ((dx, want.dx), (dtopk, want.dtopk), (dw1, want.dw_gate_up), (dw2, want.dw_down)):
            assert relative_l2(got, exact) < 6e-3
    buffer.destroy()


def test_a_captured_forward_reads_what_the_buffer_holds_at_replay(problem: Problem) -> None:
    buffer = staged(problem)
    y = torch.empty_like(problem.x)
    call = (y, problem.w_gate_up, problem.w_down, buffer)
    face.bf16_mega_moe(*call)
    first = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        face.bf16_mega_moe(*call)
    assert buffer.x is not None
    buffer.x[: len(problem.x)] = problem.x.flip(0)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    changed = y.clone()
    face.bf16_mega_moe(*call)
    assert torch.equal(changed, y)
    assert not torch.equal(changed, first)
    buffer.destroy()


def test_a_call_takes_no_memory_of_the_size_of_its_results(problem: Problem) -> None:
    """They are written in place: nothing around them changes, and nothing is made to be copied."""
    buffer = staged(problem)
    weights = problem.w_gate_up, problem.w_down
    for dw in (torch.bfloat16, torch.float32):
        stats = torch.zeros(16, dtype=torch.int32, device=problem.x.device)
        results: list[torch.Tensor] = []
        guarded: list[torch.Tensor] = []
        for like, dtype in (
            (problem.x, torch.bfloat16),
            (problem.x, torch.bfloat16),
            (problem.w_gate_up, dw),
            (problem.w_down, dw),
            (problem.topk_weights, torch.float32),
        ):
            whole = torch.full((like.numel() + 128,), 7.0, dtype=dtype, device=like.device)
            guarded.append(whole)
            results.append(whole[64:-64].view_as(like))
        y, *gradients = results
        assert bytes_taken(lambda: face.bf16_mega_moe(y, *weights, buffer, None, None, stats)) < 1 << 16  # noqa: B023
        call = (*gradients, problem.dy, *weights, buffer)
        assert bytes_taken(lambda: face.bf16_mega_moe_backward(*call)) < 1 << 16  # noqa: B023
        want = fp64_moe_grads(problem.dy, *problem.inputs)
        exact = (want.y, want.dx, want.dw_gate_up, want.dw_down, want.dtopk)
        for whole, got, right in zip(guarded, results, exact, strict=True):
            assert relative_l2(got, right) < 6e-3
            assert bool((torch.cat((whole[:64], whole[-64:])) == 7).all())
    buffer.destroy()


def test_sms_are_left_to_others(problem: Problem) -> None:
    total = face.get_num_sms()
    face.set_num_sms(total - 16)
    try:
        buffer = staged(problem)
        assert buffer.moe.explanation.request.num_reserved_sms == 16
        y = torch.empty_like(problem.x)
        face.bf16_mega_moe(y, problem.w_gate_up, problem.w_down, buffer)
        assert relative_l2(y, fp64_moe_grads(problem.dy, *problem.inputs).y) < 6e-3
        buffer.destroy()
    finally:
        face.set_num_sms(total)


def test_beside_a_real_one(problem: Problem) -> None:
    reason = deep_gemm_library.status().reason
    if reason is not None:
        pytest.skip(reason)
    real = importlib.import_module("deep_gemm")
    before = dict(vars(real))
    assert face.install() is real
    try:
        buffer = real.get_symm_buffer_for_mega_moe(None, 16, 1024, 4, 512, 256, mma_type="bf16xbf16")
        assert isinstance(buffer, face.SymmBuffer)
        weights = problem.w_gate_up, problem.w_down
        assert real.transform_weights_for_mega_moe(*weights) == weights
        # Everything else is as it was, and works.
        a = torch.randn(128, 256, device=problem.x.device, dtype=torch.bfloat16)
        out = torch.empty(128, 128, device=a.device, dtype=torch.bfloat16)
        real.bf16_gemm_nt(a, a, out)
        assert relative_l2(out, a.double() @ a.double().T) < 6e-3
    finally:
        face.uninstall()
    assert {name: vars(real)[name] for name in before} == before
