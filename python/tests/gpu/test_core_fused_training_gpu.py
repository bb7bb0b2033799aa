"""Training on the fused backend through the public API: no wait, graphs, streams, layers in turn, accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe.testing import Gradients, Problem, count_op_calls, fp64_moe_grads, random_problem, relative_l2

from ._waits import synchronising_is_an_error

# architecture: relative L2 of bf16 results against fp64 fed the same inputs.
BF16_TOLERANCE = 6e-3
REPLAYS = 50


@pytest.fixture
def problem(cuda_device: torch.device) -> Problem:
    return random_problem(700, 512, 384, 16, 4, masked=0.1, device=cuda_device)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[mega_moe.MoEBuffer]:
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused") as made:
        yield made


def step(leaves: Problem, buffer: mega_moe.MoEBuffer) -> Gradients:
    """y and all gradients of leaves that need them."""
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    wanted = (leaves.x, leaves.topk_weights, leaves.w_gate_up, leaves.w_down)
    return Gradients(y.detach(), *torch.autograd.grad(y, wanted, leaves.dy))


def assert_same(got: Gradients, want: Gradients, what: object = "") -> None:
    for name, a, b in zip(want._fields, got, want):
        assert torch.equal(a, b), (what, name)


def assert_right(got: Gradients, problem: Problem, tolerance: float = BF16_TOLERANCE) -> None:
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    for name, a, b in zip(want._fields, got, want):
        assert relative_l2(a, b) <= tolerance, name


def test_neither_direction_waits(
    problem: Problem, buffer: mega_moe.MoEBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "0")
    leaves = problem.requires_grad()
    want = step(leaves, buffer)  # loads the kernels
    torch.cuda.synchronize()
    with synchronising_is_an_error():
        got = step(leaves, buffer)
    assert_same(got, want)
    assert_right(got, problem)
    assert torch.count_nonzero(got.dtopk[problem.topk_idx < 0]) == 0


def test_memory_that_kernels_share_keeps_its_borders(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With canaries between all parts, which `check` and each call compare."""
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused") as buffer:
        leaves = problem.requires_grad()
        assert_same(step(leaves, buffer), step(leaves, buffer))
        buffer.check()


# CUDA graphs


def static_copy(problem: Problem) -> Problem:
    """Leaves at a place of their own, ids and dy too."""
    leaves = problem.requires_grad()
    return replace(leaves, topk_idx=problem.topk_idx.clone(), dy=problem.dy.clone())


@torch.no_grad()
def fill(static: Problem, fresh: Problem) -> None:
    for into, part in zip((*static.inputs, static.dy), (*fresh.inputs, fresh.dy)):
        into.copy_(part)


def test_replays_of_a_step_equal_eager_steps(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """Forward and backward in one graph, new inputs for each replay, between eager steps of another size."""
    static = static_copy(problem)
    other = random_problem(311, 512, 384, 16, 4, seed=9, device=problem.x.device).requires_grad()
    step(static, buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, buffer)
    want_other = step(other, buffer)
    for seed in range(REPLAYS):
        fresh = random_problem(
            700, 512, 384, 16, 4, masked=0.1 * (seed % 5), seed=seed, device=problem.x.device
        )
        fill(static, fresh)
        for part in captured:
            part.fill_(torch.nan)
        graph.replay()
        want = step(fresh.requires_grad(), buffer)
        assert_same(captured, want, seed)
        assert_same(step(other, buffer), want_other, seed)
        if seed == 0:
            assert_right(captured, fresh)
    buffer.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_add_into_buffers(problem: Problem, buffer: mega_moe.MoEBuffer, dtype: torch.dtype) -> None:
    """Each replay adds what an eager step adds: the same bits after as many of them."""
    leaves = problem.requires_grad()

    def zeros() -> tuple[Tensor, Tensor]:
        return torch.zeros_like(problem.w_gate_up, dtype=dtype), torch.zeros_like(problem.w_down, dtype=dtype)

    def add(into: tuple[Tensor, Tensor]) -> None:
        y = mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into)
        torch.autograd.grad(y, (leaves.x, leaves.w_gate_up, leaves.w_down), leaves.dy)

    eager, captured = zeros(), zeros()
    add(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(captured)
    assert all(torch.count_nonzero(own) == 0 for own in captured)  # a capture runs nothing
    add(eager)
    for _ in range(2):
        graph.replay()
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    for got, same, exact in zip(captured, eager, (want.dw_gate_up, want.dw_down)):
        assert torch.equal(got, same)
        assert relative_l2(got, 2 * exact) <= BF16_TOLERANCE
    buffer.check()


def test_a_bad_id_in_a_replay_makes_its_gradients_nan(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    static = static_copy(problem)
    step(static, buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, buffer)
    static.topk_idx[7, 2] = 16
    graph.replay()
    with pytest.raises(ValueError, match=r"topk_idx\[7, 2\]: got expert 16, want -1 or 0 to 15"):
        buffer.check()
    assert all(bool(part.isnan().all()) for part in captured)
    static.topk_idx.copy_(problem.topk_idx)
    graph.replay()
    buffer.check()
    assert_right(captured, problem)


# Streams and SMs


def test_steps_of_two_streams_take_turns(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """Without an event of the caller's between them: forwards of one alongside backwards of the other."""
    mine, other = (
        problem.requires_grad(),
        random_problem(500, 512, 384, 16, 4, seed=5, device=problem.x.device).requires_grad(),
    )
    want, want_other = step(mine, buffer), step(other, buffer)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(20):
        got = []
        for at, leaves in enumerate((mine, other)):
            with torch.cuda.stream(streams[at]):
                if turn % 3 == at:
                    torch.cuda._sleep(500_000)
                got.append(step(leaves, buffer))
        torch.cuda.synchronize()
        assert_same(got[0], want, turn)
        assert_same(got[1], want_other, turn)
    buffer.check()


def test_gradients_live_on_the_callers_stream(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """Their memory may be handed out again only after what that stream still does with them."""
    leaves = problem.requires_grad()
    want = step(leaves, buffer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = []
        for _ in range(8):
            got = step(leaves, buffer)
            torch.cuda._sleep(1_000_000)
            kept.append(Gradients(*(part + 0 for part in got)))
            del got
    side.synchronize()
    for own in kept:
        assert_same(own, want)


@pytest.mark.parametrize("reserved", [16, 54, 130])
def test_reserved_sms_change_no_bit(problem: Problem, buffer: mega_moe.MoEBuffer, reserved: int) -> None:
    leaves = problem.requires_grad()
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused", num_reserved_sms=reserved) as smaller:
        assert_same(step(leaves, smaller), step(leaves, buffer))


# Layers, micro-batches, what surrounds the layer


def layers_of(problem: Problem) -> list[Problem]:
    """Three layers of the same extents, with tokens, ids and weights of their own; each with another T."""
    device = problem.x.device
    return [
        random_problem(tokens, 512, 384, 16, 4, masked=0.1, seed=20 + tokens, device=device)
        for tokens in (700, 129, 512)
    ]


def test_layers_of_one_buffer_alternate(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """All forwards, then the backwards in the opposite order, in the same, and interleaved: the bits of a buffer of
    their own."""
    layers = [own.requires_grad() for own in layers_of(problem)]
    want = []
    for own in layers:
        with mega_moe.MoEBuffer(**own.sizes, backend="fused") as alone:
            want.append(step(own, alone))
        assert_right(want[-1], own)
    wanted = [(own.x, own.topk_weights, own.w_gate_up, own.w_down) for own in layers]
    for order in ((2, 1, 0), (0, 1, 2), (1, 0, 2)):
        ys = [mega_moe.moe(*own.inputs, buffer=buffer) for own in layers]
        for at in order:
            grads = torch.autograd.grad(ys[at], wanted[at], layers[at].dy)
            # A forward of another layer between two backwards, as a pipeline schedule has.
            again = mega_moe.moe(*layers[(at + 1) % 3].inputs, buffer=buffer)
            assert_same(Gradients(ys[at].detach(), *grads), want[at], (order, at))
            assert torch.equal(again, want[(at + 1) % 3].y)
    buffer.check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 6e-3), (torch.bfloat16, 1e-2)])
def test_micro_batches_add_up(
    problem: Problem, buffer: mega_moe.MoEBuffer, dtype: torch.dtype, tolerance: float
) -> None:
    """Six micro-batches of different T, up to three in flight at a time, into one pair of buffers.

    fp32 sums are as right as one gradient; six roundings of the sum to bf16 may add 4e-3.
    """
    sizes = (700, 1, 350, 64, 0, 511)
    weights = problem.requires_grad((False, False, True, True))
    into = (
        torch.zeros_like(problem.w_gate_up, dtype=dtype),
        torch.zeros_like(problem.w_down, dtype=dtype),
    )
    exact = [torch.zeros_like(own, dtype=torch.float64) for own in into]
    in_flight: list[tuple[Tensor, Tensor]] = []
    for at, tokens in enumerate((*sizes, None, None)):
        if tokens is not None:
            fresh = random_problem(700, 512, 384, 16, 4, seed=40 + at, device=problem.x.device)
            part = fresh.tokens(slice(0, tokens))
            inputs = (part.x, part.topk_idx, part.topk_weights, weights.w_gate_up, weights.w_down)
            in_flight.append((mega_moe.moe(*inputs, buffer=buffer, grad_buffers=into), part.dy))
            if tokens:
                found = fp64_moe_grads(part.dy, *inputs)
                for total, dw in zip(exact, found[3:]):
                    total.add_(dw)
        if at >= 2:
            y, dy = in_flight.pop(0)
            y.backward(dy)
    assert in_flight == []
    for own, want in zip(into, exact):
        assert relative_l2(own, want) <= tolerance
    for leaf in (weights.w_gate_up, weights.w_down):
        assert leaf.grad is not None  # so that hooks fire
        assert torch.count_nonzero(leaf.grad) == 0
    buffer.check()


def test_a_frozen_weights_buffer_is_left_alone(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    leaves = problem.requires_grad((True, True, True, False))
    into = (torch.zeros_like(problem.w_gate_up), torch.full_like(problem.w_down, 7.0))
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    assert bool((into[1] == 7).all())
    assert leaves.w_down.grad is None
    assert relative_l2(into[0], fp64_moe_grads(problem.dy, *problem.inputs).dw_gate_up) <= BF16_TOLERANCE


class Block(nn.Module):
    """A router and its experts between a norm and the residual sum."""

    def __init__(self, buffer: mega_moe.MoEBuffer, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(512, device=device)
        self.router = nn.Linear(512, 16, bias=False, device=device)
        self.experts = mega_moe.nn.MegaMoE(512, 384, 16, buffer=buffer, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, ids = self.router(rows).softmax(-1).topk(4)
        return x + self.experts(rows.bfloat16(), ids, weights / weights.sum(-1, keepdim=True)).float()


# The router's products are fp32 on purpose.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_the_surrounding_block_checkpointed_and_compiled(
    problem: Problem, buffer: mega_moe.MoEBuffer
) -> None:
    """Checkpointing runs each direction once and changes no bit; compiling rounds what is around the layer anew."""
    torch.manual_seed(0)
    block = Block(buffer, problem.x.device)
    parameters = list(block.parameters())
    x, dy = problem.x.float(), problem.dy.float()

    def gradients(run: nn.Module | object) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        with count_op_calls() as calls:
            got = torch.autograd.grad(run(leaf), [leaf, *parameters], dy)  # type: ignore[operator]
        assert calls == {"run": 1, "backward": 1}
        return list(got)

    want = gradients(block)
    again = gradients(lambda leaf: checkpoint(block, leaf, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(again, want))
    compiled = gradients(torch.compile(block, fullgraph=True))
    for got, exact in zip(compiled, want):
        # A router's logit that rounds otherwise may swap two nearly equal experts of a token: some tokens may differ.
        assert relative_l2(got, exact) <= 5e-2
