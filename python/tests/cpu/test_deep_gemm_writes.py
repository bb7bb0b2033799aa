"""DeepGEMM's calls on the fused backend write into the caller's memory, and do nothing else to tensors of that size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mega_moe import deep_gemm as face
from mega_moe._ops import layer as operators
from mega_moe.testing import Problem, fp64_moe_grads, random_problem, relative_l2

from ..gpu import _face_fp8  # noqa: TID252
from ._fake_kernels import FakeKernels, fake_both
from ._layer import make_buffer, results

_ = fake_both  # a fixture

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 8, 3, 512, 128, 60
TYPES = ("bf16xbf16", "fp8xfp8")
RESULTS = {"moe_forward": ("y",), "moe_backward": ("dx", "dtopk", "dw_gate_up", "dw_down")}


class Seen(TorchDispatchMode):
    """Names of the operators that make, read or write a tensor as large as the smallest result; views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "mega_moe":
            # A mode is off inside what it sees: on again for what the operator does.
            with self:
                return getattr(operators, f"_{func._opname}")(*args)
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        if not func.is_view and any(tensor.numel() >= TOKENS * TOP_K for tensor in tensors):
            self.names.append(func._opname)
        return made


class Call(NamedTuple):
    """A call of the face, with the tensors that it shall write."""

    results: tuple[Tensor, ...]
    launch: Callable[[], None]


@pytest.fixture
def problem() -> Problem:
    return random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, masked=0.1)


@pytest.fixture(params=TYPES)
def buffer(request: pytest.FixtureRequest, fake_both: FakeKernels) -> Iterator[face.SymmBuffer]:
    made = face.get_symm_buffer_for_mega_moe(None, EXPERTS, 64, TOP_K, HIDDEN, INNER, mma_type=request.param)
    assert made.moe.backend == "fused"
    yield made
    made.destroy()


@pytest.fixture
def written(fake_both: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Addresses of the results of each launch; what stands in for the kernel is not seen."""
    addresses: list[list[int]] = []

    def noted(name: str) -> Callable[..., None]:
        inner = getattr(fake_both, name)
        signature = inspect.signature(inner)

        def launch(*args: Any) -> None:
            given = signature.bind(*args).arguments
            addresses.append([given[result].data_ptr() for result in RESULTS[name]])
            with _disable_current_modes():
                inner(*args)

        return launch

    for name in RESULTS:
        monkeypatch.setattr(fake_both, name, noted(name))
    return addresses


def new(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full_like(like, float("nan"), dtype=dtype)


def stage(buffer: face.SymmBuffer, problem: Problem) -> None:
    if buffer.mma_type == "fp8xfp8":
        _face_fp8.fill(buffer, problem)
        return
    for view, rows in zip(buffer.staged(TOKENS), problem.inputs[:3]):
        view.copy_(rows)


def forward(buffer: face.SymmBuffer, problem: Problem, y: Tensor | None = None, **options: Any) -> Call:
    stage(buffer, problem)
    out = new(problem.x) if y is None else y
    if buffer.mma_type == "bf16xbf16":
        weights: tuple[Any, ...] = problem.w_gate_up, problem.w_down
        return Call((out,), lambda: face.bf16_mega_moe(out, *weights, buffer, **options))
    pairs = _face_fp8.pair(problem.w_gate_up), _face_fp8.pair(problem.w_down)
    return Call((out,), lambda: face.fp8_mega_moe(out, *pairs, buffer, **options))


def backward(buffer: face.SymmBuffer, problem: Problem, **given: Tensor) -> Call:
    stage(buffer, problem)
    dx, dtopk = given.get("dx", new(problem.x)), given.get("dtopk", new(problem.topk_weights))
    dw1, dw2 = given.get("dw1", new(problem.w_gate_up)), given.get("dw2", new(problem.w_down))
    out, dy = (dx, dw1, dw2, dtopk), given.get("dy", problem.dy)
    ordered = (dx, dtopk, dw1, dw2)
    if buffer.mma_type == "bf16xbf16":
        weights = problem.w_gate_up, problem.w_down
        return Call(ordered, lambda: face.bf16_mega_moe_backward(*out, dy, *weights, buffer))
    l1, l2 = _face_fp8.pair(problem.w_gate_up), _face_fp8.pair(problem.w_down)
    turned = _face_fp8.turned(l1), _face_fp8.turned(l2)
    return Call(ordered, lambda: face.fp8_mega_moe_backward(*out, dy, problem.x, l1, *turned, buffer))


def exact(buffer: face.SymmBuffer, problem: Problem) -> Any:
    """fp64 in bf16; in fp8 the emulation, which is as far from fp64 as the kernel may be."""
    if buffer.mma_type == "bf16xbf16":
        return fp64_moe_grads(problem.dy, *problem.inputs)
    with make_buffer(problem, "reference", "fp8") as reference:
        return results(problem, reference)


def of_backward(want: Any) -> tuple[Tensor, ...]:
    return want.dx, want.dtopk, want.dw_gate_up, want.dw_down


def test_the_kernel_is_given_the_callers_memory_and_nothing_else_touches_it(
    buffer: face.SymmBuffer, problem: Problem, written: list[list[int]], fake_both: FakeKernels
) -> None:
    want = exact(buffer, problem)
    calls = (
        (forward(buffer, problem), (want.y,)),
        (backward(buffer, problem), of_backward(want)),
        (
            backward(
                buffer,
                problem,
                dw1=new(problem.w_gate_up, torch.float32),
                dw2=new(problem.w_down, torch.float32),
            ),
            of_backward(want),
        ),
    )
    for call, expected in calls:
        stage(buffer, problem)
        versions = [result._version for result in call.results]
        with Seen() as seen:
            call.launch()
        assert seen.names == []
        assert written.pop() == [result.data_ptr() for result in call.results]
        assert all(result._version > version for result, version in zip(call.results, versions, strict=True))
        for got, right in zip(call.results, expected, strict=True):
            assert relative_l2(got, right) < 6e-3
    assert [launch.op.split()[0] for launch in fake_both.launches] == ["forward", "backward", "backward"]


def test_only_what_the_kernel_cannot_write_is_copied(
    buffer: face.SymmBuffer, problem: Problem, written: list[list[int]]
) -> None:
    want = exact(buffer, problem)
    strided = new(problem.w_gate_up.transpose(1, 2).contiguous()).transpose(1, 2)
    aside = torch.empty(problem.x.numel() + 1, dtype=torch.bfloat16)[1:].view_as(problem.x)
    cases: tuple[tuple[Call, tuple[Tensor, ...], list[int]], ...] = (
        (forward(buffer, problem, aside), (want.y,), [0]),
        (backward(buffer, problem, dx=aside), of_backward(want), [0]),
        (backward(buffer, problem, dw1=strided), of_backward(want), [2]),
        (backward(buffer, problem, dw2=new(problem.w_down, torch.float32)), of_backward(want), [2]),
    )
    for call, expected, copied in cases:
        stage(buffer, problem)
        with Seen() as seen:
            call.launch()
        assert seen.names == ["empty", "copy_"] * len(copied)
        same = [at == own.data_ptr() for at, own in zip(written.pop(), call.results, strict=True)]
        assert [index for index, there in enumerate(same) if not there] == copied
        for got, right in zip(call.results, expected, strict=True):
            assert relative_l2(got, right) < 6e-3


def test_statistics_come_from_the_same_launch(
    buffer: face.SymmBuffer, problem: Problem, fake_both: FakeKernels
) -> None:
    stats = torch.arange(EXPERTS, dtype=torch.int32)
    forward(buffer, problem, cumulative_local_expert_recv_stats=stats).launch()
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert stats.tolist() == (torch.bincount(ids, minlength=EXPERTS) + torch.arange(EXPERTS)).tolist()
    assert [launch.op.split()[0] for launch in fake_both.launches] == ["forward"]


def test_a_result_in_the_memory_of_an_operand_is_copied_there(
    buffer: face.SymmBuffer, problem: Problem, written: list[list[int]]
) -> None:
    """The kernels read operands while they write; results may lie next to one another."""
    want = exact(buffer, problem)
    flat = torch.empty(problem.w_gate_up.numel() + problem.w_down.numel(), dtype=torch.bfloat16)
    dw1, dw2 = flat[: problem.w_gate_up.numel()], flat[problem.w_gate_up.numel() :]
    dy = problem.dy.clone()
    gradients = {"dw1": dw1.view_as(problem.w_gate_up), "dw2": dw2.view_as(problem.w_down)}
    cases = [(backward(buffer, problem, dx=dy, dy=dy, **gradients), of_backward(want), [0])]
    if buffer.mma_type == "bf16xbf16":
        staged = buffer.staged(TOKENS)
        cases += [
            (forward(buffer, problem, staged[0]), (want.y,), [0]),
            (backward(buffer, problem, dx=staged[0], dtopk=staged[2]), of_backward(want), [0, 1]),
        ]
    for call, expected, copied in cases:
        stage(buffer, problem)
        call.launch()
        same = [at == own.data_ptr() for at, own in zip(written.pop(), call.results, strict=True)]
        assert [index for index, there in enumerate(same) if not there] == copied
        for got, right in zip(call.results, expected, strict=True):
            assert relative_l2(got, right) < 6e-3
