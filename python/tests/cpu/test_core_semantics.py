"""What the layer computes: every plain backend and dtype against fp64, over counts, slots, masks and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe._backends.plain import activation, grouped, reference
from mega_moe._backends.plain import executor as plain
from mega_moe.testing import Gradients, Problem, fp64_moe, fp64_moe_grads, random_problem, relative_l2

from ._layer import (
    CASES,
    Case,
    assert_close,
    assert_same_bits,
    bits,
    exact,
    make_buffer,
    poisoned_memory,
    results,
    worst_errors,
)

cases = pytest.mark.parametrize("case", CASES, ids=str)
REFERENCE = [case for case in CASES if case.backend == "reference"]


def run(problem: Problem, case: Case, clamp: float | None = None) -> Gradients:
    with make_buffer(problem, case.backend) as buffer:
        return results(problem, buffer, clamp)


def scalar_moe(problem: Problem, clamp: float | None) -> Tensor:
    """The layer once more, slot by slot with vectors: what `fp64_moe` itself is checked against."""
    y = torch.zeros_like(problem.x)
    for token, (ids, weights) in enumerate(zip(problem.topk_idx.tolist(), problem.topk_weights.tolist())):
        for expert, weight in zip(ids, weights):
            if expert < 0:
                continue
            z = problem.w_gate_up[expert] @ problem.x[token]
            gate, up = z[: len(z) // 2], z[len(z) // 2 :]
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            y[token] += weight * (problem.w_down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return y


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_the_fp64_reference_is_the_definition(clamp: float | None) -> None:
    problem = random_problem(9, 16, 12, 4, 3, dtype=torch.float64, masked=0.3)
    assert relative_l2(fp64_moe(*problem.inputs, clamp), scalar_moe(problem, clamp)) <= 1e-14
    leaves = [t.clone().requires_grad_() for t in problem.inputs if t.is_floating_point()]

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return fp64_moe(x, problem.topk_idx, weights, gate_up, down, clamp)

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)


@cases
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_matches_fp64(case: Case, top_k: int) -> None:
    problem = random_problem(64, 256, 128, 8, top_k, dtype=case.dtype, masked=0.1)
    assert_close(run(problem, case), exact(problem), case.tolerance)


# bf16 rounding moves values over the clamp's edge, where fp64 has no say: see test_core_precision for bf16.
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != torch.bfloat16], ids=str)
@pytest.mark.parametrize("clamp", [0.75, 1e9])
def test_clamp_matches_fp64(case: Case, clamp: float) -> None:
    problem = random_problem(64, 128, 64, 8, 2, dtype=case.dtype)
    assert_close(run(problem, case, clamp), exact(problem, clamp), case.tolerance)


@cases
def test_ragged_counts(case: Case) -> None:
    problem = random_problem(
        hidden=128, intermediate=64, counts=[0, 1, 63, 64, 65, 127, 128, 129, 2048], dtype=case.dtype
    )
    assert_close(run(problem, case), exact(problem), case.tolerance)


@cases
def test_sizes_that_are_multiples_of_nothing(case: Case) -> None:
    problem = random_problem(37, 50, 23, 5, 3, dtype=case.dtype)
    got, want = run(problem, case), exact(problem)
    # The rows are short, so one token's error strays further from the mean: the promise is for the whole.
    for name, a, b in zip(want._fields, got, want):
        assert relative_l2(a, b) <= case.tolerance, name


@cases
@pytest.mark.parametrize(
    "counts",
    [[0, 130, 40], [130, 0, 40], [130, 40, 0], [0, 0, 70, 0, 300, 0]],
    ids=["first", "middle", "last", "many"],
)
def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero(case: Case, counts: list[int]) -> None:
    problem = random_problem(hidden=128, intermediate=64, counts=counts, dtype=case.dtype)
    with poisoned_memory():
        got = run(problem, case)
    for expert, count in enumerate(counts):
        for dw in (got.dw_gate_up[expert], got.dw_down[expert]):
            assert bool(torch.count_nonzero(dw)) == bool(count)
    assert_close(got, exact(problem), case.tolerance)


@cases
def test_no_tokens(case: Case) -> None:
    problem = random_problem(4, 128, 64, 3, 2, dtype=case.dtype).tokens(slice(0, 0))
    with poisoned_memory():
        got = run(problem, case)
    assert got.y.shape == got.dx.shape == (0, 128)
    assert got.dtopk.shape == (0, 2)
    assert torch.equal(got.dw_gate_up, torch.zeros(3, 128, 128, dtype=case.dtype))
    assert torch.equal(got.dw_down, torch.zeros(3, 128, 64, dtype=case.dtype))


@cases
@pytest.mark.parametrize("experts", [1, 4])
def test_sixteen_slots_with_one_expert_in_several(case: Case, experts: int) -> None:
    problem = random_problem(40, 128, 64, 16, 1, dtype=case.dtype)
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, experts, (40, 16), generator=rng)
    # All positive: slots of one expert would cancel, and leave a result of rounding alone.
    weights = torch.rand(40, 16, generator=rng).to(problem.topk_weights.dtype)
    problem = replace(problem, topk_idx=ids, topk_weights=weights)
    assert_close(run(problem, case), exact(problem), case.tolerance)


@cases
def test_masked_slots(case: Case) -> None:
    problem = random_problem(64, 128, 64, 8, 4, dtype=case.dtype, masked=0.4)
    problem.topk_idx[:5] = -1
    masked = problem.topk_idx < 0
    got = run(problem, case)
    assert_close(got, exact(problem), case.tolerance)
    for value in (got.y[:5], got.dx[:5], got.dtopk[masked]):
        assert torch.count_nonzero(value) == 0
    spoiled = problem.topk_weights.masked_fill(masked, float("nan"))
    assert_same_bits(run(replace(problem, topk_weights=spoiled), case), got)


@cases
def test_every_slot_masked(case: Case) -> None:
    problem = random_problem(16, 128, 64, 4, 2, dtype=case.dtype, masked=1.1)
    with poisoned_memory():
        got = run(problem, case)
    for name, value in got._asdict().items():
        assert torch.count_nonzero(value) == 0, name


@cases
def test_weights_of_any_sign_are_used_as_given(case: Case) -> None:
    problem = random_problem(64, 128, 64, 8, 4, dtype=case.dtype)
    weights = torch.randn(64, 4, generator=torch.Generator().manual_seed(5)).to(problem.topk_weights.dtype)
    weights[:, 1] = 0
    weights[:3] = 0
    problem = replace(problem, topk_weights=weights)
    got = run(problem, case)
    assert_close(got, exact(problem), case.tolerance)
    assert torch.count_nonzero(got.y[:3]) == 0
    assert torch.count_nonzero(got.dtopk[:3]) == got.dtopk[:3].numel()  # a weight of zero still learns
    for factor in (2.0, 0.25, -1.0):
        scaled = run(replace(problem, topk_weights=weights * factor), case)
        assert torch.equal(scaled.y, got.y * factor)
        assert torch.equal(scaled.dx, got.dx * factor)
        assert torch.equal(scaled.dtopk, got.dtopk)


@cases
def test_linear_in_each_slot(case: Case) -> None:
    problem = random_problem(32, 128, 64, 8, 2, dtype=case.dtype)
    first, second = (problem.topk_weights.clone() for _ in range(2))
    first[:, 1] = 0
    second[:, 0] = 0
    parts = [run(replace(problem, topk_weights=w), case).y.double() for w in (first, second)]
    assert relative_l2(parts[0] + parts[1], run(problem, case).y) <= case.tolerance


@cases
def test_id_dtypes_give_the_same_bits(case: Case) -> None:
    problem = random_problem(64, 128, 64, 8, 2, dtype=case.dtype, masked=0.2)
    narrow = replace(problem, topk_idx=problem.topk_idx.int())
    assert problem.topk_idx.dtype == torch.int64
    assert_same_bits(run(narrow, case), run(problem, case))


@cases
def test_bf16_weights_are_cast_up(case: Case) -> None:
    problem = random_problem(64, 128, 64, 8, 8, dtype=case.dtype)
    coarse = problem.topk_weights.bfloat16()
    got = run(replace(problem, topk_weights=coarse), case)
    want = run(replace(problem, topk_weights=coarse.to(problem.topk_weights.dtype)), case)
    assert got.dtopk.dtype == torch.bfloat16
    assert_same_bits(got, want._replace(dtopk=want.dtopk.bfloat16()))


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_the_sum_over_slots_is_wide(backend: str) -> None:
    problem = random_problem(64, 128, 64, 8, 8)
    with make_buffer(problem, backend) as buffer:
        y = results(problem, buffer).y.double()
        slots = torch.zeros_like(y)
        for slot in range(8):
            alone = problem.topk_idx.clone()
            alone[:, [s for s in range(8) if s != slot]] = -1
            slots += results(replace(problem, topk_idx=alone), buffer).y.double()
    # The slots' own rounding is in both; rounding the sum costs at most 2^-8 of it, fp32 sums 2^-24 of the slots.
    assert ((y - slots).abs() <= slots.abs() * 2**-8 + 1e-5).all()


@cases
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_token_spoils_its_own_rows_and_its_experts_only(case: Case, value: float) -> None:
    problem = random_problem(48, 128, 64, 8, 2, dtype=case.dtype)
    x = problem.x.clone()
    x[7, 3] = value
    clean, got = run(problem, case), run(replace(problem, x=x), case)
    others = torch.arange(48) != 7
    for name in ("y", "dx", "dtopk"):
        assert torch.equal(getattr(got, name)[others], getattr(clean, name)[others]), name
    assert not got.y[7].isfinite().any()
    untouched = [e for e in range(8) if e not in problem.topk_idx[7].tolist()]
    for name in ("dw_gate_up", "dw_down"):
        assert torch.equal(getattr(got, name)[untouched], getattr(clean, name)[untouched]), name


@cases
def test_weights_of_an_expert_without_tokens_are_never_read(case: Case) -> None:
    problem = random_problem(hidden=128, intermediate=64, counts=[30, 0, 40], dtype=case.dtype)
    clean = run(problem, case)
    for value in (float("nan"), 3e38):
        spoiled = replace(problem, w_gate_up=problem.w_gate_up.clone(), w_down=problem.w_down.clone())
        spoiled.w_gate_up[1] = spoiled.w_down[1] = value
        assert_same_bits(run(spoiled, case), clean)


@cases
def test_three_passes_in_poisoned_memory(case: Case) -> None:
    problem = random_problem(64, 256, 128, 8, 2, dtype=case.dtype, masked=0.1)
    with make_buffer(problem, case.backend) as buffer:
        want = results(problem, buffer)
        for _ in range(3):
            with poisoned_memory():
                got = results(problem, buffer)
            assert_same_bits(got, want)
    assert_close(want, exact(problem), case.tolerance)


@pytest.mark.parametrize("case", REFERENCE, ids=str)
def test_reference_repeats_its_bits(case: Case) -> None:
    problem = random_problem(80, 128, 72, 8, 4, dtype=case.dtype, masked=0.1)
    with make_buffer(problem, case.backend) as buffer:
        want = results(problem, buffer)
        for _ in range(5):
            assert_same_bits(results(problem, buffer), want)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [c for c in REFERENCE if c.dtype != torch.float64], ids=str)
def test_a_token_of_the_reference_does_not_see_its_batch(case: Case, two_threads: None) -> None:
    # 2001 rows of 100 numbers: torch splits them over threads in the middle of a row.
    problem = random_problem(2001, 64, 100, 3, 2, dtype=case.dtype)
    with make_buffer(problem, case.backend) as buffer:
        full = results(problem, buffer)
        order = torch.randperm(2001, generator=torch.Generator().manual_seed(1))
        for rows in (slice(0, 1), slice(1000, 1001), slice(700, 1801), order):
            part = results(problem.tokens(rows), buffer)  # type: ignore[arg-type]
            for name in ("y", "dx", "dtopk"):
                assert torch.equal(bits(getattr(part, name)), bits(getattr(full, name)[rows])), (name, rows)


def test_an_expert_bias_is_no_argument() -> None:
    problem = random_problem(4, 128, 64, 2, 1)
    with make_buffer(problem) as buffer, pytest.raises(TypeError, match="bias"):
        mega_moe.moe(*problem.inputs, buffer=buffer, bias=torch.zeros(2, 128))  # type: ignore[call-arg]


# Faults planted in the code: each must make the comparison above fail.


def drop_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = plain.PlainExecutor._combine
    monkeypatch.setattr(
        plain.PlainExecutor,
        "_combine",
        lambda self, rows, tables, *rest: kept(self, rows.index_fill(0, torch.tensor([0]), 0), tables, *rest),
    )


def swap_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(z: Tensor, *rest: object) -> Tensor:
        return activation.activate(z.roll(z.shape[1] // 2, 1), *rest)  # type: ignore[arg-type]

    for module in (reference, grouped):
        monkeypatch.setattr(module, "activate", swapped)


def change_gradients(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for owner in (reference.ReferenceArithmetic, grouped.GroupedArithmetic):
            kept = owner.backward

            def backward(*args: object, kept: Callable[..., object] = kept) -> object:
                grads = kept(*args)
                return grads._replace(**{name: change(getattr(grads, name))})  # type: ignore[attr-defined]

            monkeypatch.setattr(owner, "backward", backward)

    return plant


def last_expert_unwritten(dw: Tensor) -> Tensor:
    dw = dw.clone()
    dw[-1] = float("nan")
    return dw


MUTATIONS = {
    "drop a slot": (drop_a_slot, "y"),
    "swap gate and up": (swap_gate_and_up, "y"),
    "zero dW1": (change_gradients("dw_gate_up", torch.zeros_like), "dw_gate_up"),
    "zero dW2": (change_gradients("dw_down", torch.zeros_like), "dw_down"),
    "dW2 of an expert unwritten": (change_gradients("dw_down", last_expert_unwritten), "dw_down"),
    "experts of dW1 in another order": (change_gradients("dw_gate_up", lambda t: t.flip(0)), "dw_gate_up"),
    "dW1 twice": (change_gradients("dw_gate_up", lambda t: 2 * t), "dw_gate_up"),
    "zero dtopk": (change_gradients("dtopk", torch.zeros_like), "dtopk"),
    "dx off by two percent": (change_gradients("dx", lambda t: 1.02 * t), "dx"),
}


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_planted_fault_fails_the_comparison(
    case: Case, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(64, 128, 64, 8, 2)
    plant, broken = MUTATIONS[mutation]
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    assert_close(run(problem, case), want, case.tolerance)
    plant(monkeypatch)
    assert worst_errors(run(problem, case), want)[broken] > case.tolerance
