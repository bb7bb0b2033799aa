"""A trainer that knows DeepGEMM's calls alone: its experts are custom operators, eager, compiled and checkpointed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mega_moe
from mega_moe import MoEBuffer
from mega_moe import deep_gemm as face
from mega_moe._ops.layer import CALLS
from mega_moe.testing import fp64_moe_grads, random_problem, relative_l2

pytestmark = pytest.mark.filterwarnings("ignore::mega_moe.FallbackWarning")

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 48, 64, 32, 8, 2
BUFFERS: dict[int, Any] = {}


def stage(key: int, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
    buffer = BUFFERS[key]
    for view, rows in ((buffer.x, x), (buffer.topk_idx, ids), (buffer.topk_weights, weights)):
        view[: len(rows)].copy_(rows)
    return buffer


@torch.library.custom_op("a_trainer::experts", mutates_args=())
def experts(x: Tensor, ids: Tensor, weights: Tensor, l1: Tensor, l2: Tensor, key: int) -> Tensor:
    deep_gemm = importlib.import_module("deep_gemm")
    y = torch.empty_like(x)
    deep_gemm.bf16_mega_moe(
        y, l1, l2, stage(key, x, ids, weights), activation_clamp=None, l1_natural_layout=True
    )
    return y


@experts.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("a_trainer::experts_backward", mutates_args=())
def experts_backward(
    dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, l1: Tensor, l2: Tensor, key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    deep_gemm = importlib.import_module("deep_gemm")
    dx, dw1, dw2, dtopk = (torch.empty_like(t) for t in (x, l1, l2, weights))
    buffer = stage(key, x, ids, weights)
    deep_gemm.bf16_mega_moe_backward(
        dx, dw1, dw2, dtopk, dy, l1, l2, buffer, dw_natural_layout=True, l1_natural_layout=True
    )
    return dx, dtopk, dw1, dw2


@experts_backward.register_fake
def _(dy: Tensor, x: Tensor, ids: Tensor, weights: Tensor, l1: Tensor, l2: Tensor, key: int) -> Any:
    return tuple(torch.empty_like(t) for t in (x, weights, l1, l2))


def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.key = inputs
    ctx.save_for_backward(*tensors)


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dtopk, dw1, dw2 = experts_backward(dy.contiguous(), *ctx.saved_tensors, ctx.key)
    return dx, None, dtopk, dw1, dw2, None


experts.register_autograd(gradients, setup_context=setup)


class Layer(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)
        deep_gemm = importlib.import_module("deep_gemm")
        self.key = id(self)
        BUFFERS[self.key] = deep_gemm.get_symm_buffer_for_mega_moe(
            None, EXPERTS, 64, TOP_K, HIDDEN, INNER, mma_type="bf16xbf16"
        )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts(x, ids, weights, self.gate_up, self.down, self.key)


@pytest.fixture
def installed() -> Iterator[None]:
    face.install()
    yield
    for buffer in BUFFERS.values():
        buffer.destroy()
    BUFFERS.clear()
    face.uninstall()
    torch._dynamo.reset()


def save_experts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.a_trainer.experts.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(layer: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False, **options)


compiled = functools.partial(torch.compile, fullgraph=True)
saving = functools.partial(create_selective_checkpoint_contexts, save_experts)

# How the trainer runs its layer, and how often the layer's forward then runs: a compiler that sees the checkpoint knows
# that no gradient needs y again.
WAYS: dict[str, tuple[Callable[[nn.Module], Callable[..., Tensor]], int]] = {
    "eager": (lambda layer: layer, 1),
    "compiled": (compiled, 1),
    "checkpointed": (checkpointed, 2),
    "selectively": (functools.partial(checkpointed, context_fn=saving), 1),
    "compiled inside": (lambda layer: checkpointed(compiled(layer)), 2),
    "compiled around": (lambda layer: compiled(checkpointed(layer)), 1),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_against_fp64(way: str) -> None:
    problem = random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, masked=0.1)
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    layer = Layer(problem.w_gate_up, problem.w_down)
    run, forwards = WAYS[way]
    call = run(layer)
    x, weights = (t.clone().requires_grad_() for t in (problem.x, problem.topk_weights))
    for _ in range(2):  # and again with the buffer and the graph of the first
        x.grad = weights.grad = None
        layer.zero_grad()
        CALLS.clear()
        y = call(x, problem.topk_idx, weights)
        y.backward(problem.dy)
        assert dict(CALLS) == {"run": forwards, "backward": 1}
        for got, exact in (
            (y, want.y),
            (x.grad, want.dx),
            (weights.grad, want.dtopk),
            (layer.gate_up.grad, want.dw_gate_up),
            (layer.down.grad, want.dw_down),
        ):
            assert got is not None
            assert relative_l2(got.detach(), exact) < 6e-3


@pytest.mark.usefixtures("installed")
def test_the_calls_themselves_compile() -> None:
    """In one graph, without an operator of the trainer's around them."""
    problem = random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K)
    layer = Layer(problem.w_gate_up, problem.w_down)
    stage(layer.key, *problem.inputs[:3])
    buffer = BUFFERS[layer.key]

    def both(dy: Tensor, l1: Tensor, l2: Tensor) -> tuple[Tensor, ...]:
        y, dx = torch.empty_like(dy), torch.empty_like(dy)
        dtopk, stats = torch.empty(TOKENS, TOP_K), torch.zeros(EXPERTS, dtype=torch.int32)
        dw1, dw2 = torch.empty_like(l1), torch.empty_like(l2)
        face.bf16_mega_moe(y, l1, l2, buffer, cumulative_local_expert_recv_stats=stats)
        face.bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, l1, l2, buffer)
        return y, dx, dtopk, dw1, dw2, stats

    *got, stats = compiled(both)(problem.dy, problem.w_gate_up, problem.w_down)
    for value, exact in zip(got, fp64_moe_grads(problem.dy, *problem.inputs), strict=True):
        assert relative_l2(value, exact) < 6e-3
    assert stats.tolist() == torch.bincount(problem.topk_idx.flatten(), minlength=EXPERTS).tolist()


def test_flops_are_those_of_the_layer() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    problem = random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K)
    with MoEBuffer(**problem.sizes, backend="grouped") as buffer, FlopCounterMode(display=False) as want:
        leaves = problem.requires_grad()
        mega_moe.moe(*leaves.inputs, buffer=buffer).backward(problem.dy)
    own = face.get_symm_buffer_for_mega_moe(None, EXPERTS, 64, TOP_K, HIDDEN, INNER, mma_type="bf16xbf16")
    weights = problem.w_gate_up, problem.w_down
    results = [torch.empty_like(t) for t in (problem.x, *weights, problem.topk_weights)]
    with FlopCounterMode(display=False) as got:
        face.bf16_mega_moe(torch.empty_like(problem.x), *weights, own)
        face.bf16_mega_moe_backward(*results, problem.dy, *weights, own)  # type: ignore[call-arg]
    assert got.get_total_flops() == want.get_total_flops() > 0
    own.destroy()
