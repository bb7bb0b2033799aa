"""Which calls take plain nodes of autograd, and which the registered operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._ops import layer
from mega_moe.integrations import keep_moe_outputs
from mega_moe.testing import Gradients, Problem, count_op_calls, random_problem

from ._layer import assert_same_bits, make_buffer, results

pytestmark = [  # torch on itself
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.fixture
def problem() -> Problem:
    return random_problem(24, 64, 32, 4, 2, dtype=torch.float32)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "grouped") as made:
        yield made


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that did not go through an operator."""
    seen: list[str] = []
    forward = layer._forward

    def noted(*call: Any) -> Any:
        seen.append("forward")
        return forward(*call)

    monkeypatch.setattr(layer, "_forward", noted)
    return seen


class SeesDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_plain_call_takes_no_operator(
    problem: Problem, buffer: MoEBuffer, plain: list[str], mode: Any
) -> None:
    leaves = problem.requires_grad()
    with mode():
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    assert plain == ["forward"]
    if y.requires_grad:
        assert y.grad_fn.name() == "MoELayerBackward"
    x, ids, weights, *experts = problem.inputs
    mega_moe.moe(x, ids, weights, *map(nn.Parameter, experts), buffer=buffer)
    assert plain == ["forward", "forward"]


def test_hooks_take_two_nodes(problem: Problem, buffer: MoEBuffer, plain: list[str]) -> None:
    """So that checkpointing can stop between them."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = mega_moe.moe(*problem.requires_grad().inputs, buffer=buffer)
    assert plain == ["forward"]
    assert y.grad_fn.name() == "MoERunBackward"
    assert y.grad_fn.next_functions[0][0].name() == "MoESaveBackward"


@pytest.mark.parametrize(
    "mode",
    [
        SeesDispatch,
        SeesFunctions,
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("cpu"),
        lambda: compiled_autograd._enable(torch.compile(backend="eager")),
    ],
    ids=["dispatch", "function", "flops", "default device", "compiled autograd"],
)
def test_a_mode_sees_the_operators(problem: Problem, buffer: MoEBuffer, plain: list[str], mode: Any) -> None:
    want = results(problem, buffer)
    plain.clear()
    with mode():
        got = results(problem, buffer)
    assert plain == []
    assert_same_bits(got, want)


def test_a_mode_around_one_direction_sees_its_operator(problem: Problem, buffer: MoEBuffer) -> None:
    leaves = problem.requires_grad()
    with SeesDispatch() as forward:
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    y.backward(leaves.dy)
    assert "mega_moe.run.default" in forward.seen
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    with SeesDispatch() as backward:
        y.backward(leaves.dy)
    assert "mega_moe.backward.default" in backward.seen
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    with FlopCounterMode(display=False) as counter:
        y.backward(leaves.dy)
    assert counter.get_total_flops() == 12 * 24 * 2 * 64 * 32


def test_a_subclass_takes_the_operators(problem: Problem, buffer: MoEBuffer, plain: list[str]) -> None:
    x, *rest = problem.inputs
    y = mega_moe.moe(x.as_subclass(Subclass), *rest, buffer=buffer)
    assert plain == []
    assert torch.equal(y.as_subclass(Tensor), mega_moe.moe(x, *rest, buffer=buffer))


@pytest.mark.parametrize("tracer", ["make_fx", "jit", "compile", "fake"])
def test_tracers_record_the_operator(
    problem: Problem, buffer: MoEBuffer, plain: list[str], tracer: str
) -> None:
    def call(*inputs: Tensor) -> Tensor:
        return mega_moe.moe(*inputs, buffer=buffer)

    def fake() -> Tensor:
        with FakeTensorMode() as mode:
            inputs = [mode.from_tensor(t) for t in problem.inputs]
            call(*inputs)
        return call(*inputs)  # a class of tensors without its mode

    tracers: dict[str, Callable[[], Any]] = {
        "make_fx": lambda: make_fx(call)(*problem.inputs),
        "jit": lambda: torch.jit.trace(call, problem.inputs, check_trace=False),
        "compile": lambda: torch.compile(call, fullgraph=True)(*problem.inputs),
        "fake": fake,
    }
    made = tracers[tracer]()
    assert plain == []
    if tracer in ("make_fx", "jit"):
        assert "mega_moe" in str(made.graph)


def test_a_policy_keeps_outputs(problem: Problem, buffer: MoEBuffer, plain: list[str]) -> None:
    def squared(*inputs: Tensor) -> Tensor:
        return mega_moe.moe(*inputs, buffer=buffer).square()

    leaves = problem.requires_grad()
    with count_op_calls() as calls:
        kept = checkpoint(squared, *leaves.inputs, use_reentrant=False, context_fn=keep_moe_outputs())
        kept.backward(leaves.dy)
    assert calls == {"run": 1, "backward": 1}
    assert plain == []


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_compiled_autograd_around_the_backward_of_plain_nodes(
    problem: Problem, buffer: MoEBuffer, plain: list[str], hooks: Any
) -> None:
    want, leaves = results(problem, buffer), problem.requires_grad()
    with hooks():
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    assert plain == ["forward", "forward"]
    with count_op_calls() as calls, compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(leaves.dy)
    assert calls == {"backward": 1}
    assert_same_bits(Gradients(y.detach(), *leaves.grads()), want)  # type: ignore[arg-type]
