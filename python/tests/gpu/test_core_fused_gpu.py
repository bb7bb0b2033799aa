"""The fused backend through the public API: no wait, graphs, streams, faults at the next call, reserved SMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import mega_moe
from mega_moe.testing import Problem, fp64_moe_grads, random_problem, relative_l2

from ._waits import synchronising_is_an_error

# architecture: relative L2 of bf16 results against fp64 fed the same inputs.
BF16_TOLERANCE = 6e-3


@pytest.fixture
def problem(cuda_device: torch.device) -> Problem:
    return random_problem(700, 512, 256, 16, 4, masked=0.1, device=cuda_device)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[mega_moe.MoEBuffer]:
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused") as made:
        yield made


def call(problem: Problem, buffer: mega_moe.MoEBuffer) -> torch.Tensor:
    return mega_moe.moe(*problem.inputs, buffer=buffer)


def exact(problem: Problem) -> torch.Tensor:
    return fp64_moe_grads(problem.dy, *problem.inputs).y


def test_what_it_says_of_itself(buffer: mega_moe.MoEBuffer) -> None:
    assert (buffer.backend, buffer.router, buffer.router_reason) == ("fused", "kernel", None)
    assert buffer.reason == "fused"  # no note: both directions are kernels


def test_forward_never_waits(
    problem: Problem, buffer: mega_moe.MoEBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "0")
    call(problem, buffer)  # loads the kernel
    with synchronising_is_an_error():
        y = call(problem, buffer)
    assert relative_l2(y, exact(problem)) <= BF16_TOLERANCE


def test_memory_that_kernels_share_keeps_its_borders(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With canaries between all parts, which `check` and each call compare."""
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused") as buffer:
        got = call(problem, buffer)
        mega_moe.route(problem.topk_idx, buffer=buffer)
        assert torch.equal(got, call(problem, buffer))
        buffer.check()


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "w_gate_up", "w_down"])
def test_strides_and_addresses_do_not_matter(problem: Problem, buffer: mega_moe.MoEBuffer, name: str) -> None:
    value = getattr(problem, name)
    strided = torch.stack((value, value), dim=-1)[..., 0]
    flat = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
    shifted = flat[1:].view(value.shape).copy_(value)
    assert shifted.data_ptr() % 16
    want = call(problem, buffer)
    for other in (strided, shifted):
        inputs = [other if part is value else part for part in problem.inputs]
        assert torch.equal(mega_moe.moe(*inputs, buffer=buffer), want)


# CUDA graphs


def test_replays_equal_eager_calls(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """50 replays on new inputs between eager calls of another size on the same buffer."""
    static = [part.clone() for part in problem.inputs]
    other = random_problem(311, 512, 256, 16, 4, seed=9, device=problem.x.device)
    mega_moe.moe(*static, buffer=buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe.moe(*static, buffer=buffer)
    want_other = mega_moe.moe(*other.inputs, buffer=buffer)
    for seed in range(50):
        fresh = random_problem(
            700, 512, 256, 16, 4, masked=0.1 * (seed % 5), seed=seed, device=problem.x.device
        )
        for into, part in zip(static, fresh.inputs):
            into.copy_(part)
        graph.replay()
        assert torch.equal(y, call(fresh, buffer)), seed
        assert torch.equal(mega_moe.moe(*other.inputs, buffer=buffer), want_other), seed
    buffer.check()


def test_a_bad_id_in_a_replay_is_raised_by_what_comes_next(
    problem: Problem, buffer: mega_moe.MoEBuffer
) -> None:
    static = [part.clone() for part in problem.inputs]
    mega_moe.moe(*static, buffer=buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe.moe(*static, buffer=buffer)
    static[1][7, 2] = 16
    graph.replay()
    with pytest.raises(ValueError, match=r"topk_idx\[7, 2\]: got expert 16, want -1 or 0 to 15"):
        buffer.check()
    assert y.isnan().all()
    static[1].copy_(problem.topk_idx)
    graph.replay()
    buffer.check()
    assert relative_l2(y, exact(problem)) <= BF16_TOLERANCE


# Faults


@pytest.mark.parametrize("then", ["forward", "check", "backward"])
def test_a_bad_id(problem: Problem, buffer: mega_moe.MoEBuffer, then: str) -> None:
    """This call's outputs are NaN, what comes next raises, and the buffer stays usable."""
    wrong = problem.topk_idx.clone()
    wrong[7, 1] = 16
    leaves = problem.requires_grad()
    x, _, *rest = leaves.inputs
    y = mega_moe.moe(x, wrong, *rest, buffer=buffer)
    torch.cuda.synchronize()
    assert y.isnan().all()
    steps: dict[str, Callable[[], object]] = {
        "forward": lambda: call(problem, buffer),
        "check": buffer.check,
        "backward": lambda: y.backward(leaves.dy),
    }
    told = r"topk_idx\[7, 1\]: got expert 16, want -1 or 0 to 15"
    with pytest.raises(ValueError, match=told):
        steps[then]()
    if then == "backward":
        # It was launched all the same, since other ranks wait for it, and met the id again.
        with pytest.raises(ValueError, match=told):
            buffer.check()
    buffer.check()
    assert relative_l2(call(problem, buffer), exact(problem)) <= BF16_TOLERANCE


def test_a_bad_id_at_once_when_debugging(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_DEBUG", "1")
    x, ids, *rest = problem.inputs
    wrong = ids.clone()
    wrong[5, 3] = -9
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused") as buffer:
        with pytest.raises(ValueError, match=r"topk_idx\[5, 3\]: got expert -9, want -1 or 0 to 15"):
            mega_moe.moe(x, wrong, *rest, buffer=buffer)
        assert relative_l2(call(problem, buffer), exact(problem)) <= BF16_TOLERANCE


def test_more_tokens_than_the_buffer_holds(problem: Problem) -> None:
    sizes = {**problem.sizes, "max_tokens_per_rank": 699}
    with mega_moe.MoEBuffer(**sizes, backend="fused") as buffer:
        with pytest.raises(ValueError, match="x: got 700 tokens, the buffer was built for 699 per rank"):
            call(problem, buffer)
        call(problem.tokens(slice(0, 699)), buffer)
        buffer.check()


# Streams and SMs


def test_calls_of_two_streams_take_turns(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """Without an event of the caller's between them; and a backward alongside forwards of another stream."""
    other = random_problem(500, 512, 256, 16, 4, seed=5, device=problem.x.device)
    want, want_other = call(problem, buffer), call(other, buffer)
    leaves = problem.requires_grad()
    want_dx = torch.autograd.grad(call(leaves, buffer), leaves.x, leaves.dy)[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            got = call(leaves, buffer)
        with torch.cuda.stream(streams[1]):
            got_other = [call(other, buffer) for _ in range(5)]
        with torch.cuda.stream(streams[0]):
            dx = torch.autograd.grad(got, leaves.x, leaves.dy)[0]
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        assert torch.equal(dx, want_dx)
        assert all(torch.equal(y, want_other) for y in got_other)


def test_the_result_lives_on_the_callers_stream(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """Its memory may be handed out again only after what that stream still does with it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    want = call(problem, buffer)
    with torch.cuda.stream(side):
        kept = []
        for _ in range(10):
            y = call(problem, buffer)
            torch.cuda._sleep(1_000_000)
            kept.append(y + 0)
            del y
    side.synchronize()
    assert all(torch.equal(y, want) for y in kept)


@pytest.mark.parametrize("reserved", [16, 54, 130])
def test_reserved_sms_change_no_bit(problem: Problem, buffer: mega_moe.MoEBuffer, reserved: int) -> None:
    with mega_moe.MoEBuffer(**problem.sizes, backend="fused", num_reserved_sms=reserved) as smaller:
        assert torch.equal(call(problem, smaller), call(problem, buffer))


def test_too_few_sms_are_refused(problem: Problem) -> None:
    sms = torch.cuda.get_device_properties(problem.x.device).multi_processor_count
    with pytest.raises(mega_moe.BackendRefusedError, match=rf"leaves 1 of {sms} SMs, needs 2"):
        mega_moe.MoEBuffer(**problem.sizes, backend="fused", num_reserved_sms=sms - 1)


def test_another_stream_holds_an_sm(problem: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """For 0.5 s; the call waits for its SMs and is right."""
    side = torch.cuda.Stream()
    want = call(problem, buffer)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(900_000_000)
    got = call(problem, buffer)
    torch.cuda.synchronize()
    buffer.check()
    assert torch.equal(got, want)
