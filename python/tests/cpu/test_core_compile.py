"""The operators under torch.library.opcheck and torch.compile: fakes, dynamic shapes, side effects, values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor
from torch.testing._internal.optests.generate_tests import OpCheckError

import mega_moe
from mega_moe import Activation, MoEBuffer
from mega_moe.nn import MegaMoE
from mega_moe.testing import Gradients, Problem, count_op_calls, random_problem

from ._layer import assert_close, assert_same_bits, exact, make_buffer, results

# torch.compile itself uses a deprecated name of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

ops = torch.ops.mega_moe
NO_CLAMP = Activation().arguments()
CLAMP = Activation(clamp=2.0).arguments()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def problem() -> Problem:
    # No two extents are equal: the compiler takes equal ones for the same symbol.
    return random_problem(131, 64, 48, 4, 2, dtype=torch.bfloat16, masked=0.1)


@pytest.fixture(params=["reference", "grouped", "dispatched"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def buffer(problem: Problem, backend: str) -> Iterator[MoEBuffer]:
    with make_buffer(problem, backend, max_tokens_per_rank=200) as made:
        yield made


def train(function: Callable[..., Tensor], problem: Problem) -> Gradients:
    leaves = problem.requires_grad()
    y = function(*leaves.inputs)
    y.backward(leaves.dy)
    return Gradients(y.detach(), *leaves.grads())  # type: ignore[arg-type]


def into(problem: Problem, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(problem.w_gate_up, dtype=dtype), torch.zeros_like(problem.w_down, dtype=dtype)


def arguments(name: str, problem: Problem, buffer: MoEBuffer) -> list[tuple[Any, ...]]:
    """Calls of one operator that differ in what its fake and its schema could get wrong."""
    leaves = problem.requires_grad()
    turned = problem.x.T.contiguous().T
    none = problem.tokens(slice(0, 0))
    token = ops.save(*problem.inputs, None, None, buffer._live().handle, *NO_CLAMP)
    if name == "save":
        return [
            (*leaves.inputs, None, None, buffer._live().handle, *NO_CLAMP),
            (*leaves.inputs, *into(problem), buffer._live().handle, *CLAMP),
            (*none.requires_grad().inputs, None, None, buffer._live().handle, *NO_CLAMP),
        ]
    if name == "run":
        return [
            (token.clone().requires_grad_(), *leaves.inputs, buffer._live().handle, *CLAMP),
            (token, turned, *problem.inputs[1:], buffer._live().handle, *NO_CLAMP),
            (token[:0], *none.inputs, buffer._live().handle, *NO_CLAMP),
        ]
    if name == "backward":
        return [
            (problem.dy, *problem.inputs, buffer._live().handle, *NO_CLAMP, [True] * 4, None),
            (
                problem.dy,
                turned,
                *problem.inputs[1:],
                buffer._live().handle,
                *CLAMP,
                [True, False, False, True],
                None,
            ),
            (problem.dy, *problem.inputs, buffer._live().handle, *NO_CLAMP, [False, True, True, False], None),
            (none.dy, *none.inputs, buffer._live().handle, *NO_CLAMP, [True] * 4, None),
        ]
    if name == "run_out":
        received = torch.zeros(len(problem.w_down), dtype=torch.int32)
        return [
            (*problem.inputs, torch.empty_like(problem.x), received, buffer._live().handle, *CLAMP),
            (*none.inputs, torch.empty_like(none.x), None, buffer._live().handle, *NO_CLAMP),
        ]
    if name == "backward_out":
        return [
            (
                own.dy,
                *own.inputs,
                torch.empty_like(own.x),
                torch.empty_like(own.topk_weights),
                *into(own),
                buffer._live().handle,
                *CLAMP,
            )
            for own in (problem, none)
        ]
    return [
        (problem.dy, *problem.inputs, *into(problem), buffer._live().handle, *NO_CLAMP, [True] * 4, None),
        (
            problem.dy,
            *problem.inputs,
            *into(problem, torch.bfloat16),
            buffer._live().handle,
            *NO_CLAMP,
            [False, True, True, False],
            None,
        ),
    ]


@pytest.mark.parametrize("name", ["save", "run", "run_out", "backward", "backward_into", "backward_out"])
def test_opcheck(name: str, problem: Problem, buffer: MoEBuffer) -> None:
    for call in arguments(name, problem, buffer):
        torch.library.opcheck(getattr(ops, name).default, call)


def test_opcheck_can_fail(problem: Problem, buffer: MoEBuffer) -> None:
    with torch.library._scoped_library("mega_moe_test", "FRAGMENT") as library:
        library.define("run(Tensor x) -> Tensor")
        library.impl("run", lambda x: x.float(), "CompositeExplicitAutograd")
        torch.library.register_fake("mega_moe_test::run", torch.empty_like, lib=library)
        with pytest.raises(OpCheckError):
            torch.library.opcheck(torch.ops.mega_moe_test.run.default, (problem.x,))


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "marked"])
def test_any_number_of_tokens_in_one_graph(problem: Problem, buffer: MoEBuffer, dynamic: bool | None) -> None:
    def layer(*inputs: Tensor) -> Tensor:
        return mega_moe.moe(*inputs, buffer=buffer)

    graphs = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=graphs)
    for tokens in (128, 0, 131):
        part = problem.tokens(slice(0, tokens))
        leaves = part.requires_grad()
        if dynamic is None:
            for tensor in leaves.inputs[:3]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with count_op_calls() as calls:
            y = compiled(*leaves.inputs)
            y.backward(leaves.dy)
        assert calls == {"run": 1, "backward": 1}
        assert_same_bits(Gradients(y, *leaves.grads()), results(part, buffer))  # type: ignore[arg-type]
    assert graphs.frame_count <= 2  # T = 0 is a graph of its own, as every extent of 0 or 1 is


def test_a_module_with_what_surrounds_it(problem: Problem, buffer: MoEBuffer) -> None:
    experts = MegaMoE(64, 48, 4, buffer=buffer)
    router = torch.nn.Linear(64, 4)

    def block(x: Tensor) -> Tensor:
        weights, ids = router(x).softmax(-1).topk(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + experts(torch.nn.functional.rms_norm(x, (64,)), ids, weights)

    x = problem.x.float().view(131, 1, 64)
    found = []
    for function in (block, torch.compile(block, fullgraph=True)):
        for parameter in (*experts.parameters(), *router.parameters()):
            parameter.grad = None
        y = function(x)
        y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in (*experts.parameters(), *router.parameters()))])
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))


def test_gradient_buffers(problem: Problem, buffer: MoEBuffer) -> None:
    def layer(x: Tensor, ids: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        return mega_moe.moe(x, ids, weights, *rest[:2], buffer=buffer, grad_buffers=rest[2:])  # type: ignore[arg-type]

    compiled = torch.compile(layer, fullgraph=True)
    sums = []
    for function in (layer, compiled):
        buffers = into(problem)
        for seed in range(2):
            batch = random_problem(131, 64, 48, 4, 2, seed=seed)
            leaves = batch.requires_grad()
            function(*leaves.inputs, *buffers).backward(leaves.dy)
            for weight in (leaves.w_gate_up, leaves.w_down):
                assert weight.grad is not None
                assert torch.count_nonzero(weight.grad) == 0
        sums.append(buffers)
    for eager, got in zip(*sums):
        assert torch.count_nonzero(got) > 0
        assert torch.equal(got, eager)


def test_gradient_buffers_of_a_closure(problem: Problem, buffer: MoEBuffer) -> None:
    buffers = into(problem)
    compiled = torch.compile(
        lambda *inputs: mega_moe.moe(*inputs, buffer=buffer, grad_buffers=buffers), fullgraph=True
    )
    got = train(compiled, problem)._replace(dw_gate_up=buffers[0], dw_down=buffers[1])
    assert_close(got, exact(problem), 6e-3)


@pytest.mark.parametrize("training", [False, True])
def test_a_call_whose_result_is_unused_stays(problem: Problem, buffer: MoEBuffer, training: bool) -> None:
    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        mega_moe.moe(x, *rest, buffer=buffer)  # the other ranks make this call too
        return x + 1

    compiled = torch.compile(layer, fullgraph=True)
    leaves = problem.requires_grad((training,) * 4)
    with count_op_calls() as calls:
        compiled(*leaves.inputs)
    assert calls == {"run": 1}


def test_another_buffer_is_another_graph(problem: Problem, buffer: MoEBuffer, backend: str) -> None:
    compiled = torch.compile(lambda b, *inputs: mega_moe.moe(*inputs, buffer=b), fullgraph=True)
    want = mega_moe.moe(*problem.inputs, buffer=buffer)
    assert torch.equal(compiled(buffer, *problem.inputs), want)
    with make_buffer(problem, backend) as second:
        assert torch.equal(compiled(second, *problem.inputs), want)
    with pytest.raises(Exception, match="this MoEBuffer was destroyed"):
        compiled(second, *problem.inputs)
    assert torch.equal(compiled(buffer, *problem.inputs), want)


def test_a_bad_argument_is_named(problem: Problem, buffer: MoEBuffer) -> None:
    compiled = torch.compile(lambda *inputs: mega_moe.moe(*inputs, buffer=buffer), fullgraph=True)
    with pytest.raises(Exception, match=r"topk_idx: got torch.int16, want one of int32, int64"):
        compiled(problem.x, problem.topk_idx.short(), *problem.inputs[2:])
    too_many = random_problem(201, 64, 48, 4, 2)
    with pytest.raises(Exception, match=r"x: got .* tokens, the buffer was built for 200 per rank"):
        compiled(*too_many.inputs)
