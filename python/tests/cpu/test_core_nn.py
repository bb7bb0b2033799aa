"""The experts as a module: parameters, init, state, shapes of a batch, autocast, and what a trainer does to modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.nn import MegaMoE
from mega_moe.testing import Problem, random_problem

from ._layer import bits, make_buffer

H, INNER, E, K = 64, 32, 4, 2


@pytest.fixture
def problem() -> Problem:
    return random_problem(24, H, INNER, E, K, dtype=torch.float32)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "grouped") as made:
        yield made


@pytest.fixture
def experts(problem: Problem, buffer: MoEBuffer) -> MegaMoE:
    module = MegaMoE(H, INNER, E, buffer=buffer)
    module.load_state_dict({"gate_up_proj": problem.w_gate_up, "down_proj": problem.w_down})
    return module


def call(module: MegaMoE, problem: Problem) -> Tensor:
    return module(problem.x, problem.topk_idx, problem.topk_weights)  # type: ignore[no-any-return]


def grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_parameters_and_state() -> None:
    module = MegaMoE(H, INNER, E, dtype=torch.bfloat16)
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}
    assert shapes == {
        "gate_up_proj": ((E, 2 * INNER, H), torch.bfloat16),
        "down_proj": ((E, H, INNER), torch.bfloat16),
    }
    assert list(module.state_dict()) == list(shapes)
    assert not list(module.buffers())


def test_init_is_uniform_and_drawn_expert_by_expert() -> None:
    torch.manual_seed(0)
    module = MegaMoE(H, INNER, 16)
    for weight, fan_in in ((module.gate_up_proj, H), (module.down_proj, INNER)):
        bound = 1 / math.sqrt(fan_in)
        assert float(weight.detach().abs().max()) <= bound
        assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
        assert len(weight.detach()[:, 0, 0].unique()) == 16
    few, many = MegaMoE(H, INNER, 2), MegaMoE(H, INNER, 4)
    for made in (few, many):
        made.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(few.gate_up_proj, many.gate_up_proj[:2])


def test_module_is_the_function(experts: MegaMoE, problem: Problem, buffer: MoEBuffer) -> None:
    leaves = problem.requires_grad()
    want = mega_moe.moe(*leaves.inputs, buffer=buffer)
    want.backward(leaves.dy)
    y = call(experts, problem)
    y.backward(problem.dy)
    assert torch.equal(bits(y), bits(want))
    assert torch.equal(grad(experts.gate_up_proj), grad(leaves.w_gate_up))
    assert torch.equal(grad(experts.down_proj), grad(leaves.w_down))


def test_clamp_reaches_the_function(problem: Problem, buffer: MoEBuffer) -> None:
    module = MegaMoE(H, INNER, E, buffer=buffer, activation_clamp=0.25)
    module.load_state_dict({"gate_up_proj": problem.w_gate_up, "down_proj": problem.w_down})
    want = mega_moe.moe(*problem.inputs, buffer=buffer, activation_clamp=0.25)
    assert torch.equal(call(module, problem), want)
    assert not torch.equal(want, mega_moe.moe(*problem.inputs, buffer=buffer))


@pytest.mark.parametrize("leading", [(24,), (4, 6), (2, 3, 4), (1, 24)])
def test_leading_axes(experts: MegaMoE, problem: Problem, leading: tuple[int, ...]) -> None:
    want = call(experts, problem)
    y = experts(
        problem.x.view(*leading, H),
        problem.topk_idx.view(*leading, K),
        problem.topk_weights.view(*leading, K),
    )
    assert torch.equal(y, want.view(*leading, H))


@pytest.mark.parametrize("leading", [(), (2,)])
def test_the_result_is_no_view(experts: MegaMoE, problem: Problem, leading: tuple[int, ...]) -> None:
    """What a hook hangs on must not be dropped by an in-place operation of the caller."""
    x, idx, weights = (t.view(*leading, -1, t.shape[-1]) for t in problem.inputs[:3])
    y = experts(x, idx, weights)
    assert not y._is_view()
    assert y.view(-1, y.shape[-1])._is_view()


def test_a_batch_that_is_not_contiguous(experts: MegaMoE, problem: Problem) -> None:
    want = call(experts, problem).view(4, 6, H)
    parts = (problem.x.view(4, 6, H), problem.topk_idx.view(4, 6, K), problem.topk_weights.view(4, 6, K))
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    assert not turned[0].is_contiguous()
    assert torch.equal(experts(*turned), want)


@pytest.mark.parametrize("leading", [(0,), (0, 5), (3, 0)])
def test_no_tokens(experts: MegaMoE, leading: tuple[int, ...]) -> None:
    x = torch.empty(*leading, H, requires_grad=True)
    y = experts(x, torch.empty(*leading, K, dtype=torch.int64), torch.empty(*leading, K))
    assert y.shape == x.shape
    y.sum().backward()
    assert grad(x).shape == x.shape
    assert torch.count_nonzero(grad(experts.gate_up_proj)) == 0


def test_ids_of_a_transposed_batch_are_refused(experts: MegaMoE, problem: Problem) -> None:
    x = problem.x.view(4, 6, H)
    ids, weights = problem.topk_idx.view(6, 4, K), problem.topk_weights.view(6, 4, K)
    with pytest.raises(ValueError, match=r"topk_idx: got shape \(6, 4, 2\), want \(24, 2\)"):
        experts(x, ids, weights)
    with pytest.raises(ValueError, match=r"topk_weights: got shape \(6, 4, 2\), want \(24, 2\)"):
        experts(x, ids.view(4, 6, K), weights)


def test_another_width_is_no_larger_batch(experts: MegaMoE, problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"x: got shape \(12, 128\), want \(T, 64\)"):
        experts(problem.x.view(12, 2 * H), problem.topk_idx, problem.topk_weights)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_x_and_the_experts(
    experts: MegaMoE, problem: Problem, buffer: MoEBuffer, weights_dtype: torch.dtype
) -> None:
    weights = problem.topk_weights.to(weights_dtype)
    narrow = replace(
        problem,
        x=problem.x.bfloat16(),
        topk_weights=weights,
        w_gate_up=problem.w_gate_up.bfloat16(),
        w_down=problem.w_down.bfloat16(),
        dy=problem.dy.bfloat16(),
    ).requires_grad()
    want = mega_moe.moe(*narrow.inputs, buffer=buffer)
    want.backward(narrow.dy)
    x = problem.x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, problem.topk_idx, weights)
    y.backward(narrow.dy)
    assert y.dtype == torch.bfloat16
    assert torch.equal(bits(y), bits(want))
    for got, wanted in (
        (x, narrow.x),
        (experts.gate_up_proj, narrow.w_gate_up),
        (experts.down_proj, narrow.w_down),
    ):
        assert grad(got).dtype == torch.float32
        assert torch.equal(grad(got), grad(wanted).float())


def test_autocast_of_fp16_is_refused(experts: MegaMoE, problem: Problem) -> None:
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(TypeError, match=r"x: got torch.float16"):
        call(experts, problem)


def test_no_autocast_casts_nothing(experts: MegaMoE, problem: Problem) -> None:
    with pytest.raises(TypeError, match=r"w_gate_up: got torch.float32, want x's dtype torch.bfloat16"):
        experts(problem.x.bfloat16(), problem.topk_idx, problem.topk_weights)


def test_a_module_needs_a_buffer_of_its_sizes(problem: Problem, buffer: MoEBuffer) -> None:
    module = MegaMoE(H, INNER, E)
    with pytest.raises(RuntimeError, match=r"MegaMoE: no buffer attached; .* attach\(buffer\)"):
        call(module, problem)
    module.attach(buffer)
    call(module, problem)
    for sizes, message in (
        ((2 * H, INNER, E), r"buffer: hidden is 64, this module's is 128"),
        ((H, 2 * INNER, E), r"buffer: intermediate is 32, this module's is 64"),
        ((H, INNER, 2 * E), r"buffer: num_local_experts is 4, this module's is 8"),
    ):
        with pytest.raises(ValueError, match=message):
            MegaMoE(*sizes, buffer=buffer)


def test_meta_device_first(problem: Problem, buffer: MoEBuffer) -> None:
    module = MegaMoE(H, INNER, E, device="meta")
    module.to_empty(device="cpu")
    module.reset_parameters()
    module.attach(buffer)
    assert call(module, problem).isfinite().all()


def test_a_deep_copy_has_weights_of_its_own(experts: MegaMoE, problem: Problem) -> None:
    want = call(experts, problem)
    average = copy.deepcopy(experts)
    with torch.no_grad():
        experts.gate_up_proj.zero_()
    assert torch.equal(call(average, problem), want)
    assert torch.count_nonzero(call(experts, problem)) == 0


def test_an_optimizer_step_is_seen(experts: MegaMoE, problem: Problem, buffer: MoEBuffer) -> None:
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1)
    before = call(experts, problem)
    before.backward(problem.dy)
    optimizer.step()
    after = call(experts, problem)
    stepped = replace(problem, w_gate_up=experts.gate_up_proj.detach(), w_down=experts.down_proj.detach())
    assert torch.equal(after, mega_moe.moe(*stepped.inputs, buffer=buffer))
    assert not torch.equal(after, before)


def test_no_bias_is_accepted() -> None:
    with pytest.raises(TypeError, match="bias"):
        MegaMoE(H, INNER, E, bias=True)  # type: ignore[call-arg]


def test_repr_names_the_backend(experts: MegaMoE) -> None:
    assert repr(experts) == "MegaMoE(4 experts, hidden=64, intermediate=32, grouped)"
    assert "no buffer" in repr(MegaMoE(H, INNER, E))
