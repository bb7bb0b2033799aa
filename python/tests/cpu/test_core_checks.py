"""Bad arguments of `moe`: the error names the argument, what it got and what it wanted, and nothing runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe.testing import Problem, count_op_calls, random_problem

from ._layer import assert_same_bits, make_buffer, results

T, H, INNER, E, K = 10, 128, 48, 4, 2  # 2 INNER is not H, so that no transposed weight fits


@pytest.fixture
def problem() -> Problem:
    return random_problem(T, H, INNER, E, K)


@pytest.fixture
def buffer(problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "grouped") as made:
        yield made


class Sharded(Tensor):
    """Stands for a DTensor, which is not this rank's plain tensor either."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def grads(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=d) for shape, d in zip(((E, 2 * INNER, H), (E, H, INNER)), dtypes))


Change = Callable[[Problem], dict[str, Any]]
CHECKS: dict[str, tuple[Change, type[Exception], str]] = {
    "buffer of another type": (
        lambda p: {"buffer": "big"},
        TypeError,
        r"^buffer: got str, want MoEBuffer$",
    ),
    "unknown backend": (
        lambda p: {"backend": "cublas"},
        ValueError,
        r"^backend: got 'cublas', want auto, fused, dispatched, deep_gemm, grouped, reference$",
    ),
    "backend of another buffer": (
        lambda p: {"backend": "reference"},
        ValueError,
        r"^backend: got 'reference', the buffer was built for 'grouped'$",
    ),
    "clamp of zero": (
        lambda p: {"activation_clamp": 0.0},
        ValueError,
        r"^activation_clamp: got 0.0, want None or a number > 0$",
    ),
    "clamp NaN": (
        lambda p: {"activation_clamp": float("nan")},
        ValueError,
        r"^activation_clamp: got nan, want None or a number > 0$",
    ),
    "clamp of another type": (
        lambda p: {"activation_clamp": "7"},
        TypeError,
        r"^activation_clamp: got str, want None or a number > 0$",
    ),
    "x no tensor": (lambda p: {"x": [1.0]}, TypeError, r"^x: got list, want a Tensor$"),
    "no weights": (
        lambda p: {"topk_weights": None},
        TypeError,
        r"^topk_weights: got NoneType, want a Tensor$",
    ),
    "x on another device": (
        lambda p: {"x": p.x.to("meta")},
        ValueError,
        r"^x: got a tensor on meta, the buffer is on cpu$",
    ),
    "x in fp16": (
        lambda p: {"x": p.x.half()},
        TypeError,
        r"^x: got torch.float16, want one of bfloat16, float32 \(backend grouped\)$",
    ),
    "x in fp64": (
        lambda p: {"x": p.x.double()},
        TypeError,
        r"^x: got torch.float64, want one of bfloat16, float32 \(backend grouped\)$",
    ),
    "x of another width": (
        lambda p: {"x": p.x[:, 1:]},
        ValueError,
        r"^x: got shape \(10, 127\), want \(T, 128\)$",
    ),
    "x of three axes": (
        lambda p: {"x": p.x[None]},
        ValueError,
        r"^x: got shape \(1, 10, 128\), want \(T, 128\)$",
    ),
    "too many tokens": (
        lambda p: {n: torch.cat((getattr(p, n),) * 2) for n in ("x", "topk_idx", "topk_weights")},
        ValueError,
        r"^x: got 20 tokens, the buffer was built for 10 per rank$",
    ),
    "ids in int16": (
        lambda p: {"topk_idx": p.topk_idx.short()},
        TypeError,
        r"^topk_idx: got torch.int16, want one of int32, int64 \(backend grouped\)$",
    ),
    "ids in uint8": (
        lambda p: {"topk_idx": p.topk_idx.byte()},
        TypeError,
        r"^topk_idx: got torch.uint8, want one of int32, int64",
    ),
    "ids in fp32": (
        lambda p: {"topk_idx": p.topk_idx.float()},
        TypeError,
        r"^topk_idx: got torch.float32, want one of int32, int64",
    ),
    "ids of other slots": (
        lambda p: {"topk_idx": p.topk_idx[:, :1]},
        ValueError,
        r"^topk_idx: got shape \(10, 1\), want \(10, 2\)$",
    ),
    "ids of other tokens": (
        lambda p: {"topk_idx": p.topk_idx[1:]},
        ValueError,
        r"^topk_idx: got shape \(9, 2\), want \(10, 2\)$",
    ),
    "weights in fp16": (
        lambda p: {"topk_weights": p.topk_weights.half()},
        TypeError,
        r"^topk_weights: got torch.float16, want one of float32, bfloat16 \(backend grouped\)$",
    ),
    "weights in fp64": (
        lambda p: {"topk_weights": p.topk_weights.double()},
        TypeError,
        r"^topk_weights: got torch.float64, want one of float32, bfloat16",
    ),
    "weights of other slots": (
        lambda p: {"topk_weights": p.topk_weights[:, 0]},
        ValueError,
        r"^topk_weights: got shape \(10,\), want \(10, 2\)$",
    ),
    "experts in another dtype": (
        lambda p: {"w_gate_up": p.w_gate_up.float()},
        TypeError,
        r"^w_gate_up: got torch.float32, want x's dtype torch.bfloat16 \(nn.MegaMoE casts under autocast\)$",
    ),
    "down projection in another dtype": (
        lambda p: {"w_down": p.w_down.float()},
        TypeError,
        r"^w_down: got torch.float32, want x's dtype torch.bfloat16",
    ),
    "experts transposed": (
        lambda p: {"w_gate_up": p.w_gate_up.mT.contiguous()},
        ValueError,
        r"^w_gate_up: got shape \(4, 128, 96\), want \(4, 96, 128\)$",
    ),
    "gate and up apart": (
        lambda p: {"w_gate_up": p.w_gate_up[:, :INNER]},
        ValueError,
        r"^w_gate_up: got shape \(4, 48, 128\), want \(4, 96, 128\)$",
    ),
    "down projection transposed": (
        lambda p: {"w_down": p.w_down.mT},
        ValueError,
        r"^w_down: got shape \(4, 48, 128\), want \(4, 128, 48\)$",
    ),
    "experts of another rank": (
        lambda p: {"w_down": p.w_down[:2]},
        ValueError,
        r"^w_down: got shape \(2, 128, 48\), want \(4, 128, 48\)$",
    ),
    "a sharded weight": (
        lambda p: {"w_down": p.w_down.as_subclass(Sharded)},
        TypeError,
        r"^w_down: got Sharded, want this rank's plain tensor: pass w_down.to_local\(\)$",
    ),
    "buffers in a list": (
        lambda p: {"grad_buffers": list(grads(torch.float32, torch.float32))},
        TypeError,
        r"^grad_buffers: got list, want a tuple of two tensors \(dw_gate_up, dw_down\)$",
    ),
    "one buffer": (
        lambda p: {"grad_buffers": grads(torch.float32)},
        TypeError,
        r"^grad_buffers: got tuple, want a tuple of two tensors",
    ),
    "no second buffer": (
        lambda p: {"grad_buffers": (*grads(torch.float32), None)},
        TypeError,
        r"^grad_buffers\[1\]: got NoneType, want a Tensor$",
    ),
    "buffer in fp16": (
        lambda p: {"grad_buffers": grads(torch.float32, torch.float16)},
        TypeError,
        r"^grad_buffers\[1\]: got torch.float16, want one of float32, bfloat16",
    ),
    "buffers the other way round": (
        lambda p: {"grad_buffers": grads(torch.float32, torch.float32)[::-1]},
        ValueError,
        r"^grad_buffers\[0\]: got shape \(4, 128, 48\), want \(4, 96, 128\)$",
    ),
    "buffer that learns": (
        lambda p: {"grad_buffers": tuple(g.requires_grad_() for g in grads(torch.float32, torch.float32))},
        ValueError,
        r"^grad_buffers\[0\]: requires grad, want a plain buffer$",
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_bad_argument(name: str, problem: Problem, buffer: MoEBuffer) -> None:
    change, kind, message = CHECKS[name]
    names = ("x", "topk_idx", "topk_weights", "w_gate_up", "w_down")
    arguments = {n: getattr(problem, n) for n in names} | {"buffer": buffer} | change(problem)
    with count_op_calls() as calls, pytest.raises(kind, match=message):
        mega_moe.moe(**arguments)
    assert not calls


@pytest.mark.parametrize("value", [-2, E, 10**9, 270_000_000_000, -(2**62)])
@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_bad_expert_id(problem: Problem, backend: str, value: int) -> None:
    ids = problem.topk_idx.clone()
    ids[7, 1] = ids[8, 0] = value
    with make_buffer(problem, backend) as buffer:
        want = results(problem, buffer)
        with pytest.raises(ValueError, match=rf"^topk_idx\[7, 1\]: got expert {value}, want -1 or 0 to 3$"):
            mega_moe.moe(problem.x, ids, *problem.inputs[2:], buffer=buffer)
        if abs(value) < 2**31:
            with pytest.raises(ValueError, match=rf"^topk_idx\[7, 1\]: got expert {value}, "):
                mega_moe.moe(problem.x, ids.int(), *problem.inputs[2:], buffer=buffer)
        assert_same_bits(results(problem, buffer), want)


def test_capacity_itself_is_served(problem: Problem, buffer: MoEBuffer) -> None:
    assert buffer.max_tokens_per_rank == len(problem.x)
    results(problem, buffer)
    results(problem.tokens(slice(0, 1)), buffer)


def test_a_destroyed_buffer_says_so(problem: Problem) -> None:
    buffer = make_buffer(problem)
    results(problem, buffer)
    buffer.destroy()
    buffer.destroy()
    uses: list[Callable[[], Any]] = [
        lambda: mega_moe.moe(*problem.inputs, buffer=buffer),
        lambda: mega_moe.moe(problem.x[0], *problem.inputs[1:], buffer=buffer),
        lambda: mega_moe.moe(*problem.inputs, buffer=buffer, activation_clamp=-1),
        lambda: buffer.dtypes,
        lambda: buffer._live().handle,
        buffer.check,
    ]
    for use in uses:
        with pytest.raises(mega_moe.MegaMoEError, match="this MoEBuffer was destroyed; build a new one"):
            use()
    assert "MoEBuffer(rank 0 of 1, reference, cpu" in repr(buffer)


def test_a_copied_model_shares_the_buffer_and_a_pickle_is_refused(buffer: MoEBuffer) -> None:
    assert copy.deepcopy({"experts": buffer})["experts"] is buffer
    for save in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"^MoEBuffer: cannot be pickled or copied; .* state_dict\(\)"):
            save(buffer)


def test_the_device_cpu_has_one_name(problem: Problem) -> None:
    with make_buffer(problem, device="cpu:0") as buffer:
        assert buffer.device == torch.device("cpu")
        results(problem, buffer)


def test_under_autocast_the_function_casts_nothing(problem: Problem, buffer: MoEBuffer) -> None:
    want = results(problem, buffer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(results(problem, buffer), want)
        wide = replace(problem, w_gate_up=problem.w_gate_up.float(), w_down=problem.w_down.float())
        with pytest.raises(TypeError, match=r"w_gate_up: .* \(nn.MegaMoE casts under autocast\)"):
            mega_moe.moe(*wide.inputs, buffer=buffer)
        # All fp32 is no mistake of a cast: the backends choose every dtype themselves.
        single = random_problem(T, H, INNER, E, K, dtype=torch.float32)
        y = mega_moe.moe(*single.inputs, buffer=buffer)
        assert y.dtype == torch.float32
    assert torch.equal(y, mega_moe.moe(*single.inputs, buffer=buffer))
