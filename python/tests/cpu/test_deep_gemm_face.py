"""DeepGEMM's names on this library: their order of arguments, what they write, and every refusal with its reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe import BackendRefusedError, MegaMoEError, PeerError
from mega_moe import deep_gemm as face
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, random_problem, relative_l2

from ._ep import part
from ._layer import assert_same_bits, results
from ._ranks import shared_world

pytestmark = pytest.mark.filterwarnings("ignore::mega_moe.FallbackWarning")
TWO = shared_world(2)
CLAMP = 0.7

# The order that callers rely on.
ORDER = {
    "get_symm_buffer_for_mega_moe": "group num_experts num_max_tokens_per_rank num_topk hidden intermediate_hidden "
    "num_shared_experts use_fp8_dispatch mma_type activation",
    "bf16_mega_moe": "y l1_weights l2_weights sym_buffer shared_l1_weights shared_l2_weights "
    "cumulative_local_expert_recv_stats activation activation_clamp fast_math",
    "bf16_mega_moe_backward": "dx dw1 dw2 dtopk dy l1_weights l2_weights sym_buffer shared_l1_weights "
    "shared_l2_weights shared_dw1_weights shared_dw2_weights activation activation_clamp fast_math dw_natural_layout",
    "fp8_mega_moe": "y l1_weights l2_weights sym_buffer cumulative_local_expert_recv_stats recipe activation "
    "activation_clamp fast_math num_tokens_bound",
    "fp8_mega_moe_backward": "dx dw1 dw2 dtopk dy x l1 l1_t l2_t sym_buffer activation_clamp",
}


@pytest.mark.parametrize("name", ORDER)
def test_argument_order(name: str) -> None:
    parameters = inspect.signature(getattr(face, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ORDER[name].split()


# Calls as trainers and servers write them: positional arguments, keywords.
AS_CALLED = {
    "get_symm_buffer_for_mega_moe": [(6, "num_shared_experts mma_type"), (6, "mma_type activation"), (6, "")],
    "transform_weights_for_mega_moe": [(2, ""), (3, "")],
    "transform_weights_for_mega_moe_sm90": [(2, ""), (4, "")],
    "bf16_mega_moe": [
        (4, "activation_clamp"),
        (4, "activation_clamp l1_natural_layout"),
        (4, "shared_l1_weights shared_l2_weights activation fast_math"),
        (0, "y l1_weights l2_weights sym_buffer cumulative_local_expert_recv_stats activation_clamp fast_math"),
    ],
    "bf16_mega_moe_backward": [
        (8, "activation_clamp dw_natural_layout l1_natural_layout"),
        (8, "shared_l1_weights shared_l2_weights shared_dw1_weights shared_dw2_weights activation_clamp fast_math"),
    ],
    "fp8_mega_moe": [
        (4, "recipe activation activation_clamp fast_math"),
        (4, "cumulative_local_expert_recv_stats recipe activation activation_clamp fast_math num_tokens_bound"),
        (4, "shared_l1_weights shared_l2_weights cumulative_local_expert_recv_stats recipe"),
    ],
    "fp8_mega_moe_backward": [(10, "activation_clamp")],
}  # fmt: skip


@pytest.mark.parametrize("name", AS_CALLED)
def test_calls_as_others_write_them(name: str) -> None:
    for positional, keywords in AS_CALLED[name]:
        inspect.signature(getattr(face, name)).bind(*[None] * positional, **dict.fromkeys(keywords.split()))


@pytest.fixture
def problem() -> Problem:
    return random_problem(48, 64, 32, 8, 2, masked=0.1)


def get_buffer(group: Any = None, tokens: int = 64, **changes: Any) -> face.SymmBuffer:
    return face.get_symm_buffer_for_mega_moe(
        group, 8, tokens, 2, 64, 32, **{"mma_type": "bf16xbf16", **changes}
    )


@pytest.fixture
def buffer() -> Iterator[face.SymmBuffer]:
    made = get_buffer()
    yield made
    made.destroy()


def fill(buffer: face.SymmBuffer, problem: Problem) -> None:
    tokens = len(problem.x)
    assert buffer.x is not None
    assert buffer.topk_idx is not None
    assert buffer.topk_weights is not None
    # What no token uses must not matter.
    buffer.x.fill_(float("nan"))
    buffer.topk_idx.fill_(10**6)
    buffer.topk_weights.fill_(float("nan"))
    buffer.x[:tokens] = problem.x
    buffer.topk_idx[:tokens] = problem.topk_idx
    buffer.topk_weights[:tokens] = problem.topk_weights


def forward(buffer: face.SymmBuffer, problem: Problem, **options: Any) -> Tensor:
    fill(buffer, problem)
    y = torch.full_like(problem.x, float("nan"))
    assert face.bf16_mega_moe(y, problem.w_gate_up, problem.w_down, buffer, **options) is None  # type: ignore[func-returns-value]
    return y


def backward(
    buffer: face.SymmBuffer, problem: Problem, dw: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Tensor, ...]:
    """dx, dtopk, dw1, dw2, each written over NaN."""
    fill(buffer, problem)
    nan = float("nan")
    dx, dtopk = torch.full_like(problem.x, nan), torch.full_like(problem.topk_weights, nan)
    dw1, dw2 = (torch.full_like(w, nan, dtype=dw) for w in (problem.w_gate_up, problem.w_down))
    face.bf16_mega_moe_backward(
        dx, dw1, dw2, dtopk, problem.dy, problem.w_gate_up, problem.w_down, buffer, **options
    )
    return dx, dtopk, dw1, dw2


def test_views_of_the_buffer(buffer: face.SymmBuffer) -> None:
    shapes = {"x": (64, 64), "x_sf": (64, 0), "topk_idx": (64, 2), "topk_weights": (64, 2)}
    dtypes = {
        "x": torch.bfloat16,
        "x_sf": torch.float32,
        "topk_idx": torch.int64,
        "topk_weights": torch.float32,
    }
    for name, shape in shapes.items():
        view = getattr(buffer, name)
        assert (tuple(view.shape), view.dtype) == (shape, dtypes[name])
        if view.numel():
            assert view.untyped_storage().data_ptr() == buffer.buffer.untyped_storage().data_ptr()  # type: ignore[union-attr]
    assert (buffer.num_topk, buffer.mma_type, buffer.group) == (2, "bf16xbf16", None)
    # No part reaches into the next.
    for name in ("x", "topk_idx", "topk_weights"):
        for other in ("x", "topk_idx", "topk_weights"):
            getattr(buffer, other).zero_()
        getattr(buffer, name).fill_(1)
        assert [o for o in ("x", "topk_idx", "topk_weights") if getattr(buffer, o).any()] == [name]


@pytest.mark.parametrize("dw", [torch.bfloat16, torch.float32])
def test_forward_and_backward_against_fp64(
    dw: torch.dtype, buffer: face.SymmBuffer, problem: Problem
) -> None:
    want = fp64_moe_grads(problem.dy, *problem.inputs)
    assert relative_l2(forward(buffer, problem), want.y) < 6e-3
    for _ in range(2):  # overwritten, not added
        dx, dtopk, dw1, dw2 = backward(buffer, problem, dw)
        for got, exact in ((dx, want.dx), (dtopk, want.dtopk), (dw1, want.dw_gate_up), (dw2, want.dw_down)):
            assert relative_l2(got, exact) < 6e-3


def test_the_clamp_is_that_of_the_layer(buffer: face.SymmBuffer, problem: Problem) -> None:
    """Against the layer itself: next to the clamp a rounding decides whether a gradient is cut."""
    want = results(problem, buffer.moe, CLAMP)
    assert relative_l2(results(problem, buffer.moe).y, want.y) > 5e-2
    y = forward(buffer, problem, activation_clamp=CLAMP)
    dx, dtopk, dw1, dw2 = backward(buffer, problem, activation_clamp=CLAMP)
    assert_same_bits(Gradients(y, dx, dtopk, dw1, dw2), want)


def test_weights_go_through_as_they_are(buffer: face.SymmBuffer, problem: Problem) -> None:
    for transform in (face.transform_weights_for_mega_moe, face.transform_weights_for_mega_moe_sm90):
        l1, l2 = transform(problem.w_gate_up, problem.w_down, l1_natural_layout=True)
        assert l1 is problem.w_gate_up
        assert l2 is problem.w_down
        pairs = (problem.w_gate_up, problem.w_down), (problem.w_down, problem.w_gate_up)
        assert transform(*pairs) == pairs


def test_received_rows_are_added_to_the_statistics(buffer: face.SymmBuffer, problem: Problem) -> None:
    stats = torch.arange(8, dtype=torch.int32)
    for _ in range(2):
        forward(buffer, problem, cumulative_local_expert_recv_stats=stats)
    ids = problem.topk_idx[problem.topk_idx >= 0]
    assert stats.tolist() == (2 * torch.bincount(ids, minlength=8) + torch.arange(8)).tolist()


def test_no_token_and_all_tokens(buffer: face.SymmBuffer, problem: Problem) -> None:
    empty = problem.tokens(slice(0, 0))
    assert forward(buffer, empty).shape == (0, 64)
    dx, dtopk, dw1, dw2 = backward(buffer, empty)
    assert (dx.shape, dtopk.shape) == ((0, 64), (0, 2))
    assert not dw1.any()
    assert not dw2.any()
    forward(buffer, random_problem(64, 64, 32, 8, 2))
    with pytest.raises(ValueError, match="y: got 65 tokens, the buffer was built for 64 per rank"):
        face.bf16_mega_moe(problem.x.new_zeros(65, 64), problem.w_gate_up, problem.w_down, buffer)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"mma_type": "fp8xfp4"},
            "mma_type: got 'fp8xfp4', want one of bf16xbf16, fp8xfp8; fp4 weights need Blackwell.*fp8_mega_moe wants",
        ),
        ({"mma_type": "int8"}, "mma_type: got 'int8', want one of"),
        ({"num_shared_experts": 1}, "num_shared_experts: got 1, want 0"),
        ({"use_fp8_dispatch": True}, "use_fp8_dispatch: got True"),
        ({"activation": "gelu"}, "activation: got 'gelu', want 'swiglu'"),
    ],
)
def test_a_buffer_that_is_not_served(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        get_buffer(**changes)


def test_the_default_mma_type_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="Blackwell"):
        face.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 64, 32)


def test_fp8_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch, buffer: face.SymmBuffer) -> None:
    with pytest.raises(BackendRefusedError, match="needs an NVIDIA GPU, the device is cpu"):
        face.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 256, 128, mma_type="fp8xfp8")
    y = torch.zeros(4, 64, dtype=torch.bfloat16)
    pair = (y, y)
    with pytest.raises(ValueError, match="its mma_type is bf16xbf16, this call wants fp8xfp8"):
        face.fp8_mega_moe(y, pair, pair, buffer)
    monkeypatch.setenv("MEGA_MOE_BACKEND", "reference")
    named = face.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 256, 128, mma_type="fp8xfp8")
    assert named.x is not None
    assert named.x_sf is not None
    assert (named.x.dtype, tuple(named.x_sf.shape)) == (torch.float8_e4m3fn, (64, 2))
    reasons = "reference quantizes by itself.*fused: .*needs an NVIDIA GPU"
    with pytest.raises(BackendRefusedError, match=f"fp8_mega_moe: backend {reasons}"):
        face.fp8_mega_moe(y, pair, pair, named)
    with pytest.raises(BackendRefusedError, match=f"fp8_mega_moe_backward: backend {reasons}"):
        face.fp8_mega_moe_backward(y, y, y, y, y, y, pair, pair, pair, named)
    with pytest.raises(ValueError, match="its mma_type is fp8xfp8, this call wants bf16xbf16"):
        face.bf16_mega_moe(y, y, y, named)


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "gelu"}, "activation: got 'gelu'"),
        (
            {"shared_l1_weights": torch.zeros(1)},
            "shared_l1_weights: got Tensor, want None: shared experts are no",
        ),
        (
            {"shared_l2_weights": torch.zeros(1)},
            "shared_l2_weights: got Tensor, want None: shared experts are no",
        ),
        ({"activation_clamp": -1.0}, "activation_clamp: got -1.0"),
        ({"l1_natural_layout": False}, "l1_natural_layout: got False, want True: .*interleaved by 8"),
    ],
)
def test_options_that_are_not_served(
    call: str, options: dict[str, Any], match: str, buffer: face.SymmBuffer, problem: Problem
) -> None:
    with pytest.raises(ValueError, match=match):
        (forward if call == "forward" else backward)(buffer, problem, **options)


def test_interleaved_gradients_and_weights_are_refused(buffer: face.SymmBuffer, problem: Problem) -> None:
    with pytest.raises(ValueError, match=r"dw_natural_layout: got False, want True: .*natural order"):
        backward(buffer, problem, dw_natural_layout=False)
    with pytest.raises(ValueError, match="l1_natural_layout: got False"):
        face.transform_weights_for_mega_moe(problem.w_gate_up, problem.w_down, l1_natural_layout=False)


def test_shared_experts_are_refused_by_name(buffer: face.SymmBuffer, problem: Problem) -> None:
    """Where DeepGEMM's versions and forks take them: as results, at the transform, in the place of the statistics."""
    part = torch.zeros(8, dtype=torch.int32)
    for name in ("shared_dw1_weights", "shared_dw2_weights"):
        with pytest.raises(ValueError, match=f"^{name}: got Tensor, want None"):
            backward(buffer, problem, **{name: part})
    l1, l2 = problem.w_gate_up, problem.w_down
    with pytest.raises(ValueError, match=r"^shared_l1_weights: got Tensor, want None"):
        face.transform_weights_for_mega_moe_sm90(l1, l2, l1, l2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^shared_l1_weights: got Tensor, want None"):
        face.bf16_mega_moe(problem.x.clone(), l1, l2, buffer, part)  # an older order of arguments


def test_bad_tensors_are_named(buffer: face.SymmBuffer, problem: Problem) -> None:
    y, l1, l2 = problem.x.clone(), problem.w_gate_up, problem.w_down
    for error, match, call in (
        (TypeError, "y: got torch.float32", (y.float(), l1, l2, buffer)),
        (ValueError, r"l1_weights: got shape \(8, 32, 64\), want \(8, 64, 64\)", (y, l1[:, :32], l2, buffer)),
        (ValueError, r"l2_weights: got shape \(7, 64, 32\)", (y, l1, l2[:7], buffer)),
        (TypeError, "l1_weights: got tuple, want a Tensor", (y, (l1, l1), l2, buffer)),
        (
            TypeError,
            "sym_buffer: got int, want what get_symm_buffer_for_mega_moe of mega_moe returns",
            (y, l1, l2, 1),
        ),
    ):
        with pytest.raises(error, match=match):
            face.bf16_mega_moe(*call)  # type: ignore[arg-type]
    dx, dtopk, dw1, dw2 = backward(buffer, problem)
    good = [dx, dw1, dw2, dtopk, problem.dy]
    for index, name in enumerate(("dx", "dw1", "dw2", "dtopk", "dy")):
        bad = [t.double() if i == index else t for i, t in enumerate(good)]
        with pytest.raises(TypeError, match=f"^{name}: got torch.float64"):
            face.bf16_mega_moe_backward(*bad, l1, l2, buffer)
    stats = torch.zeros(8)
    with pytest.raises(
        TypeError, match=r"cumulative_local_expert_recv_stats: got torch.float32, want torch.int32"
    ):
        forward(buffer, problem, cumulative_local_expert_recv_stats=stats)


def test_a_destroyed_buffer_says_so(problem: Problem) -> None:
    buffer = get_buffer()
    buffer.destroy()
    buffer.destroy()
    assert buffer.x is None
    with pytest.raises(MegaMoEError, match="was destroyed"):
        face.bf16_mega_moe(problem.x, problem.w_gate_up, problem.w_down, buffer)


def test_the_number_of_sms_is_one_of_this_face(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegaMoEError, match="no GPU"):
        face.get_num_sms()
    monkeypatch.setattr("mega_moe.deep_gemm.symm_buffer._total_sms", lambda: 132)
    assert face.get_num_sms() == 132
    monkeypatch.setattr("mega_moe.deep_gemm.symm_buffer._num_sms", None)
    for bad in (0, 133, -1):
        with pytest.raises(ValueError, match=f"num_sms: got {bad}"):
            face.set_num_sms(bad)
    face.set_num_sms(116)
    assert face.get_num_sms() == 116
    buffer = get_buffer()
    assert buffer.moe.explanation.request.num_reserved_sms == 16


def spread(rank: int) -> None:
    """Statistics asked for by one rank alone, results that are those of one rank, and a refusal that all see."""
    import torch.distributed as dist

    whole = random_problem(48, 64, 32, 8, 2)
    mine = part(whole, rank, 2, slice(24 * rank, 24 * rank + 24))
    want = fp64_moe_grads(whole.dy, *whole.inputs)
    stats = torch.zeros(4, dtype=torch.int32)
    buffer = get_buffer(dist.group.WORLD)
    options = {"cumulative_local_expert_recv_stats": stats} if rank == 0 else {}
    y = forward(buffer, mine, **options)
    assert relative_l2(y, want.y[24 * rank : 24 * rank + 24]) < 6e-3
    _, _, dw1, _ = backward(buffer, mine)
    assert relative_l2(dw1, want.dw_gate_up[4 * rank : 4 * rank + 4]) < 6e-3
    if rank == 0:
        assert stats.tolist() == torch.bincount(whole.topk_idx.flatten(), minlength=8)[:4].tolist()
        with pytest.raises(TypeError, match=r"y: got torch.float64"):
            face.bf16_mega_moe(y.double(), mine.w_gate_up, mine.w_down, buffer)
    else:
        with pytest.raises(PeerError, match=r"rank 0: TypeError: y: got torch.float64"):
            forward(buffer, mine)
    forward(buffer, mine)  # and goes on
    buffer.destroy()


def test_two_ranks() -> None:
    TWO.values(quietly, "spread")


def quietly(rank: int, name: str) -> None:
    import warnings

    import mega_moe

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mega_moe.FallbackWarning)
        globals()[name](rank)
