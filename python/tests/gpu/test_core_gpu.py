"""The backends on a GPU, held to one contract: values against fp64, empty experts and calls, streams, compilation."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
import torch

import mega_moe
from mega_moe.testing import Problem, count_op_calls, fp64_moe_grads, random_problem, relative_l2

# architecture: relative L2 of bf16 results against fp64 fed the same inputs.
BF16_TOLERANCE = 6e-3
FAST = pytest.mark.parametrize("backend", ["fused", "grouped"])


def results(problem: Problem, backend: str, precision: str = "bf16") -> list[torch.Tensor]:
    """y and the four gradients of one forward and backward."""
    leaves = problem.requires_grad()
    with mega_moe.MoEBuffer(**leaves.sizes, backend=backend, precision=precision) as buffer:
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        y.backward(leaves.dy)
    return [y.detach(), *(grad for grad in leaves.grads() if grad is not None)]


def poison(device: torch.device, nbytes: int = 1 << 28) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    blocks = [torch.full((nbytes // 8,), float("nan"), device=device) for _ in range(2)]
    del blocks
    gc.collect()


@pytest.mark.parametrize(
    "shape",
    [
        dict(tokens=512, hidden=512, intermediate=256, experts=16, top_k=4),
        dict(tokens=1000, hidden=2048, intermediate=768, experts=128, top_k=8, masked=0.1),
        dict(tokens=3, hidden=256, intermediate=128, experts=8, top_k=2),
        dict(hidden=256, intermediate=640, counts=[130, 0, 2048, 300, 0, 70, 1, 63]),
        dict(hidden=512, intermediate=1408, counts=[129, 0, 0, 127, 64, 1], top_k=1),
    ],
    ids=["small", "30B", "three tokens", "ragged", "wide"],
)
@FAST
def test_matches_fp64_and_reference(cuda_device: torch.device, backend: str, shape: dict) -> None:
    problem = random_problem(**shape, device=cuda_device)
    poison(cuda_device)
    fast = results(problem, backend)
    reference = results(problem, "reference")
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    assert len(fast) == len(reference) == len(want) == 5
    for name, got, emulated, exact in zip(want._fields, fast, reference, want):
        assert relative_l2(got, exact) <= BF16_TOLERANCE, name
        assert relative_l2(emulated, exact) <= BF16_TOLERANCE, name
        assert relative_l2(got, emulated) <= BF16_TOLERANCE, name


@FAST
def test_expert_without_tokens_gets_exact_zeros(cuda_device: torch.device, backend: str) -> None:
    problem = random_problem(hidden=256, intermediate=128, counts=[0, 130, 0, 70, 0], device=cuda_device)
    for _ in range(3):
        poison(cuda_device)
        *_, dw_gate_up, dw_down = results(problem, backend)
        for expert in (0, 2, 4):
            assert torch.count_nonzero(dw_gate_up[expert]) == 0
            assert torch.count_nonzero(dw_down[expert]) == 0


@FAST
def test_no_tokens(cuda_device: torch.device, backend: str) -> None:
    problem = random_problem(tokens=4, device=cuda_device).tokens(slice(0, 0))
    y, dx, dtopk, dw_gate_up, dw_down = results(problem, backend)
    assert y.shape == dx.shape == (0, 256)
    assert dtopk.shape == (0, 2)
    assert torch.count_nonzero(dw_gate_up) == 0
    assert torch.count_nonzero(dw_down) == 0


@FAST
def test_memory_is_what_nbytes_says(cuda_device: torch.device, backend: str) -> None:
    sizes = dict(num_experts=8, max_tokens_per_rank=4096, top_k=2, hidden=2048, intermediate=128)
    before = torch.cuda.memory_allocated()
    buffer = mega_moe.MoEBuffer(**sizes, backend=backend, device=cuda_device)
    held = torch.cuda.memory_allocated() - before
    assert 0 <= held - mega_moe.MoEBuffer.nbytes(**sizes, backend=backend) < 1024, (
        "torch rounds each of two parts up to 512 bytes"
    )
    buffer.destroy()
    assert torch.cuda.memory_allocated() == before


def test_bad_id_is_named_and_the_buffer_stays_usable(cuda_device: torch.device) -> None:
    problem = random_problem(device=cuda_device)
    ids = problem.topk_idx.clone()
    ids[7, 1] = 8
    with mega_moe.MoEBuffer(**problem.sizes, backend="grouped") as buffer:
        with pytest.raises(ValueError, match=r"topk_idx\[7, 1\]: got expert 8, want -1 or 0 to 7"):
            mega_moe.moe(problem.x, ids, *problem.inputs[2:], buffer=buffer)
        y = mega_moe.moe(*problem.inputs, buffer=buffer)
    assert relative_l2(y, fp64_moe_grads(problem.dy, *problem.inputs).y) <= BF16_TOLERANCE


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_emulation_is_the_same_on_cpu_and_gpu(cuda_device: torch.device, precision: str) -> None:
    on_gpu = results(random_problem(200, 256, 256, masked=0.1, device=cuda_device), "reference", precision)
    on_cpu = results(random_problem(200, 256, 256, masked=0.1), "reference", precision)
    # Exact partial products; only exp() differs between the devices, by an ulp that can flip an e4m3 code.
    for got, want in zip(on_gpu, on_cpu):
        assert relative_l2(got.cpu(), want) <= BF16_TOLERANCE


def test_reference_is_bitwise_reproducible(cuda_device: torch.device) -> None:
    problem = random_problem(512, 512, 256, 16, 4, device=cuda_device)
    first = results(problem, "reference")
    for _ in range(5):
        poison(cuda_device)
        for got, want in zip(results(problem, "reference"), first):
            assert torch.equal(got, want)


def test_other_stream_and_fp32(cuda_device: torch.device) -> None:
    problem = random_problem(dtype=torch.float32, device=cuda_device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = results(problem, "grouped")
    side.synchronize()
    for value, want in zip(got, fp64_moe_grads(problem.dy, *problem.inputs)):
        assert relative_l2(value, want) <= 1e-5


def test_capture_of_plain_operators_is_refused_readably_and_leaves_the_process_usable(
    cuda_device: torch.device,
) -> None:
    problem = random_problem(device=cuda_device)
    with mega_moe.MoEBuffer(**problem.sizes, backend="grouped") as buffer:
        mega_moe.moe(*problem.inputs, buffer=buffer)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(mega_moe.MegaMoEError, match="cannot be captured"), torch.cuda.graph(graph):
            mega_moe.moe(*problem.inputs, buffer=buffer)
        y = mega_moe.moe(*problem.inputs, buffer=buffer)
    assert torch.isfinite(y).all()


@FAST
def test_compile_and_checkpoint_on_the_gpu(cuda_device: torch.device, backend: str) -> None:
    problem = random_problem(device=cuda_device).requires_grad()
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:

        def block(x: torch.Tensor) -> torch.Tensor:
            return x + mega_moe.moe(torch.tanh(x), *problem.inputs[1:], buffer=buffer)

        want = torch.autograd.grad(block(problem.x), problem.x, problem.dy)[0]
        with count_op_calls() as calls:
            y = torch.utils.checkpoint.checkpoint(block, problem.x, use_reentrant=False)
            got = torch.autograd.grad(y, problem.x, problem.dy)[0]
        assert calls == {"run": 1, "backward": 1}
        assert torch.equal(got, want)
        compiled = torch.compile(block, fullgraph=True)
        got = torch.autograd.grad(compiled(problem.x), problem.x, problem.dy)[0]
        assert relative_l2(got, want) <= BF16_TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "backend", "reason"),
    [({}, "fused", None), (dict(hidden=384), "grouped", "hidden is 384, must be a multiple of 256")],
)
def test_automatic_choice_warns_with_the_reason_where_it_is_not_fused(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, sizes: dict, backend: str, reason: str | None
) -> None:
    from mega_moe._backends.choice import explanation

    monkeypatch.setattr(explanation, "_warned", set())
    wanted = {**random_problem(device=cuda_device).sizes, **sizes}
    told = (
        contextlib.nullcontext() if reason is None else pytest.warns(mega_moe.FallbackWarning, match=reason)
    )
    with told:
        buffer = mega_moe.MoEBuffer(**wanted)
    assert buffer.backend == backend
    assert buffer.reason.startswith(backend)


# What each layer of a model may ask of its backend


@FAST
def test_gradients_that_are_asked_for(cuda_device: torch.device, backend: str) -> None:
    """All 16 combinations: None where frozen, else the bits of the full run."""
    problem = random_problem(100, 256, 128, 8, 3, masked=0.1, device=cuda_device)
    want = results(problem, backend)[1:]
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:
        for asked in itertools.product((False, True), repeat=4):
            x, ids, weights, *experts = (t.detach().clone() for t in problem.inputs)
            leaves = [x, weights, *experts]
            for leaf, needed in zip(leaves, asked):
                leaf.requires_grad_(needed)
            y = mega_moe.moe(x, ids, weights, *experts, buffer=buffer)
            if any(asked):
                y.backward(problem.dy)
            for leaf, needed, full in zip(leaves, asked, want):
                assert (leaf.grad is not None) == needed
                assert leaf.grad is None or torch.equal(leaf.grad, full)


@FAST
def test_weights_of_masked_slots_are_never_read(cuda_device: torch.device, backend: str) -> None:
    problem = random_problem(300, 256, 128, 8, 4, masked=0.3, device=cuda_device)
    x, ids, weights, *experts = problem.inputs
    ids[5] = -1
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:
        clean = mega_moe.moe(x, ids, weights, *experts, buffer=buffer)
        dirty = mega_moe.moe(x, ids, weights.masked_fill(ids == -1, float("nan")), *experts, buffer=buffer)
    assert torch.equal(clean, dirty)
    assert torch.count_nonzero(clean[5]) == 0


@FAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_added_into_buffers(
    cuda_device: torch.device, backend: str, dtype: torch.dtype
) -> None:
    problem = random_problem(200, 256, 128, 8, 2, device=cuda_device)
    into = tuple(torch.ones_like(w, dtype=dtype) for w in (problem.w_gate_up, problem.w_down))
    leaves = problem.requires_grad()
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:
        for _ in range(2):
            mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    for got, leaf, exact in zip(into, (leaves.w_gate_up, leaves.w_down), (want.dw_gate_up, want.dw_down)):
        assert relative_l2(got.double(), 1 + 2 * exact) <= BF16_TOLERANCE
        assert leaf.grad is not None
        assert torch.count_nonzero(leaf.grad) == 0


@FAST
def test_autocast(cuda_device: torch.device, backend: str) -> None:
    """The module casts, the function refuses."""
    problem = random_problem(64, 256, 128, 8, 2, device=cuda_device)
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:
        layer = mega_moe.nn.MegaMoE(256, 128, 8, buffer=buffer, dtype=torch.float32, device=cuda_device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(problem.x.float(), problem.topk_idx, problem.topk_weights)
            with pytest.raises(TypeError, match=r"w_gate_up: got torch\.float32"):
                mega_moe.moe(*problem.inputs[:3], layer.gate_up_proj, layer.down_proj, buffer=buffer)
    assert y.dtype == torch.bfloat16
    experts = (layer.gate_up_proj.bfloat16(), layer.down_proj.bfloat16())
    want = fp64_moe_grads(problem.dy, *problem.inputs[:3], *experts).y
    assert relative_l2(y, want) <= BF16_TOLERANCE


@FAST
def test_memory_does_not_grow_with_new_sizes(cuda_device: torch.device, backend: str) -> None:
    """200 calls with T = 1 to 200 through four layers of one buffer."""
    problem = random_problem(200, 256, 128, 8, 2, device=cuda_device)
    after = {}
    with mega_moe.MoEBuffer(**problem.sizes, backend=backend) as buffer:
        for tokens in range(1, 201):
            x, ids, weights, *experts = problem.tokens(slice(0, tokens)).inputs
            for _ in range(4):
                x = mega_moe.moe(x, ids, weights, *experts, buffer=buffer)
            del x, ids, weights, experts
            after[tokens] = torch.cuda.memory_allocated()
    assert after[200] == after[10]
