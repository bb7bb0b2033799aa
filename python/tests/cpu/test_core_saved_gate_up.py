"""Gate and up kept from forward to backward, with a fake for the kernels: when, how much, and for which call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.layer import KernelLayer
from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.fused.rows import SavedRows, pool_rows
from mega_moe._base.activation import SWIGLU, Activation
from mega_moe.testing import Problem, count_op_calls, random_problem
from mega_moe.testing.tables import plain_tables

from ._fake_kernels import FakeKernels, fake_both, fake_kernels
from ._layer import assert_close, assert_same_bits, exact, make_buffer, results

_ = fake_both, fake_kernels  # fixtures

# torch.compile itself uses a deprecated name of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

TOLERANCE = 6e-3
TOKENS, EXPERTS, TOP_K = 60, 8, 3
# One chunk: all rows, and for each expert as many as it may pad.
SLOTS = 256 + 128 * EXPERTS


@pytest.fixture
def problem() -> Problem:
    return random_problem(TOKENS, 256, 128, EXPERTS, TOP_K, masked=0.1)


@pytest.fixture
def buffer(fake_both: FakeKernels, problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "fused", save_gate_up=1) as made:
        yield made


def saved(fake: FakeKernels) -> list[tuple[str, int]]:
    return [(launch.op, launch.saved_rows) for launch in fake.launches]


def test_one_tensor_goes_from_forward_to_backward(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    assert buffer.save_gate_up == 1
    assert buffer._live().saved_rows.slots(TOKENS) == SLOTS
    assert buffer.saved_nbytes(TOKENS) == SLOTS * 2 * 128 * 2
    before = fake_both.synchronized
    with count_op_calls() as calls:
        got = results(problem, buffer)
    assert calls == {"run_saving": 1, "backward": 1}
    assert_close(got, exact(problem), TOLERANCE)
    assert saved(fake_both) == [("forward", SLOTS), ("backward", SLOTS)]
    assert fake_both.synchronized == before
    with make_buffer(problem, "fused") as plain:
        assert_same_bits(got, results(problem, plain))
    assert saved(fake_both)[2:] == [("forward", 0), ("backward", 0)]


class NoGradient(torch.autograd.Function):
    """Uses y, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def test_a_y_without_a_gradient_is_one_of_zeros(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    """As without the option: the other ranks' backwards wait for this one's."""
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    (NoGradient.apply(y) + leaves.x.sum()).backward()
    assert [launch.op for launch in fake_both.launches] == ["forward", "backward"]
    assert torch.equal(leaves.x.grad, torch.ones_like(leaves.x))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_memory_for_a_call_is_told_to_the_other_ranks(
    problem: Problem, buffer: MoEBuffer, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(KernelRank, "refuse", lambda self, tokens: told.append(tokens))
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(KernelLayer, direction, full)
    steps: dict[str, Callable[[], object]] = {
        "forward": lambda: mega_moe.moe(*leaves.inputs, buffer=buffer),
        "backward": lambda: y.backward(leaves.dy),
    }
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        steps[direction]()
    assert told == [0]


def test_nothing_is_kept_without_gradients(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels
) -> None:
    mega_moe.moe(*problem.inputs, buffer=buffer)
    leaves = problem.requires_grad()
    with torch.no_grad():
        mega_moe.moe(*leaves.inputs, buffer=buffer)
    with torch.inference_mode():
        mega_moe.moe(*problem.inputs, buffer=buffer)
    assert saved(fake_both) == [("forward", 0)] * 3


@pytest.mark.parametrize("which", range(4))
def test_any_gradient_is_a_reason_to_keep_it(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels, which: int
) -> None:
    x, ids, weights, *experts = (value.clone() for value in problem.inputs)
    tensors = (x, weights, *experts)
    tensors[which].requires_grad_()
    mega_moe.moe(x, ids, weights, *experts, buffer=buffer).backward(problem.dy)
    assert saved(fake_both) == [("forward", SLOTS), ("backward", SLOTS)]
    assert fake_both.needs == [tuple(i == which for i in range(4))]
    assert [t.grad is not None for t in tensors] == [i == which for i in range(4)]


@pytest.mark.parametrize("last_first", [False, True])
def test_several_forwards_have_a_tensor_each(problem: Problem, buffer: MoEBuffer, last_first: bool) -> None:
    """The fake holds each backward's tensor against what the forward of the same tokens left in it."""
    parts = [problem.tokens(slice(0, 20)), problem.tokens(slice(20, 25)), problem.tokens(slice(25, 60))]
    leaves = [part.requires_grad() for part in parts]
    outputs = [mega_moe.moe(*part.inputs, buffer=buffer) for part in leaves]
    for part, y in list(zip(leaves, outputs))[:: -1 if last_first else 1]:
        y.backward(part.dy)


def test_the_fake_sees_another_calls_tensor(problem: Problem, buffer: MoEBuffer) -> None:
    ops, none = torch.ops.mega_moe, (None, None)
    x, *rest = problem.inputs
    rows = buffer._live().saved_rows.slots(TOKENS)
    _, other = ops.run_saving(2 * x, *rest, *none, buffer._live().handle, *SWIGLU.arguments(), rows)
    with pytest.raises(AssertionError):
        ops.backward(problem.dy, x, *rest, buffer._live().handle, *SWIGLU.arguments(), [True] * 4, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_in_buffers(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels, dtype: torch.dtype, turned: bool
) -> None:
    """Where the kernel cannot add, what it computes to be added comes from the kept tensor too."""
    down = torch.zeros_like(problem.w_down, dtype=dtype)
    into = (
        torch.zeros_like(problem.w_gate_up, dtype=dtype),
        down.mT.contiguous().mT if turned else down,
    )
    leaves = problem.requires_grad()
    mega_moe.moe(*leaves.inputs, buffer=buffer, grad_buffers=into).backward(leaves.dy)
    assert saved(fake_both) == [("forward", SLOTS), ("backward" if turned else "backward into", SLOTS)]
    want = exact(problem)
    for got, gradient in zip(into, (want.dw_gate_up, want.dw_down)):
        assert float((got.double() - gradient).norm() / gradient.norm()) < TOLERANCE


def test_hooks_see_it(problem: Problem, buffer: MoEBuffer) -> None:
    """So it can be offloaded."""
    packed: list[tuple[int, ...]] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(tuple(value.shape))
        return value

    leaves = problem.requires_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    y.backward(leaves.dy)
    assert packed.count((SLOTS, 256)) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_it_again(
    problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels, use_reentrant: bool
) -> None:
    def block(x: Tensor, *rest: Tensor) -> Tensor:
        return x + mega_moe.moe(2 * x, *rest, buffer=buffer)

    def train(function: Any) -> list[Tensor | None]:
        leaves = problem.requires_grad()
        function(*leaves.inputs).backward(leaves.dy)
        return list(leaves.grads())

    want = train(block)
    del fake_both.launches[:]
    got = train(lambda *inputs: checkpoint(block, *inputs, use_reentrant=use_reentrant))
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None  # noqa: PT018
        assert torch.equal(a, b)
    first = 0 if use_reentrant else SLOTS
    assert saved(fake_both) == [("forward", first), ("forward", SLOTS), ("backward", SLOTS)]


def test_compiled(problem: Problem, buffer: MoEBuffer, fake_both: FakeKernels) -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda *inputs: mega_moe.moe(*inputs, buffer=buffer), fullgraph=True, dynamic=True
    )
    for part in (problem, problem.tokens(slice(0, 31))):
        leaves = part.requires_grad()
        y = function(*leaves.inputs)
        y.backward(leaves.dy)
        got = type(exact(part))(y.detach(), *leaves.grads())  # type: ignore[arg-type]
        assert_same_bits(got, results(part, buffer))
    rows = [buffer._live().saved_rows.slots(n) for n in (TOKENS, TOKENS, 31, 31)]
    assert saved(fake_both) == [(op, n) for n in rows for op in ("forward", "backward")]
    torch._dynamo.reset()


def test_operator_has_a_right_fake(problem: Problem, buffer: MoEBuffer) -> None:
    # Outside, where the schema is compared with what the operator does, the tensor's bits are not.
    call = (
        *problem.requires_grad().inputs,
        None,
        None,
        buffer._live().handle,
        *Activation(clamp=2.0).arguments(),
        384,
    )
    torch.library.opcheck(
        torch.ops.mega_moe.run_saving.default, call, test_utils=("test_schema", "test_faketensor")
    )


def test_a_backward_that_is_not_the_kernels_keeps_nothing(
    problem: Problem, fake_kernels: FakeKernels
) -> None:
    with make_buffer(problem, "fused", save_gate_up=2.0) as made:
        assert made.save_gate_up == 0
        assert made.saved_nbytes(TOKENS) == 0
        results(problem, made)
        assert saved(fake_kernels) == [("forward", 0)]


def test_another_backend_keeps_what_it_does(problem: Problem) -> None:
    with make_buffer(problem, "reference", save_gate_up=True) as made:
        assert made.save_gate_up == 0
        assert made.saved_nbytes(TOKENS) == 0
        with count_op_calls() as calls:
            results(problem, made)
        assert calls == {"run": 1, "backward": 1}


def test_tensors_of_a_forward_need_a_backend_that_keeps_them(problem: Problem) -> None:
    with (
        make_buffer(problem, "reference") as made,
        pytest.raises(mega_moe.MegaMoEError, match="saves no gate and up"),
    ):
        torch.ops.mega_moe.run_saving(
            *problem.inputs, None, None, made._live().handle, *SWIGLU.arguments(), 128
        )


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("all", TypeError)],
)
def test_wrong_shares(problem: Problem, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"save_gate_up: got .*, want a number >= 0"):
        make_buffer(problem, save_gate_up=wrong)


def shape_of(request: Request) -> Shape:
    return Shape(
        request.max_tokens_per_rank,
        request.top_k,
        request.num_experts,
        request.hidden,
        request.num_ranks,
        intermediate=request.intermediate,
        pool_rows=pool_rows(request),
        mode=request.mode(backward=True),
    )


def end_of_rows(ids: list[Tensor], rank: int, experts: int, shape: Shape) -> int:
    """One more than the last slot of the rank's padded rows."""
    slots = plain_tables(ids, rank, experts, *shape.chunk_limits()).slot
    return (int(slots.max()) // 128 + 1) * 128 if len(slots) else 0


@pytest.mark.parametrize("pool", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_room_for_every_row(num_ranks: int, pool: int) -> None:
    """One rank: of any routing. More: of any that gives a rank no more than its T K rows."""
    made = torch.Generator().manual_seed(num_ranks)
    most, top_k, experts = 700, 2, 4
    smallest = 128 * num_ranks * top_k + 127 * (experts // num_ranks)
    rows = 0 if pool == 0 else -(-smallest * pool // 128) * 128
    shape = dataclasses.replace(
        shape_of(Request(experts, most, top_k, 256, 128, num_ranks=num_ranks)), pool_rows=rows
    )
    room = SavedRows.of(shape, 1.0)
    ends = []
    for trial in range(20):
        tokens = [most if trial % 2 else int(torch.randint(0, most + 1, (), generator=made))] * num_ranks
        ids = []
        for count in tokens:
            scores = torch.rand(count, experts, generator=made)
            own = scores.topk(top_k, dim=1).indices
            if trial % 3 == 0 and num_ranks == 1:
                own = own * 0 + trial % experts  # everything to one expert
            ids.append(own.masked_fill(torch.rand(own.shape, generator=made) < 0.2 * (trial % 4), -1))
        for rank in range(num_ranks):
            local = experts // num_ranks
            held = sum(int(((own // local) == rank).sum()) for own in ids)
            if held <= tokens[rank] * top_k:
                ends.append((end_of_rows(ids, rank, experts, shape), tokens[rank]))
    assert all(end <= room.slots(count) for end, count in ends)
    without_padding = dataclasses.replace(room, padding=0)
    # With one expert a rank there is little to pad.
    assert num_ranks > 1 or any(end > without_padding.slots(count) for end, count in ends)


def test_room_of_other_shares() -> None:
    request = Request(128, 16384, 8, 2048, 768, num_ranks=8)
    shape = shape_of(request)
    rows = 16384 * 8
    padding = 16 * 128
    # A chunk holds a little more than half of them.
    assert SavedRows.of(shape, 0).slots(16384) == 0
    assert SavedRows.of(shape, 0.5).slots(16384) == rows // 2 + padding
    assert SavedRows.of(shape, 1).slots(16384) == rows + 3 * padding
    assert SavedRows.of(shape, 1.25).slots(16384) == rows + rows // 4 + 5 * padding
    assert SavedRows.of(shape, 1).slots(8192) == rows // 2 + padding
    # No more than there can be.
    assert SavedRows.of(shape, 100).slots(16384) == SavedRows.of(shape, 8).slots(16384)
    assert SavedRows.of(shape, 1e-9).share > 0
    one = shape_of(Request(128, 16384, 8, 2048, 768))
    assert SavedRows.of(one, 1).slots(16384) == SavedRows.of(one, 9).slots(16384) == rows + 128 * 128
