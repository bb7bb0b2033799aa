"""The gradient contract: who gets one, in which memory, under hooks, modes and changes between forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.testing import Gradients, Problem, count_op_calls, random_problem, relative_l2

from ._layer import (
    CASES,
    Case,
    assert_close,
    assert_same_bits,
    bits,
    both_paths,
    exact,
    make_buffer,
    results,
)

_ = both_paths  # a fixture

cases = pytest.mark.parametrize("case", CASES, ids=str)
NAMES = ("x", "topk_weights", "w_gate_up", "w_down")


@pytest.fixture(params=["reference", "grouped", "dispatched"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def problem() -> Problem:
    return random_problem(48, 128, 64, 4, 2, masked=0.1)


@pytest.fixture
def buffer(problem: Problem, backend: str) -> Iterator[MoEBuffer]:
    with make_buffer(problem, backend) as made:
        yield made


def layer(leaves: Problem, buffer: MoEBuffer, **options: Any) -> Tensor:
    return mega_moe.moe(*leaves.inputs, buffer=buffer, **options)


@cases
def test_every_choice_of_frozen_tensors(case: Case) -> None:
    problem = random_problem(48, 128, 64, 4, 2, dtype=case.dtype, masked=0.1)
    with make_buffer(problem, case.backend) as buffer:
        full = results(problem, buffer)
        for needs in itertools.product((False, True), repeat=4):
            leaves = problem.requires_grad(needs)
            y = layer(leaves, buffer)
            assert torch.equal(bits(y), bits(full.y))
            assert y.requires_grad == any(needs)
            if any(needs):
                y.backward(leaves.dy)
            for name, grad, wanted, need in zip(NAMES, leaves.grads(), full[1:], needs):
                assert (grad is not None) == need, (needs, name)
                assert grad is None or torch.equal(bits(grad), bits(wanted)), (needs, name)


def test_a_flag_may_change_between_steps(problem: Problem, buffer: MoEBuffer) -> None:
    full = results(problem, buffer)
    leaves = problem.requires_grad((True, True, False, True))
    layer(leaves, buffer).backward(leaves.dy)
    assert leaves.w_gate_up.grad is None
    leaves.w_gate_up.requires_grad_()
    leaves.w_down.requires_grad_(False)
    leaves.w_down.grad = None
    layer(leaves, buffer).backward(leaves.dy)
    assert leaves.w_down.grad is None
    assert torch.equal(bits(leaves.w_gate_up.grad), bits(full.dw_gate_up))  # type: ignore[arg-type]


def test_gradients_of_some_tensors_only(problem: Problem, buffer: MoEBuffer) -> None:
    full = results(problem, buffer)
    leaves = problem.requires_grad()
    y = layer(leaves, buffer)
    (dx,) = torch.autograd.grad(y, leaves.x, leaves.dy, retain_graph=True)
    dtopk, dw_down = torch.autograd.grad(y, (leaves.topk_weights, leaves.w_down), leaves.dy)
    for got, want in ((dx, full.dx), (dtopk, full.dtopk), (dw_down, full.dw_down)):
        assert torch.equal(bits(got), bits(want))


def other_strides(value: Tensor) -> Tensor:
    """The same values, the last two axes laid out the other way round and with gaps."""
    wide = value.new_full((*value.shape[:-2], value.shape[-1], 2 * value.shape[-2]), math.nan)
    view = wide.transpose(-1, -2)[..., ::2, :]
    return view.copy_(value)


@cases
@pytest.mark.parametrize("name", ["x", "topk_weights", "w_gate_up", "w_down", "dy"])
def test_strides_do_not_matter(case: Case, name: str) -> None:
    problem = random_problem(48, 128, 64, 4, 2, dtype=case.dtype, masked=0.1)
    with make_buffer(problem, case.backend) as buffer:
        full = results(problem, buffer)
        strided = other_strides(getattr(problem, name))
        assert not strided.is_contiguous()
        leaves = problem.requires_grad()
        leaves = replace(leaves, **{name: strided if name == "dy" else strided.requires_grad_()})
        y = layer(leaves, buffer)
        y.backward(leaves.dy)
        got = Gradients(y.detach(), *leaves.grads())  # type: ignore[arg-type]
    for part, a, b in zip(full._fields, got, full):
        # A weight's strides choose another routine of the BLAS; only the reference, below fp64, rounds that away.
        steady = case.backend == "reference" and case.dtype != torch.float64
        exactly = steady or name not in ("w_gate_up", "w_down")
        assert torch.equal(bits(a), bits(b)) if exactly else relative_l2(a, b) <= case.tolerance, part


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides_of_ids_do_not_matter(problem: Problem, buffer: MoEBuffer, dtype: torch.dtype) -> None:
    ids = problem.topk_idx.to(dtype)
    strided = torch.full((2, 96), 10**6, dtype=dtype).T[::2]
    strided.copy_(ids)
    assert_same_bits(
        results(replace(problem, topk_idx=strided), buffer), results(replace(problem, topk_idx=ids), buffer)
    )


@cases
def test_a_gradient_of_stride_zero(case: Case) -> None:
    problem = random_problem(48, 128, 64, 4, 2, dtype=case.dtype, masked=0.1)
    problem = replace(problem, dy=torch.ones_like(problem.dy))
    with make_buffer(problem, case.backend) as buffer:
        want = results(problem, buffer)
        leaves = problem.requires_grad()
        y = layer(leaves, buffer)
        y.sum().backward()
    assert_same_bits(Gradients(y, *leaves.grads()), want)  # type: ignore[arg-type]
    assert_close(want, exact(problem), case.tolerance)


def test_an_input_that_is_expanded(problem: Problem, buffer: MoEBuffer) -> None:
    row = problem.x[:1].clone().requires_grad_()
    y = mega_moe.moe(row.expand(48, -1), *problem.inputs[1:], buffer=buffer)
    y.backward(problem.dy)
    dense = results(replace(problem, x=row.detach().repeat(48, 1)), buffer)
    assert torch.equal(bits(y), bits(dense.y))
    assert row.grad is not None
    assert relative_l2(row.grad, dense.dx.double().sum(0, keepdim=True)) <= 6e-3


def test_router_gradient_against_finite_differences() -> None:
    problem = random_problem(16, 64, 32, 4, 2, dtype=torch.float64)
    with make_buffer(problem) as buffer:
        dtopk = results(problem, buffer).dtopk
        assert torch.count_nonzero(dtopk) == dtopk.numel()
        for token, slot in itertools.product(range(16), range(2)):
            ends = []
            for step in (1e-4, -1e-4):
                weights = problem.topk_weights.clone()
                weights[token, slot] += step
                y = mega_moe.moe(problem.x, problem.topk_idx, weights, *problem.inputs[3:], buffer=buffer)
                ends.append((y * problem.dy).sum())
            difference = float(ends[0] - ends[1]) / 2e-4
            # y is linear in a weight, so the difference has no error but that of fp64 sums.
            assert abs(float(dtopk[token, slot]) - difference) <= 1e-8


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_all_gradients_against_finite_differences(clamp: float | None) -> None:
    problem = random_problem(6, 16, 12, 4, 2, dtype=torch.float64, masked=0.2).requires_grad()
    with make_buffer(problem) as buffer:

        def function(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return mega_moe.moe(
                x, problem.topk_idx, weights, gate_up, down, buffer=buffer, activation_clamp=clamp
            )

        leaves = (problem.x, problem.topk_weights, problem.w_gate_up, problem.w_down)
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_backward_twice_over_a_kept_graph(problem: Problem, buffer: MoEBuffer) -> None:
    want = results(problem, buffer)
    leaves = problem.requires_grad()
    y = layer(leaves, buffer)
    for _ in range(2):
        for tensor in (leaves.x, leaves.topk_weights, leaves.w_gate_up, leaves.w_down):
            tensor.grad = None
        y.backward(leaves.dy, retain_graph=True)
        assert_same_bits(Gradients(y, *leaves.grads()), want)  # type: ignore[arg-type]
    y.backward(leaves.dy)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(leaves.dy)


def test_layers_in_a_row_share_a_buffer(backend: str) -> None:
    problem = random_problem(32, 64, 32, 4, 2, dtype=torch.float32)
    second = random_problem(32, 64, 32, 4, 2, dtype=torch.float32, seed=1)
    from mega_moe.testing import fp64_moe

    def chain(moe: Any, a: Problem, b: Problem) -> Tensor:
        hidden = a.x + moe(*a.inputs)
        return hidden + moe(hidden, *b.inputs[1:])  # type: ignore[no-any-return]

    with make_buffer(problem, backend) as buffer:
        leaves = problem.requires_grad(), second.requires_grad()
        chain(lambda *args: mega_moe.moe(*args, buffer=buffer), *leaves).backward(problem.dy)
    wide = [
        replace(p, **{n: getattr(p, n).double() for n in NAMES}).requires_grad() for p in (problem, second)
    ]
    chain(fp64_moe, *wide).backward(problem.dy.double())
    for got, want in zip(leaves, wide):
        for name in NAMES:
            if want is wide[1] and name == "x":
                continue
            assert relative_l2(getattr(got, name).grad, getattr(want, name).grad) <= 1e-5, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(problem: Problem, buffer: MoEBuffer, mode: Any) -> None:
    want = results(problem, buffer).y
    leaves = problem.requires_grad()
    with mode():
        y = layer(leaves, buffer)
        again = mega_moe.moe(y.clone(), *leaves.inputs[1:], buffer=buffer)
    assert torch.equal(bits(y), bits(want))
    assert not y.requires_grad
    assert again.isfinite().all()


def test_saved_tensors_are_the_inputs_alone(problem: Problem, buffer: MoEBuffer) -> None:
    want = results(problem, buffer)
    leaves = problem.requires_grad()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        y = layer(leaves, buffer)
    assert [t.data_ptr() for t in packed] == [t.data_ptr() for t in leaves.inputs]
    y.backward(leaves.dy)
    assert_same_bits(Gradients(y, *leaves.grads()), want)  # type: ignore[arg-type]


def test_activations_offloaded_to_the_host(problem: Problem, buffer: MoEBuffer) -> None:
    want = results(problem, buffer)
    leaves = problem.requires_grad()
    with torch.autograd.graph.save_on_cpu():
        y = layer(leaves, buffer)
    y.backward(leaves.dy)
    assert_same_bits(Gradients(y, *leaves.grads()), want)  # type: ignore[arg-type]


def test_double_backward_is_refused(problem: Problem, buffer: MoEBuffer) -> None:
    leaves = problem.requires_grad()
    y = layer(leaves, buffer)
    (dx,) = torch.autograd.grad(y.float().square().sum(), leaves.x, create_graph=True)
    assert torch.isfinite(dx).all()  # the first derivative is there
    with pytest.raises(NotImplementedError, match=r"mega_moe\.moe: double backward is not supported"):
        dx.sum().backward()


def test_double_backward_into_buffers_is_refused(problem: Problem, buffer: MoEBuffer) -> None:
    leaves = problem.requires_grad()
    into = (torch.zeros_like(problem.w_gate_up), torch.zeros_like(problem.w_down))
    y = layer(leaves, buffer, grad_buffers=into)
    with pytest.raises(NotImplementedError, match=r"mega_moe\.moe: double backward is not supported"):
        torch.autograd.grad(y.float().square().sum(), leaves.x, create_graph=True)
    assert all(torch.count_nonzero(grad) == 0 for grad in into)


@pytest.mark.parametrize("name", [*NAMES, "topk_idx"])
def test_a_change_in_place_between_forward_and_backward(
    problem: Problem, buffer: MoEBuffer, name: str
) -> None:
    leaves = problem.requires_grad()
    y = layer(leaves, buffer)
    with torch.no_grad():
        getattr(leaves, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(leaves.dy)


@pytest.mark.parametrize("how", ["data", "copy", "storage"])
def test_weights_swapped_between_steps(problem: Problem, buffer: MoEBuffer, how: str) -> None:
    other = random_problem(48, 128, 64, 4, 2, masked=0.1, seed=9)
    leaves = problem.requires_grad()
    layer(leaves, buffer).backward(leaves.dy)
    for name in ("w_gate_up", "w_down"):
        weight, new = getattr(leaves, name), getattr(other, name)
        weight.grad = None
        if how == "data":
            weight.data = new.clone()
        elif how == "copy":
            with torch.no_grad():
                weight.copy_(new)
        else:  # FSDP frees the storage after a forward and fills it again before the next
            nbytes = weight.untyped_storage().nbytes()
            weight.untyped_storage().resize_(0)
            weight.untyped_storage().resize_(nbytes)
            with torch.no_grad():
                weight.copy_(new)
    leaves.x.grad = leaves.topk_weights.grad = None
    y = layer(leaves, buffer)
    y.backward(leaves.dy)
    fresh = replace(problem, w_gate_up=other.w_gate_up, w_down=other.w_down)
    assert_same_bits(Gradients(y, *leaves.grads()), results(fresh, buffer))  # type: ignore[arg-type]


def test_backward_after_the_buffer_is_gone(problem: Problem, backend: str) -> None:
    leaves = problem.requires_grad()
    with make_buffer(problem, backend) as buffer:
        y = layer(leaves, buffer)
    with pytest.raises(mega_moe.MegaMoEError, match="was destroyed or dropped; keep the MoEBuffer"):
        y.backward(leaves.dy)


def test_an_unused_result_is_no_call_of_backward(problem: Problem, buffer: MoEBuffer) -> None:
    leaves = problem.requires_grad()
    with count_op_calls() as calls:
        y = layer(leaves, buffer)
        (y.detach().sum() + leaves.x.sum()).backward()
    assert calls == {"run": 1}
