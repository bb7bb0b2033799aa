"""The rest of torch on the layer: partial backwards, compiled autograd, FLOP counters, and transforms it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

import mega_moe
from mega_moe.testing import count_op_calls, random_problem

from ._layer import both_paths

_ = both_paths  # a fixture

pytestmark = [  # torch on itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 64, 32, 24, 2
UNIT = TOKENS * TOP_K * HIDDEN * INNER


@pytest.fixture
def call() -> Callable[..., Any]:
    """The layer's call on leaves that need gradients, which it has as attributes."""
    problem = random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, dtype=torch.float32)
    x, ids, weights, w_gate_up, w_down = problem.inputs
    leaves = [t.clone().requires_grad_() for t in (x, weights, w_gate_up, w_down)]
    buffer = mega_moe.MoEBuffer(**problem.sizes, backend="grouped")

    def layer(x: Tensor = leaves[0], **options: Any) -> Tensor:
        return mega_moe.moe(x, ids, *leaves[1:], buffer=buffer, **options)

    layer.leaves = leaves  # type: ignore[attr-defined]
    return layer


def new_buffers(call: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(call.leaves[2]), torch.zeros_like(call.leaves[3])


def test_a_backward_for_x_alone_computes_no_weight_gradient(call: Any) -> None:
    into, (x, _, _, _) = new_buffers(call), call.leaves
    (want,) = torch.autograd.grad(call().square().sum(), [x])
    (got,) = torch.autograd.grad(call(grad_buffers=into).square().sum(), [x])
    assert torch.equal(got, want)
    assert not into[0].any()
    assert not into[1].any()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(call().square().sum(), [x])
    assert counter.get_total_flops() == (6 + 2 + 4) * UNIT


@pytest.mark.parametrize("inputs", [(0,), (2,), (3,), (1, 2), (0, 1, 2, 3)])
def test_a_backward_for_some_inputs_gives_what_a_whole_one_does(call: Any, inputs: tuple[int, ...]) -> None:
    call().square().sum().backward()
    whole = [leaf.grad for leaf in call.leaves]
    for leaf in call.leaves:
        leaf.grad = None
    call().square().sum().backward(inputs=[call.leaves[i] for i in inputs])
    for i, leaf in enumerate(call.leaves):
        assert (leaf.grad is not None) == (i in inputs)
        assert i not in inputs or torch.equal(leaf.grad, whole[i])


def test_input_gradients_first_and_weight_gradients_later_add_once(call: Any) -> None:
    """As the zero-bubble schedules of torch.distributed.pipelining split a stage's backward."""
    whole, split, (x, _, *weights) = new_buffers(call), new_buffers(call), call.leaves
    call(grad_buffers=whole).square().sum().backward()
    _, groups = stage_backward_input([call(grad_buffers=split).square().sum()], None, [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    for got, want in zip(split, whole):
        assert torch.allclose(got, want, rtol=1e-5)


def test_compiled_autograd(call: Any) -> None:
    call().square().sum().backward()
    want = [leaf.grad.clone() for leaf in call.leaves]
    for leaf in call.leaves:
        leaf.grad = None
    with compiled_autograd._enable(torch.compile(backend="eager")), count_op_calls() as calls:
        call().square().sum().backward()
    assert calls["backward"] == 1
    for leaf, gradient in zip(call.leaves, want):
        assert torch.equal(leaf.grad, gradient)


def test_a_flop_counter_sees_the_gemms(call: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        call()
        assert counter.get_total_flops() == 6 * UNIT
        call().square().sum().backward()
        call(grad_buffers=new_buffers(call)).square().sum().backward()
    assert counter.get_total_flops() == (6 + 2 * (6 + 12)) * UNIT


LATE = """
import sys, torch, mega_moe
buffer = mega_moe.MoEBuffer(None, num_experts=4, max_tokens_per_rank=8, top_k=2, hidden=64, intermediate=32,
                            dtype=torch.float32, device="cpu", backend="grouped")
experts = mega_moe.nn.MegaMoE(64, 32, 4, buffer=buffer)
inputs = torch.randn(8, 64), torch.randint(4, (8, 2)), torch.rand(8, 2)
experts(*inputs)
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    experts(*inputs)
print(counter.get_total_flops())
"""


def test_a_counter_that_is_imported_late_counts_and_nobody_else_imports_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 6 * 8 * 2 * 64 * 32


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "vmap"])
def test_transforms_of_torch_func_are_refused_by_name(call: Any, name: str) -> None:
    x = call.leaves[0].detach()
    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda x: call(x).sum())(x),
        "vjp": lambda: torch.func.vjp(call, x),
        "jvp": lambda: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
        "vmap": lambda: torch.func.vmap(call)(x[None]),
    }
    with pytest.raises(NotImplementedError, match=r"mega_moe\.moe: transforms of torch\.func"):
        transforms[name]()


def test_forward_mode_is_refused_by_name(call: Any) -> None:
    x = call.leaves[0].detach()
    with forward_ad.dual_level():
        call(x)  # no tangent in it
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=r"mega_moe\.moe: forward-mode"):
            call(dual)
