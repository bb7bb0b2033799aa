"""DeepGEMM's names in fp8 on a GPU: values through the fused kernels, of one rank and of several; graphs; refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe import deep_gemm as face
from mega_moe._backends.fused.prequantized import PrequantizedLayer, QuantizedWeight
from mega_moe._backends.plain.quantize import quantize_rows
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients
from mega_moe.testing import Problem, random_problem

from . import _backward_fp8, _forward_fp8
from ._backward import assert_same_bits, random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._face_fp8 import backward, both, bytes_taken, fill, forward, pair, turned
from ._forward import Layer, random_experts, random_layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import inputs_of, pool_of, shape_of
from ._virtual import random_ids
from ._waits import synchronising_is_an_error

_WHY = _forward_fp8.why_no_kernel() or _backward_fp8.why_no_kernel()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90, method="thread"),
    pytest.mark.skipif(_WHY is not None, reason=str(_WHY)),
]

SIZES = {"hidden": 512, "intermediate": 256, "num_experts": 16, "top_k": 4}
MOST = 1024


@pytest.fixture
def problem(cuda_device: torch.device) -> Problem:
    return random_problem(777, 512, 256, 16, 4, device=cuda_device, masked=0.1)


@pytest.fixture
def buffer(cuda_device: torch.device) -> Iterator[face.SymmBuffer]:
    made = get_buffer()
    yield made
    made.destroy()


def get_buffer() -> face.SymmBuffer:
    return face.get_symm_buffer_for_mega_moe(
        None, SIZES["num_experts"], MOST, SIZES["top_k"], SIZES["hidden"], SIZES["intermediate"],
        mma_type="fp8xfp8",
    )  # fmt: skip


def as_layer(problem: Problem, clamp: float | None = None) -> Layer:
    return Layer(
        [problem.x], [problem.topk_idx], [problem.topk_weights], problem.w_gate_up, problem.w_down, clamp
    )


@pytest.mark.parametrize("clamp", [None, 20.0])
def test_smoke_against_fp64_and_the_emulation(
    problem: Problem, buffer: face.SymmBuffer, clamp: float | None
) -> None:
    """By what judges the kernels themselves."""
    assert face.serves("fp8") == []
    assert buffer.moe.backend == "fused"
    layer, dy = as_layer(problem, clamp), [problem.dy]
    stats = torch.zeros(16, dtype=torch.int32, device=problem.x.device)
    y = forward(buffer, problem, activation_clamp=clamp, cumulative_local_expert_recv_stats=stats)
    _forward_fp8.Judge(layer).assert_right([y])
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert stats.tolist() == torch.bincount(ids, minlength=16).tolist()
    judge = _backward_fp8.Judge(layer, dy)
    for dw in (torch.bfloat16, torch.float32):
        judge.assert_right([Gradients(*backward(buffer, problem, dw, activation_clamp=clamp))])
    buffer.moe.check()


def test_the_bits_are_the_layers(problem: Problem, buffer: face.SymmBuffer) -> None:
    """Codes and scales that the caller makes as the kernels do change nothing."""
    leaves = problem.requires_grad()
    with MoEBuffer(**{**problem.sizes, "max_tokens_per_rank": MOST}, precision="fp8", backend="fused") as own:
        y = mega_moe.moe(*leaves.inputs, buffer=own)
        y.backward(leaves.dy)
        own.check()
    x, *rest = (grad for grad in leaves.grads() if grad is not None)
    for _ in range(3):  # in turn, on one buffer
        got = both(buffer, problem)
        assert torch.equal(got.y, y.detach())
        for value, want in zip(got[1:], (x, *rest), strict=True):
            assert torch.equal(value, want)


def test_a_call_takes_no_memory_of_the_size_of_its_results(problem: Problem, buffer: face.SymmBuffer) -> None:
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    y, dx, dtopk = (torch.empty_like(t) for t in (problem.x, problem.x, problem.topk_weights))
    dw1, dw2 = (torch.empty_like(w) for w in (problem.w_gate_up, problem.w_down))
    copies = l1, turned(l1), turned(l2)
    fill(buffer, problem)
    assert bytes_taken(lambda: face.fp8_mega_moe(y, l1, l2, buffer)) < 1 << 16
    call = (dx, dw1, dw2, dtopk, problem.dy, problem.x, *copies, buffer)
    assert bytes_taken(lambda: face.fp8_mega_moe_backward(*call)) < 1 << 16


def test_a_captured_forward_reads_what_the_buffer_holds_at_replay(
    problem: Problem, buffer: face.SymmBuffer
) -> None:
    fill(buffer, problem)
    y = torch.empty_like(problem.x)
    call = (y, pair(problem.w_gate_up), pair(problem.w_down), buffer)
    face.fp8_mega_moe(*call)
    first = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        face.fp8_mega_moe(*call)
    other = Problem(problem.x.flip(0), *problem.inputs[1:], problem.dy)
    fill(buffer, other)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    changed = y.clone()
    face.fp8_mega_moe(*call)
    assert torch.equal(changed, y)
    assert not torch.equal(changed, first)


def test_captured_steps_equal_eager_ones(problem: Problem, buffer: face.SymmBuffer) -> None:
    """Both directions in one graph, with what quantizes x in it."""
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    copies = l1, turned(l1), turned(l2)
    x, y, dx, dtopk = (torch.empty_like(t) for t in (*[problem.x] * 3, problem.topk_weights))
    dw1, dw2 = torch.empty_like(problem.w_gate_up), torch.empty_like(problem.w_down)
    fill(buffer, problem)

    def step() -> None:
        assert buffer.x is not None
        assert buffer.x_sf is not None
        codes, scales = quantize_rows(x)
        buffer.x[: len(x)] = codes
        buffer.x_sf[: len(x)] = scales
        face.fp8_mega_moe(y, l1, l2, buffer)
        face.fp8_mega_moe_backward(dx, dw1, dw2, dtopk, problem.dy, x, *copies, buffer)

    results = (y, dx, dtopk, dw1, dw2)
    x.copy_(problem.x)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for at in range(3):
        x.copy_(problem.x.roll(at, 0))
        step()
        want = [own.clone() for own in results]
        for own in results:
            own.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(got, own) for got, own in zip(results, want, strict=True)), at
    buffer.moe.check()


def test_nothing_waits_for_the_device(problem: Problem, buffer: face.SymmBuffer) -> None:
    want = both(buffer, problem)
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    copies = l1, turned(l1), turned(l2)
    y, dx, dtopk = (torch.empty_like(t) for t in (problem.x, problem.x, problem.topk_weights))
    dw1, dw2 = torch.empty_like(problem.w_gate_up), torch.empty_like(problem.w_down)
    fill(buffer, problem)
    with synchronising_is_an_error():
        face.fp8_mega_moe(y, l1, l2, buffer)
        face.fp8_mega_moe_backward(dx, dw1, dw2, dtopk, problem.dy, problem.x, *copies, buffer)
    torch.cuda.synchronize()
    assert all(torch.equal(got, own) for got, own in zip((y, dx, dtopk, dw1, dw2), want, strict=True))


def test_sms_are_left_to_others(problem: Problem) -> None:
    total = face.get_num_sms()
    face.set_num_sms(total - 16)
    try:
        buffer = get_buffer()
        assert buffer.moe.explanation.request.num_reserved_sms == 16
        _forward_fp8.Judge(as_layer(problem)).assert_right([forward(buffer, problem)])
        buffer.destroy()
    finally:
        face.set_num_sms(total)


def test_a_scale_of_the_turned_copy_that_differs_makes_nan(problem: Problem, buffer: face.SymmBuffer) -> None:
    fill(buffer, problem)
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    codes, scales = turned(l1)
    scales[2, 1, 0] *= 2
    made = [torch.zeros_like(t) for t in (problem.x, problem.w_gate_up, problem.w_down, problem.topk_weights)]
    face.fp8_mega_moe_backward(*made, problem.dy, problem.x, l1, (codes, scales), turned(l2), buffer)
    reached = (problem.topk_idx == 2).any(1)
    assert bool(made[0][reached].isnan().any(1).all())
    assert bool(made[0][~reached].isfinite().all())


def test_a_bad_id_makes_nan_and_raises_later(problem: Problem, buffer: face.SymmBuffer) -> None:
    good = forward(buffer, problem)
    wrong = Problem(problem.x, problem.topk_idx.clone(), *problem.inputs[2:], problem.dy)
    wrong.topk_idx[7, 2] = 16
    assert bool(forward(buffer, wrong).isnan().all())
    with pytest.raises(ValueError, match=r"topk_idx\[7, 2\]: got expert 16, want -1 or 0 to 15"):
        buffer.moe.check()
    assert torch.equal(forward(buffer, problem), good)
    buffer.moe.check()


# --- several ranks, which one process plays ----------------------------------------------------------------


def ranks_of(
    device: torch.device, counts: Sequence[int], chunks: str
) -> tuple[Layer, BackwardRanks, list[PrequantizedLayer]]:
    ids = random_ids("masked", counts, 4, 16, device)
    layer = random_layer(ids, random_experts(device, 16, 512, 384), weights="signed")
    most = max(counts) + 64
    pool = pool_of(chunks, shape_of(layer, max_tokens=most))
    ranks = new_backward_ranks(device, layer, max_tokens=most, pool_rows=pool, precision="fp8")
    return layer, ranks, [PrequantizedLayer(kernels) for kernels in ranks.kernels]


def stage(given: PrequantizedLayer, x: Tensor) -> None:
    codes, scales = quantize_rows(x)
    given.x[: len(x)] = codes
    given.x_scales[: len(x)] = scales


def start(ranks: BackwardRanks, given: PrequantizedLayer, rank: int, layer: Layer) -> Tensor:
    """One rank's forward of what it has staged, on its stream."""
    copies = ranks.forward_copies(rank, layer)
    assert copies is not None
    pairs = [QuantizedWeight(copy.codes, copy.scales) for copy in copies]  # type: ignore[arg-type]
    with ranks.on(rank):
        return given.forward(layer.ids[rank], layer.weights[rank], *pairs, Activation(clamp=layer.clamp))[0]


@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
@pytest.mark.parametrize("counts", [[700], [700, 300], [500, 0, 129, 512]], ids=len)
def test_ranks_find_what_each_has_staged(cuda_device: torch.device, counts: list[int], chunks: str) -> None:
    """The bits of a forward that quantizes x itself, also alongside a rank that does; the backward, which stages x in
    bf16 at the same place, comes between."""
    layer, ranks, given = ranks_of(cuda_device, counts, chunks)
    dy = random_dy(layer)
    want = ranks.forward(layer)
    _forward_fp8.Judge(layer).assert_right(want)
    gradients = ranks.backward(layer, dy)
    for step in range(4):
        ranks.poison(0xFFFF)
        for own, x in zip(given, layer.x, strict=True):
            stage(own, x)
        ranks.have_room(layer)
        y: dict[int, Tensor] = {}
        for rank in reversed(range(len(counts))):
            if step == 3 and rank == 0:
                with ranks.on(0):
                    y[0] = ranks.start(0, layer)[0]
            else:
                y[rank] = start(ranks, given[rank], rank, layer)
        ranks.synchronize()
        assert_same_y([y[rank] for rank in range(len(counts))], want, f"step {step}")
        if step % 2:
            assert_same_bits(ranks.backward(layer, dy), gradients, f"step {step}")
    ranks.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_given_results_are_overwritten(cuda_device: torch.device, num_ranks: int) -> None:
    """Over NaN, in both dtypes of the weights' gradients, for experts without a row too."""
    layer, ranks, _ = ranks_of(cuda_device, [300 - 50 * rank for rank in range(num_ranks)], "many chunks")
    for own in layer.ids:
        own.masked_fill_(own == 3, -1)
    dy = random_dy(layer)
    for dtype in (torch.bfloat16, torch.float32):
        want = ranks.backward(layer, dy, dw_dtype=dtype)
        out = [
            tuple(torch.full_like(result, float("nan")) for result in own if result is not None)
            for own in want
        ]
        got = ranks.backward(layer, dy, out=out)
        assert_same_bits([Gradients(*written) for written in out], want, str(dtype))
        for own, written in zip(got, out, strict=True):
            assert all(result is given for result, given in zip(own, written, strict=True))
    ranks.check()


def test_codes_elsewhere_are_refused(cuda_device: torch.device) -> None:
    """By name, got and wanted, before the launch; a slice that starts later is elsewhere too."""
    layer, ranks, (given,) = ranks_of(cuda_device, [300], "one chunk")
    want = ranks.forward(layer)
    stage(given, layer.x[0])
    inputs, copies = inputs_of(layer, 0), ranks.forward_copies(0, layer)
    for x in (given.x[1:301], given.x[:300].clone()):
        with pytest.raises(RuntimeError, match=r"x: address of e4m3 rows is 0x.*, must be 0x"):
            ranks.layers[0].forward(inputs._replace(x=x), copies=copies)
    y = start(ranks, given, 0, layer)
    ranks.synchronize()
    assert_same_y([y], want, "after refusals")
    bf16 = random_layer(layer.ids, (layer.gate_up, layer.down))
    plain = new_backward_ranks(cuda_device, bf16)
    with pytest.raises(RuntimeError, match="x: dtype is float8_e4m3fn, must be bfloat16"):
        plain.layers[0].forward(inputs._replace(x=given.x[:300]))
    ranks.check()
