"""DeepGEMM's calls in fp8 on the fused backend, for whose kernels a fake stands in: values, launches and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_moe import BackendRefusedError, MegaMoEError
from mega_moe import deep_gemm as face
from mega_moe._backends.fused.launch import KernelRank
from mega_moe.testing import Gradients, Problem, random_problem

from ..gpu._face_fp8 import backward, both, fill, forward, pair, turned  # noqa: TID252
from ._fake_kernels import FakeKernels, fake_both, faked_kernels
from ._layer import assert_same_bits, make_buffer, results
from ._ranks import shared_world

_ = fake_both  # a fixture
TWO = shared_world(2)

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS, MOST = 8, 3, 512, 128, 60, 64


@pytest.fixture
def problem() -> Problem:
    return random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, masked=0.1)


def get_buffer(group: Any = None) -> face.SymmBuffer:
    return face.get_symm_buffer_for_mega_moe(
        group, EXPERTS, MOST, TOP_K, HIDDEN, INNER, mma_type="fp8xfp8", use_fp8_dispatch=True
    )


@pytest.fixture
def buffer(fake_both: FakeKernels) -> Iterator[face.SymmBuffer]:
    made = get_buffer()
    yield made
    made.destroy()


def emulated(problem: Problem, clamp: float | None = None) -> Gradients:
    with make_buffer(problem, "reference", "fp8") as reference:
        return results(problem, reference, clamp)


def ops(fake: FakeKernels) -> list[str]:
    return [launch.op for launch in fake.launches]


def test_x_and_its_scales_lie_in_the_memory_that_ranks_share(buffer: face.SymmBuffer) -> None:
    assert buffer.moe.backend == "fused"
    assert buffer.moe._live().prequantized is not None
    views = {"x": (torch.float8_e4m3fn, HIDDEN), "x_sf": (torch.float32, HIDDEN // 128)}
    views |= {"topk_idx": (torch.int64, TOP_K), "topk_weights": (torch.float32, TOP_K)}
    for name, (dtype, columns) in views.items():
        view = getattr(buffer, name)
        assert (view.dtype, tuple(view.shape), view.is_contiguous()) == (dtype, (MOST, columns), True)
    (memory, _) = buffer.moe._live().executor._kernels.memory  # type: ignore[attr-defined]
    for name in ("x", "x_sf"):
        assert getattr(buffer, name).untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    # No part reaches into the next.
    parts = [getattr(buffer, name).view(torch.uint8) for name in views]
    for at, part in enumerate(parts):
        for other in parts:
            other.zero_()
        part.fill_(1)
        assert [bool(other.any()) for other in parts] == [other == at for other in range(len(parts))]


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_both_directions_are_the_layers(
    problem: Problem, buffer: face.SymmBuffer, fake_both: FakeKernels, clamp: float | None
) -> None:
    want = emulated(problem, clamp)
    for _ in range(2):  # overwritten, not added
        assert_same_bits(both(buffer, problem, activation_clamp=clamp), want)
    assert ops(fake_both) == ["forward fp8", "backward fp8"] * 2
    assert fake_both.quantized == []  # the caller's codes are read as they are
    assert fake_both.fp8_forwards == [True, True]


@pytest.mark.parametrize("which", ["one fp32", "both fp32", "strided"])
def test_weight_gradients_of_any_form(problem: Problem, buffer: face.SymmBuffer, which: str) -> None:
    want = emulated(problem)
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    dtypes = {"one fp32": (torch.bfloat16, torch.float32), "both fp32": (torch.float32, torch.float32)}.get(
        which, (torch.bfloat16, torch.bfloat16)
    )
    dw1, dw2 = (
        torch.full_like(w, float("nan"), dtype=dtype)
        for w, dtype in zip((problem.w_gate_up, problem.w_down), dtypes, strict=True)
    )
    if which == "strided":
        dw1 = dw1.transpose(1, 2).contiguous().transpose(1, 2)
    fill(buffer, problem)
    dx, dtopk = torch.empty_like(problem.x), torch.empty_like(problem.topk_weights)
    face.fp8_mega_moe_backward(dx, dw1, dw2, dtopk, problem.dy, problem.x, l1, turned(l1), turned(l2), buffer)
    got = Gradients(want.y, dx, dtopk, dw1.bfloat16(), dw2.bfloat16())
    assert_same_bits(got, want)


def test_scales_are_the_callers(problem: Problem, buffer: face.SymmBuffer) -> None:
    """With four times as much in every scale, the layer is that of an x and of weights which are four times larger."""
    larger = Problem(
        problem.x * 4, problem.topk_idx, problem.topk_weights, problem.w_gate_up * 4, problem.w_down * 4,
        problem.dy,
    )  # fmt: skip
    fill(buffer, problem)
    assert buffer.x_sf is not None
    buffer.x_sf.mul_(4)
    y = torch.empty_like(problem.x)
    l1, l2 = ((codes, scales * 4) for codes, scales in (pair(problem.w_gate_up), pair(problem.w_down)))
    face.fp8_mega_moe(y, l1, l2, buffer)
    assert torch.equal(y, emulated(larger).y)


def test_a_scale_of_the_turned_copy_that_differs_makes_nan(problem: Problem, buffer: face.SymmBuffer) -> None:
    fill(buffer, problem)
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    codes, scales = turned(l1)
    scales[2, 1, 0] *= 2
    made = [torch.zeros_like(t) for t in (problem.x, problem.w_gate_up, problem.w_down, problem.topk_weights)]
    face.fp8_mega_moe_backward(*made, problem.dy, problem.x, l1, (codes, scales), turned(l2), buffer)
    reached = (problem.topk_idx == 2).any(1)
    assert 0 < int(reached.sum()) < TOKENS
    assert bool(made[0][reached].isnan().any(1).all())
    assert bool(made[0][~reached].isfinite().all())


def test_received_rows_are_added_and_no_other_launch_counts_them(
    problem: Problem, buffer: face.SymmBuffer, fake_both: FakeKernels
) -> None:
    stats = torch.arange(EXPERTS, dtype=torch.int32)
    for _ in range(2):
        forward(buffer, problem, cumulative_local_expert_recv_stats=stats)
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert stats.tolist() == (2 * torch.bincount(ids, minlength=EXPERTS) + torch.arange(EXPERTS)).tolist()
    assert ops(fake_both) == ["forward fp8"] * 2


def test_no_token_and_all_tokens(problem: Problem, buffer: face.SymmBuffer) -> None:
    empty = problem.tokens(slice(0, 0))
    assert forward(buffer, empty).shape == (0, HIDDEN)
    dx, dtopk, dw1, dw2 = backward(buffer, empty)
    assert (dx.shape, dtopk.shape) == ((0, HIDDEN), (0, TOP_K))
    assert not dw1.any()
    assert not dw2.any()
    forward(buffer, random_problem(MOST, HIDDEN, INNER, EXPERTS, TOP_K))
    weights = pair(problem.w_gate_up), pair(problem.w_down)
    with pytest.raises(ValueError, match=f"y: got 65 tokens, the buffer was built for {MOST} per rank"):
        face.fp8_mega_moe(problem.x.new_zeros(65, HIDDEN), *weights, buffer)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"activation": "gelu"}, ValueError, "activation: got 'gelu', want 'swiglu'"),
        ({"activation_clamp": -1.0}, ValueError, "activation_clamp: got -1.0, want None or a number > 0"),
        ({"activation_clamp": "1"}, TypeError, "activation_clamp: got str"),
        ({"recipe": (1, 128, 128)}, ValueError, r"recipe: got \(1, 128, 128\), want \(128, 128, 128\)"),
        ({"recipe": None}, ValueError, "recipe: got None"),
        (
            {"shared_l2_weights": (1, 2)},
            ValueError,
            "shared_l2_weights: got tuple, want None: shared experts",
        ),
        ({"num_tokens_bound": 59}, ValueError, "num_tokens_bound: got 59, want at least the 60 tokens of y"),
        ({"num_tokens_bound": 60.0}, TypeError, r"num_tokens_bound: got 60.0 \(float\), want an int"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(8)},
            TypeError,
            r"cumulative_local_expert_recv_stats: got torch.float32, want torch.int32",
        ),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(7, dtype=torch.int32)},
            ValueError,
            r"cumulative_local_expert_recv_stats: got shape \(7,\), want \(8\)",
        ),
    ],
)
def test_options_that_are_not_served(
    options: dict[str, Any],
    error: type[Exception],
    match: str,
    problem: Problem,
    buffer: face.SymmBuffer,
    fake_both: FakeKernels,
) -> None:
    with pytest.raises(error, match=f"^{match}"):
        forward(buffer, problem, **options)
    assert ops(fake_both) == []


def test_options_that_change_nothing(problem: Problem, buffer: face.SymmBuffer) -> None:
    want = forward(buffer, problem)
    changes: tuple[dict[str, Any], ...] = (
        {"num_tokens_bound": 60},
        {"num_tokens_bound": 10**6},
        {"recipe": [128, 128, 128]},
        {"fast_math": False},
    )
    for options in changes:
        assert torch.equal(forward(buffer, problem, **options), want)


def test_bad_tensors_of_the_forward_are_named(problem: Problem, buffer: face.SymmBuffer) -> None:
    y, l1, l2 = problem.x.clone(), pair(problem.w_gate_up), pair(problem.w_down)
    for error, match, call in (
        (TypeError, "y: got torch.float32", (y.float(), l1, l2, buffer)),
        (ValueError, r"y: got shape \(60, 256\), want \(T, 512\)", (y[:, :256], l1, l2, buffer)),
        (
            TypeError,
            "l1_weights: got Tensor, want a pair of tensors",
            (y, problem.w_gate_up, l2, buffer),
        ),
        (TypeError, "l1_weights: got 1 of them, want a pair", (y, l1[:1], l2, buffer)),
        (TypeError, r"l1_weights\[0\]: got torch.bfloat16", (y, (problem.w_gate_up, l1[1]), l2, buffer)),
        (TypeError, r"l2_weights\[1\]: got torch.float64", (y, l1, (l2[0], l2[1].double()), buffer)),
        (
            ValueError,
            r"l1_weights\[0\]: got shape \(8, 512, 128\), want \(8, 256, 512\)",
            (y, l2, l2, buffer),
        ),
        (
            ValueError,
            r"l1_weights\[1\]: got shape \(8, 4, 2\), want \(8, 2, 4\)",
            (y, (l1[0], turned(l1)[1]), l2, buffer),
        ),
        (ValueError, r"l2_weights\[0\]: got shape \(7, 512, 128\)", (y, l1, (l2[0][:7], l2[1]), buffer)),
        (TypeError, "sym_buffer: got int, want what get_symm_buffer_for_mega_moe", (y, l1, l2, 1)),
    ):
        with pytest.raises(error, match=f"^{match}"):
            face.fp8_mega_moe(*call)  # type: ignore[arg-type]


def test_bad_tensors_of_the_backward_are_named(problem: Problem, buffer: face.SymmBuffer) -> None:
    dx, dtopk, dw1, dw2 = backward(buffer, problem)
    l1, l2 = pair(problem.w_gate_up), pair(problem.w_down)
    good: dict[str, Any] = {
        "dx": dx, "dw1": dw1, "dw2": dw2, "dtopk": dtopk, "dy": problem.dy, "x": problem.x,
        "l1": l1, "l1_t": turned(l1), "l2_t": turned(l2),
    }  # fmt: skip
    face.fp8_mega_moe_backward(**good, sym_buffer=buffer)
    for name in ("dx", "dw1", "dw2", "dtopk", "dy", "x"):
        with pytest.raises(TypeError, match=f"^{name}: got torch.float64"):
            face.fp8_mega_moe_backward(**{**good, name: good[name].double()}, sym_buffer=buffer)
        if name != "dy":  # which gives T
            with pytest.raises(ValueError, match=rf"^{name}: got shape \(\d+, .*, want \("):
                face.fp8_mega_moe_backward(**{**good, name: good[name][1:]}, sym_buffer=buffer)
    for name in ("l1", "l1_t", "l2_t"):
        codes, scales = good[name]
        with pytest.raises(ValueError, match=rf"^{name}\[0\]: got shape"):
            face.fp8_mega_moe_backward(**{**good, name: turned((codes, scales))}, sym_buffer=buffer)
        with pytest.raises(TypeError, match=rf"^{name}\[1\]: got torch.float8_e4m3fn, want torch.float32"):
            face.fp8_mega_moe_backward(**{**good, name: (codes, codes)}, sym_buffer=buffer)
    with pytest.raises(ValueError, match=r"^activation_clamp: got 0"):
        face.fp8_mega_moe_backward(**good, sym_buffer=buffer, activation_clamp=0)


def test_a_destroyed_buffer_says_so(problem: Problem, fake_both: FakeKernels) -> None:
    buffer = get_buffer()
    buffer.destroy()
    assert buffer.x is None
    assert buffer.x_sf is None
    with pytest.raises(MegaMoEError, match="was destroyed"):
        face.fp8_mega_moe(problem.x, pair(problem.w_gate_up), pair(problem.w_down), buffer)


def test_another_backend_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_BACKEND", "reference")
    buffer = get_buffer()
    y = torch.zeros(4, HIDDEN, dtype=torch.bfloat16)
    two = (y, y)
    assert buffer.x is not None
    assert buffer.x_sf is not None
    assert (buffer.x.dtype, tuple(buffer.x_sf.shape)) == (torch.float8_e4m3fn, (MOST, HIDDEN // 128))
    reasons = "backend reference quantizes by itself.*fused: .*needs an NVIDIA GPU"
    with pytest.raises(BackendRefusedError, match=f"fp8_mega_moe: {reasons}"):
        face.fp8_mega_moe(y, two, two, buffer)
    with pytest.raises(BackendRefusedError, match=f"fp8_mega_moe_backward: {reasons}"):
        face.fp8_mega_moe_backward(y, y, y, y, y, y, two, two, two, buffer)
    buffer.destroy()


def test_no_memory_for_a_call_is_told_to_the_other_ranks(
    problem: Problem, buffer: face.SymmBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(KernelRank, "refuse", lambda self, tokens: told.append(tokens))

    def none(self: KernelRank) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(KernelRank, "new_summary", none)
    for call in (forward, backward):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            call(buffer, problem)
    assert told == [0, 0]


def refused_by_one(rank: int) -> list[str]:
    """What each rank launches when rank 0's arguments are bad, in the forward and then in the backward."""
    with faked_kernels(backward=True) as fake:
        own = random_problem(TOKENS, HIDDEN, INNER, EXPERTS, TOP_K)
        mine = Problem(*own.inputs[:3], own.w_gate_up[:4], own.w_down[:4], own.dy)
        buffer = get_buffer(dist.group.WORLD)
        forward(buffer, mine)
        if rank == 0:
            for call, match in ((forward, "num_tokens_bound"), (backward, "activation_clamp")):
                options: dict[str, Any] = (
                    {"num_tokens_bound": 1} if call is forward else {"activation_clamp": -1}
                )
                with pytest.raises(ValueError, match=match):
                    call(buffer, mine, **options)
        else:
            forward(buffer, mine)
            backward(buffer, mine)
        said = ops(fake)
        buffer.destroy()
        return said


def test_a_refusal_is_told_to_the_other_rank() -> None:
    first, second = TWO.values(refused_by_one)
    assert first == ["forward fp8", "refuse", "refuse"]
    assert second == ["forward fp8", "forward fp8", "backward fp8"]
