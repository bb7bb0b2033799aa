"""The fused backend around its kernel, which a fake stands in for: arguments, order, faults, both directions."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe import MegaMoEError, MoEBuffer, PeerError, RankTimeoutError
from mega_moe._backends.choice import explanation as choice
from mega_moe._backends.fused import faults
from mega_moe._backends.fused.executor import FusedExecutor
from mega_moe._base.activation import SWIGLU
from mega_moe._base.layer import Gradients, LayerInputs, Needs
from mega_moe.testing import Problem, count_op_calls, random_problem

from ._fake_kernels import NOTE, FakeKernels, fake_kernels
from ._layer import assert_close, assert_same_bits, exact, make_buffer, results

_ = fake_kernels  # a fixture

TOLERANCE = 6e-3


@pytest.fixture
def problem() -> Problem:
    return random_problem(60, 256, 128, 8, 3, masked=0.1)


@pytest.fixture
def buffer(fake_kernels: FakeKernels, problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "fused") as made:
        yield made


def call(problem: Problem, buffer: MoEBuffer, **changes: Any) -> torch.Tensor:
    return mega_moe.moe(*problem.inputs, buffer=buffer, **changes)


def test_what_a_buffer_says_of_itself(buffer: MoEBuffer) -> None:
    assert (buffer.backend, buffer.router) == ("fused", "kernel")
    assert buffer.reason == f"fused; {NOTE}"
    assert f"fused: accepted; {NOTE}" in str(buffer.explanation)
    assert buffer.explanation.as_dict()["verdicts"][0]["note"] == NOTE
    assert buffer.dtypes == (torch.bfloat16,)


def test_both_directions(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    assert_close(results(problem, buffer), exact(problem), TOLERANCE)
    with make_buffer(problem, "reference") as reference, make_buffer(problem, "grouped") as grouped:
        # A clamp's gradient turns on one rounding: bits of the same arithmetic, not fp64.
        want = results(problem, grouped, 0.5)._replace(y=results(problem, reference, 0.5).y)
    assert_same_bits(results(problem, buffer, 0.5), want)
    assert [launch.op for launch in fake_kernels.launches] == ["forward", "forward"]
    assert [launch.clamp for launch in fake_kernels.launches] == [None, 0.5]
    assert all(launch.in_order for launch in fake_kernels.launches)


def test_forward_does_not_wait(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    before = fake_kernels.synchronized
    for _ in range(3):
        call(problem, buffer)
    assert fake_kernels.synchronized == before
    buffer.check()
    assert fake_kernels.synchronized == before + 1


def test_no_tokens_are_launched_too(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    got = results(problem.tokens(slice(0, 0)), buffer)
    assert got.y.shape == got.dx.shape == (0, 256)
    assert torch.count_nonzero(got.dw_gate_up) == 0
    assert [(launch.op, launch.tokens) for launch in fake_kernels.launches] == [("forward", 0)]


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "w_gate_up", "w_down"])
@pytest.mark.parametrize("kind", ["strided", "not aligned"])
def test_inputs_of_any_strides_and_addresses(
    problem: Problem, buffer: MoEBuffer, name: str, kind: str
) -> None:
    value = getattr(problem, name)
    if kind == "strided":
        other = torch.stack((value, value), dim=-1)[..., 0]
        assert not other.is_contiguous()
    else:
        flat = torch.empty(value.numel() + 1, dtype=value.dtype)
        other = flat[1:].view(value.shape).copy_(value)
        assert other.data_ptr() % 16
    inputs = [other if part is value else part for part in problem.inputs]
    # The fake refuses what the kernel's copies could not read.
    assert torch.equal(mega_moe.moe(*inputs, buffer=buffer), call(problem, buffer))


def test_int32_and_bf16_routing(problem: Problem, buffer: MoEBuffer) -> None:
    x, ids, weights, *experts = problem.inputs
    narrow = mega_moe.moe(x, ids.int(), weights.bfloat16(), *experts, buffer=buffer)
    wide = mega_moe.moe(x, ids, weights.bfloat16().float(), *experts, buffer=buffer)
    assert torch.equal(narrow, wide)


def test_other_dtypes_are_refused(buffer: MoEBuffer) -> None:
    other = random_problem(8, 256, 128, 8, 3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"x: got torch.float32, want one of bfloat16 \(backend fused\)"):
        call(other, buffer)


def test_route_and_forward_share_one_rank(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels
) -> None:
    fake_kernels.report(faults.BAD_ID, index=7, seen=99, wanted=8)
    call(problem, buffer)
    with pytest.raises(ValueError, match=r"topk_idx\[2, 1\]: got expert 99, want -1 or 0 to 7"):
        mega_moe.route(problem.topk_idx, buffer=buffer)
    assert [launch.op for launch in fake_kernels.launches] == ["forward", "route"]


# Faults that the device reports


@pytest.mark.parametrize("then", ["call", "check", "backward", "route"])
def test_a_bad_id_is_raised_by_what_comes_next(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels, then: str
) -> None:
    fake_kernels.report(faults.BAD_ID, index=4, seen=8, wanted=8)
    leaves = problem.requires_grad()
    y = call(leaves, buffer)
    steps = {
        "call": lambda: call(problem, buffer),
        "check": buffer.check,
        "backward": lambda: y.backward(leaves.dy),
        "route": lambda: mega_moe.route(problem.topk_idx, buffer=buffer),
    }
    with pytest.raises(ValueError, match=r"topk_idx\[1, 1\]: got expert 8, want -1 or 0 to 7 \(call 1"):
        steps[then]()
    # Raised once, and the call that raised it was made all the same: the other ranks were waiting for it.
    assert len(fake_kernels.launches) == (2 if then in ("call", "route") else 1)
    assert_close(results(problem, buffer), exact(problem), TOLERANCE)


def test_a_bad_id_at_once_when_debugging(
    problem: Problem, fake_kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    with make_buffer(problem, "fused") as buffer:
        fake_kernels.report(faults.BAD_ID, index=0, seen=-2, wanted=8)
        with pytest.raises(ValueError, match=r"topk_idx\[0, 0\]: got expert -2"):
            call(problem, buffer)
        # A capture must not wait: the record is read by what comes after.
        fake_kernels.capturing = True
        fake_kernels.report(faults.BAD_ID, index=0, seen=-3, wanted=8)
        call(problem, buffer)
        fake_kernels.capturing = False
        with pytest.raises(ValueError, match="got expert -3"):
            buffer.check()


def test_a_refusal_of_another_rank(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    fake_kernels.report(faults.REFUSED, role=faults.HEADER, index=1, seen=100, wanted=60)
    call(problem, buffer)
    with pytest.raises(PeerError, match="call 1 of this buffer was refused by rank 1: it had 100 tokens"):
        buffer.check()
    assert_close(results(problem, buffer), exact(problem), TOLERANCE)


def test_a_lost_rank_ends_the_buffer(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    leaves = problem.requires_grad()
    fake_kernels.report(faults.PROGRESS, role=faults.OWNER_SUM, index=5, seen=0, wanted=1)
    y = call(leaves, buffer)
    with pytest.raises(RankTimeoutError, match=r"combine in call 1 .* own token 5"):
        y.backward(leaves.dy)
    for step in (lambda: call(problem, buffer), buffer.check, lambda: call(leaves, buffer)):
        with pytest.raises(MegaMoEError, match="lost one another earlier"):
            step()
    assert len(fake_kernels.launches) == 1


# Refusals of this rank


class Told:
    """A backward that notes what the other ranks are told."""

    dtypes = (torch.bfloat16,)

    def __init__(self) -> None:
        self.refused: list[Exception] = []

    def refuse(self, error: Exception, num_tokens: int) -> None:
        self.refused.append(error)

    def backward(self, *call: Any, into: Any = None, out: Any = None) -> Any:
        return Gradients()


def backward(executor: FusedExecutor, problem: Problem) -> Any:
    return executor.backward(problem.dy, LayerInputs(*problem.inputs), SWIGLU, Needs(), torch.bfloat16)


def test_ranks_that_come_to_the_backward_are_told_of_a_bad_id_alone(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels
) -> None:
    """A refusal is known to all ranks, and the one that refused does not come: waiting for it would be in vain."""
    told = Told()
    executor = FusedExecutor(buffer._live().executor._kernels, told)  # type: ignore[attr-defined, arg-type]
    fake_kernels.report(faults.REFUSED, role=faults.HEADER, index=1, seen=1, wanted=60)
    call(problem, buffer)
    with pytest.raises(PeerError, match="refused by rank 1"):
        backward(executor, problem)
    assert told.refused == []
    fake_kernels.report(faults.BAD_ID, seen=9, wanted=8)
    call(problem, buffer)
    with pytest.raises(ValueError, match="got expert 9") as caught:
        backward(executor, problem)
    assert told.refused == [caught.value]
    assert backward(executor, problem) == Gradients()


def test_too_many_tokens(problem: Problem, fake_kernels: FakeKernels) -> None:
    small = {**problem.sizes, "max_tokens_per_rank": 59}
    with MoEBuffer(**small, backend="fused") as buffer:
        with pytest.raises(ValueError, match="x: got 60 tokens, the buffer was built for 59 per rank"):
            call(problem, buffer)
        assert fake_kernels.launches == []  # one rank: nobody to tell
        call(problem.tokens(slice(0, 59)), buffer)


@pytest.mark.parametrize(("tokens", "told"), [(70, 70), (5, 1)])
def test_the_others_are_told_of_a_refusal(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels, tokens: int, told: int
) -> None:
    kernels = buffer._live().executor._kernels  # type: ignore[attr-defined]
    kernels.shape = dataclasses.replace(kernels.shape, num_ranks=2)
    kernels._symmetric = dataclasses.replace(kernels._symmetric, addresses=[256, 512])
    many = torch.zeros(tokens, 256 if tokens > 60 else 255, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x: got"):
        mega_moe.moe(many, *random_problem(tokens, 256, 128, 8, 3).inputs[1:], buffer=buffer)
    assert [(launch.op, launch.tokens) for launch in fake_kernels.launches] == [("refuse", told)]
    assert fake_kernels.launches[0].in_order


def test_a_compiled_call_with_too_many_tokens(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels
) -> None:
    """The operator sees T for the first time."""
    many = random_problem(61, 256, 128, 8, 3)
    with pytest.raises(ValueError, match="x: got 61 tokens, the buffer was built for 60 per rank"):
        torch.ops.mega_moe.run(many.x, *many.inputs, buffer._live().handle, *SWIGLU.arguments())


def test_a_backward_is_not_captured(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    leaves = problem.requires_grad()
    fake_kernels.capturing = True
    y = call(leaves, buffer)
    with pytest.raises(MegaMoEError, match=r"backward of this version's fused backend .* its forward can"):
        y.backward(leaves.dy)


# The contract that all backends share


def test_checkpointing_runs_the_forward_once(
    problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels
) -> None:
    leaves = problem.requires_grad()

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + mega_moe.moe(torch.tanh(x), *leaves.inputs[1:], buffer=buffer)

    want = torch.autograd.grad(block(leaves.x), leaves.x, leaves.dy)[0]
    fake_kernels.launches.clear()
    with count_op_calls() as calls:
        y = checkpoint(block, leaves.x, use_reentrant=False)
        got = torch.autograd.grad(y, leaves.x, leaves.dy)[0]
    assert calls == {"run": 1, "backward": 1}
    assert len(fake_kernels.launches) == 1
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled(problem: Problem, buffer: MoEBuffer, fake_kernels: FakeKernels) -> None:
    compiled = torch.compile(lambda *inputs: mega_moe.moe(*inputs, buffer=buffer), fullgraph=True)
    leaves = problem.requires_grad()
    y = compiled(*leaves.inputs)
    y.backward(leaves.dy)
    want = results(problem, buffer)
    got = type(want)(y.detach(), *leaves.grads())
    assert_same_bits(got, want)


def test_autocast(problem: Problem, buffer: MoEBuffer) -> None:
    """The module casts, the function refuses."""
    layer = mega_moe.nn.MegaMoE(256, 128, 8, buffer=buffer, dtype=torch.float32)
    x = problem.x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x, problem.topk_idx, problem.topk_weights).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"x: got torch\.float32"):
            mega_moe.moe(x, *problem.inputs[1:], buffer=buffer)


def test_all_masked_and_nan_weights(problem: Problem, buffer: MoEBuffer) -> None:
    x, ids, weights, *experts = problem.inputs
    ids = ids.clone()
    ids[3] = -1
    poisoned = weights.masked_fill(ids == -1, float("nan"))
    y = mega_moe.moe(x, ids, poisoned, *experts, buffer=buffer)
    assert torch.equal(y, mega_moe.moe(x, ids, weights, *experts, buffer=buffer))
    assert torch.count_nonzero(y[3]) == 0


def test_destroyed(problem: Problem, fake_kernels: FakeKernels) -> None:
    buffer = make_buffer(problem, "fused")
    before = fake_kernels.synchronized
    buffer.destroy()
    assert fake_kernels.synchronized > before  # nothing may still write into what is given back
    with pytest.raises(MegaMoEError, match="destroyed"):
        call(problem, buffer)


def test_a_slow_backward_is_warned_of(
    fake_kernels: FakeKernels, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is a kernel, and the rest is emulated: nobody should have to find out by the clock."""
    monkeypatch.setattr(choice, "_warned", set())
    with (
        pytest.warns(mega_moe.FallbackWarning, match=f"mega_moe uses the backend fused; {NOTE}"),
        make_buffer(problem, "auto", "fp8_bwd"),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_buffer(problem, "auto", "bf16").destroy()


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_fp8_is_the_references_where_a_kernel_is_missing(
    fake_kernels: FakeKernels, problem: Problem, precision: str
) -> None:
    with (
        make_buffer(problem, "fused", precision) as fused,
        make_buffer(problem, "reference", precision) as plain,
    ):
        assert_same_bits(results(problem, fused, 0.5), results(problem, plain, 0.5))
    forward = "forward fp8" if precision == "fp8" else "forward"
    assert [launch.op for launch in fake_kernels.launches] == [forward]
