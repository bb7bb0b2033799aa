"""Ranks that disagree or refuse, in construction and in calls: all raise at once, and the next call is served."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mega_moe
from mega_moe import FallbackWarning, MoEBuffer, PeerError
from mega_moe._backends.choice.facts import collect
from mega_moe.testing import Problem

from ._ep import AT_ONCE, SIZES, gap, of_rank, small_part, small_problem
from ._layer import make_buffer, results
from ._ranks import GROUP_SECONDS, Outcome, shared_world

TWO, FOUR = shared_world(2), shared_world(4)


def expect(outcome: Outcome, error: type[Exception], *parts: str, seconds: float = AT_ONCE) -> None:
    assert type(outcome.error) is error, outcome.trace or outcome
    for text in parts:
        assert text in str(outcome.error), str(outcome.error)
    assert outcome.seconds < seconds


# Construction


def construct(
    rank: int, changes: list[dict[str, Any]], env: list[dict[str, str]], facts: list[dict[str, Any]]
) -> str:
    """A buffer from this rank's arguments, environment and made-up facts -> its backend."""
    wanted = {**SIZES, **changes[rank]}
    if wanted.get("hidden") == "unpicklable":
        wanted["hidden"] = lambda: 128
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for name, value in env[rank].items():
            patch.setenv(name, value)
        patch.setattr(
            "mega_moe.buffer.collect", lambda *args: dataclasses.replace(collect(*args), **facts[rank])
        )
        with MoEBuffer(dist.group.WORLD, **wanted) as buffer:
            return buffer.backend


NONE: list[dict[str, Any]] = [{}, {}]

# name of the setting: (changes per rank, what each rank's value looks like in the message)
DIFFERENT: dict[str, tuple[list[dict[str, Any]], tuple[str, str]]] = {
    "num_experts": ([{}, {"num_experts": 16}], ("8", "16")),
    "max_tokens_per_rank": ([{"max_tokens_per_rank": 128}, {}], ("128", "64")),
    "top_k": ([{}, {"top_k": 3}], ("2", "3")),
    "hidden": ([{}, {"hidden": 256}], ("128", "256")),
    "intermediate": ([{"intermediate": 256}, {}], ("256", "128")),
    "precision": ([{}, {"precision": "fp8"}], ("'bf16'", "'fp8'")),
    "dw_precision": (
        [{"precision": "fp8", "dw_precision": "fp8"}, {"precision": "fp8"}],
        ("'fp8'", "'bf16'"),
    ),
    "scale_format": (
        [{"precision": "fp8"}, {"precision": "fp8", "scale_format": "power_of_two"}],
        ("'fp32'", "'power_of_two'"),
    ),
    "backend": ([{}, {"backend": "grouped"}], ("'reference'", "'grouped'")),
    "dtype": ([{}, {"dtype": torch.bfloat16}], ("'float32'", "'bfloat16'")),
    "num_reserved_sms": ([{"num_reserved_sms": 16}, {}], ("16", "0")),
    "arrival_timeout": ([{}, {"arrival_timeout": 20}], ("30.0", "20.0")),
    "strict": ([{}, {"strict": True}], ("False", "True")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_any_argument_that_differs_is_refused_by_both_with_both_values(name: str) -> None:
    changes, values = DIFFERENT[name]
    for outcome in TWO.run(construct, changes, NONE, NONE):
        expect(outcome, ValueError, f"{name}: ranks disagree (rank 0: {values[0]}, rank 1: {values[1]})")


def test_automatic_on_one_rank_and_a_name_on_the_other() -> None:
    for outcome in TWO.run(construct, [{"backend": "auto"}, {}], NONE, NONE):
        expect(outcome, ValueError, "backend: ranks disagree (rank 0: 'auto', rank 1: 'reference')")


def test_the_default_time_out_is_the_groups_own() -> None:
    values = TWO.values(
        construct, [{"arrival_timeout": None}, {"arrival_timeout": GROUP_SECONDS}], NONE, NONE
    )
    assert values == ["reference"] * 2
    for outcome in TWO.run(construct, [{"arrival_timeout": None}, {"arrival_timeout": 5}], NONE, NONE):
        expect(outcome, ValueError, f"(rank 0: {float(GROUP_SECONDS)}, rank 1: 5.0)")


@pytest.mark.parametrize(
    ("variable", "setting", "values"),
    [
        ("MEGA_MOE_BACKEND", "backend", ("'auto'", "'grouped'")),
        ("MEGA_MOE_STRICT", "strict", ("False", "True")),
        ("MEGA_MOE_DEBUG", "MEGA_MOE_DEBUG", ("False", "True")),
    ],
)
def test_an_environment_that_differs_is_refused_by_both(
    variable: str, setting: str, values: tuple[str, str]
) -> None:
    env = [{}, {variable: "grouped" if setting == "backend" else "1"}]
    for outcome in TWO.run(construct, [{"backend": "auto"}] * 2, env, NONE):
        expect(outcome, ValueError, f"{setting}: ranks disagree (rank 0: {values[0]}, rank 1: {values[1]})")


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("torch_version", "2.10.0"),
        ("package_version", "9.9"),
        ("kernels_sha256", "abc"),
        ("device", "cuda:0"),
    ],
)
def test_versions_or_kinds_of_device_that_differ_are_refused_by_both(name: str, theirs: str) -> None:
    for outcome in TWO.run(construct, NONE, NONE, [{}, {name: theirs}]):
        shown = "cuda" if name == "device" else theirs
        expect(outcome, ValueError, "ranks disagree (rank 0: ", f"rank 1: '{shown}')")


def test_the_choice_is_made_from_the_facts_of_all_ranks() -> None:
    """Rank 1 alone has a group that cannot carry CPU tensors: the same refusal on both."""
    for outcome in TWO.run(construct, NONE, NONE, [{}, {"group_backend": "nccl"}]):
        expect(outcome, mega_moe.BackendRefusedError, "the process group is nccl, cpu tensors need gloo")


WRONG: dict[str, tuple[dict[str, Any], dict[str, str], type[Exception], str]] = {
    "more-slots-than-experts": ({"top_k": 9}, {}, ValueError, "top_k: got 9, want at most the 8 experts"),
    "no-experts": ({"num_experts": 0}, {}, ValueError, "num_experts: got 0"),
    "top_k": ({"top_k": 17}, {}, ValueError, "top_k: got 17, want in [1, 16]"),
    "type": ({"hidden": "128"}, {}, TypeError, "hidden: got '128' (str), want an int"),
    "unpicklable": ({"hidden": "unpicklable"}, {}, TypeError, "hidden: got <function"),
    "precision": ({"precision": "int8"}, {}, ValueError, "precision: got 'int8'"),
    "scale-format": (
        {"scale_format": "power_of_two"},
        {},
        ValueError,
        "scale_format: got 'power_of_two' with",
    ),
    "dtype": ({"dtype": torch.int8}, {}, ValueError, "dtype: got int8"),
    "backend": ({"backend": "triton"}, {}, ValueError, "backend: got 'triton'"),
    "sms": ({"num_reserved_sms": -1}, {}, ValueError, "num_reserved_sms: got -1"),
    "time-out": ({"arrival_timeout": -1}, {}, ValueError, "arrival_timeout: got -1"),
    "time-out-type": ({"arrival_timeout": "3"}, {}, TypeError, "arrival_timeout: got '3'"),
    "device": ({"device": "gpu"}, {}, ValueError, "device: got 'gpu'"),
    "strict": ({"strict": "yes"}, {}, TypeError, "strict: got 'yes'"),
    "env-backend": ({"backend": "auto"}, {"MEGA_MOE_BACKEND": "x"}, ValueError, "MEGA_MOE_BACKEND: got 'x'"),
    "env-strict": ({}, {"MEGA_MOE_STRICT": "yes"}, ValueError, "MEGA_MOE_STRICT: got 'yes'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_argument_of_one_rank_is_its_own_error_and_the_others_peer_error(name: str) -> None:
    changes, env, error, text = WRONG[name]
    for wrong in (0, 1):
        spread = [{}, {}]
        spread[wrong] = changes
        outcomes = TWO.run(construct, spread, [env if r == wrong else {} for r in (0, 1)], NONE)
        expect(outcomes[wrong], error, text)
        expect(outcomes[1 - wrong], PeerError, f"rank {wrong}: {error.__name__}: {text}")
    assert TWO.values(construct, NONE, NONE, NONE) == ["reference"] * 2


def test_a_bad_argument_of_both_ranks_is_each_ranks_own_error() -> None:
    outcomes = TWO.run(construct, [{"top_k": 0}, {"hidden": 0}], NONE, NONE)
    expect(outcomes[0], ValueError, "top_k: got 0")
    expect(outcomes[1], ValueError, "hidden: got 0")
    for outcome in TWO.run(construct, [{"num_experts": 9}] * 2, NONE, NONE):
        expect(outcome, ValueError, "num_experts: got 9, want a multiple of the 2 ranks of the group")


def too_large_for_one(rank: int, small: int) -> None:
    def build(*_: Any) -> None:
        raise torch.OutOfMemoryError("the staging area needs 3 bytes")

    with pytest.MonkeyPatch.context() as patch:
        if rank == small:
            patch.setattr("mega_moe._backends.build.build_executor", build)
        MoEBuffer(dist.group.WORLD, **SIZES)


def test_memory_that_one_rank_lacks_is_its_own_error_and_the_others_peer_error() -> None:
    for small in (0, 1):
        outcomes = TWO.run(too_large_for_one, small)
        expect(outcomes[small], torch.OutOfMemoryError, "needs 3 bytes")
        expect(outcomes[1 - small], PeerError, f"rank {small}: OutOfMemoryError: the staging area needs 3")


def not_a_member(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="group: this process is not in it"):
            MoEBuffer(group, **SIZES)


def test_a_process_outside_the_group() -> None:
    FOUR.values(not_a_member)


def of_a_mesh(rank: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "ep"))
    with pytest.raises(
        ValueError, match=r"group: got a DeviceMesh of the dimensions \['data', 'ep'\], want one"
    ):
        MoEBuffer(mesh, **SIZES)
    with pytest.raises(TypeError, match=r"group: got 'ep' \(str\), want a ProcessGroup, a DeviceMesh of one"):
        MoEBuffer("ep", **SIZES)  # type: ignore[arg-type]
    with MoEBuffer(mesh["ep"], **SIZES) as buffer:
        return buffer.rank, buffer.num_ranks


def test_a_device_mesh_of_one_dimension_is_a_group() -> None:
    assert TWO.values(of_a_mesh) == [(0, 2), (1, 2)]


# Calls


def call_of(problem: Problem, fault: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `moe` with one fault."""
    x, idx, weights, w1, w2 = problem.inputs
    bad_id = idx.clone()
    bad_id[3, 1] = -2 if fault == "id below" else 8
    long = (x.repeat(3, 1), idx.repeat(3, 1), weights.repeat(3, 1), w1, w2)
    changed: dict[str, tuple[Any, ...]] = {
        "capacity": long,
        "id above": (x, bad_id, weights, w1, w2),
        "id below": (x, bad_id, weights, w1, w2),
        "dtype of x": (x.bfloat16(), idx, weights, w1, w2),
        "x of ints": (x.int(), idx, weights, w1, w2),
        "hidden": (x[:, :64], idx, weights, w1, w2),
        "a list": (x.tolist(), idx, weights, w1, w2),
        "ids of floats": (x, idx.float(), weights, w1, w2),
        "slots": (x, idx[:, :1], weights, w1, w2),
        "rows": (x, idx[1:], weights, w1, w2),
        "weights of ints": (x, idx, weights.int(), w1, w2),
        "experts": (x, idx, weights, w1[1:], w2),
        "order": (x, idx, weights, w2, w1),
        "device": (x.to("meta"), idx, weights, w1, w2),
    }
    extra: dict[str, dict[str, Any]] = {
        "clamp": {"activation_clamp": -1.0},
        "clamp nan": {"activation_clamp": float("nan")},
        "backend": {"backend": "grouped"},
        "grad_buffers": {"grad_buffers": (w1, w2[1:])},
    }
    return changed.get(fault, problem.inputs), extra.get(fault, {})


REFUSED: dict[str, tuple[type[Exception], str]] = {
    "capacity": (ValueError, "x: got 72 tokens, the buffer was built for 64 per rank"),
    "id above": (ValueError, "topk_idx[3, 1]: got expert 8, want -1 or 0 to 7"),
    "id below": (ValueError, "topk_idx[3, 1]: got expert -2, want -1 or 0 to 7"),
    "dtype of x": (TypeError, "w_gate_up: got torch.float32, want x's dtype torch.bfloat16"),
    "x of ints": (TypeError, "x: got torch.int32, want one of "),
    "hidden": (ValueError, "x: got shape (24, 64), want (T, 128)"),
    "a list": (TypeError, "x: got list, want a Tensor"),
    "ids of floats": (TypeError, "topk_idx: got torch.float32, want one of int32, int64"),
    "slots": (ValueError, "topk_idx: got shape (24, 1), want (24, 2)"),
    "rows": (ValueError, "topk_idx: got shape (23, 2), want (24, 2)"),
    "weights of ints": (TypeError, "topk_weights: got torch.int32"),
    "experts": (ValueError, "w_gate_up: got shape (3, 256, 128), want (4, 256, 128)"),
    "order": (ValueError, "w_gate_up: got shape (4, 128, 128), want (4, 256, 128)"),
    "device": (ValueError, "x: got a tensor on meta, the buffer is on cpu"),
    "clamp": (ValueError, "activation_clamp: got -1.0"),
    "clamp nan": (ValueError, "activation_clamp: got nan"),
    "backend": (ValueError, "backend: got 'grouped', the buffer was built for 'reference'"),
    "grad_buffers": (ValueError, "grad_buffers[1]: got shape (3, 128, 128), want (4, 128, 128)"),
}


def refused(rank: int, fault: str, peer: str) -> dict[int, tuple[str, str]]:
    """Each rank in turn makes a call with ``fault`` while the other is in ``peer``; a good call before and after.

    -> what this rank caught, by the number of the faulty rank.
    """
    caught = {}
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **SIZES) as buffer, make_buffer(small_problem()) as alone:
        want = of_rank(results(small_problem(), alone), rank, 2, slice(24 * rank, 24 * rank + 24))
        for wrong in (0, 1):
            leaves = mine.requires_grad()
            y = mega_moe.moe(*leaves.inputs, buffer=buffer)
            try:
                if rank == wrong:
                    args, extra = call_of(mine, fault)
                    mega_moe.moe(*args, buffer=buffer, **extra)
                elif peer == "forward":
                    mega_moe.moe(*mine.inputs, buffer=buffer)
                elif peer == "empty forward":
                    mega_moe.moe(*mine.tokens(slice(0, 0)).inputs, buffer=buffer)
                else:
                    y.backward(leaves.dy)
            except Exception as error:  # noqa: BLE001 -- which one it is, is what the test asks
                caught[wrong] = (type(error).__name__, str(error))
            found = gap(results(mine, buffer), want)
            assert found.same_bits
            assert all(error <= 1e-5 for error in found.errors.values())
    return caught


@pytest.mark.parametrize("fault", REFUSED)
def test_a_bad_call_of_one_rank_is_its_own_error_and_the_others_peer_error(fault: str) -> None:
    """And the buffer serves the next call."""
    error, text = REFUSED[fault]
    check_refused(TWO.values(refused, fault, "forward"), error, text)


@pytest.mark.parametrize("peer", ["empty forward", "backward"])
@pytest.mark.parametrize("fault", ["capacity", "id above"])
def test_a_bad_call_meets_a_rank_that_does_something_else(fault: str, peer: str) -> None:
    error, text = REFUSED[fault]
    check_refused(TWO.values(refused, fault, peer), error, text)


def check_refused(outcomes: list[dict[int, tuple[str, str]]], error: type[Exception], text: str) -> None:
    for wrong in (0, 1):
        kind, message = outcomes[wrong][wrong]
        assert (kind, text in message) == (error.__name__, True), message
        kind, message = outcomes[1 - wrong][wrong]
        assert kind == "PeerError", message
        assert f"refused by rank {wrong}: {error.__name__}: {text}" in message


def refused_when_compiled(rank: int) -> None:
    """A compiled call of rank 0 holds more tokens than the buffer does."""
    with MoEBuffer(dist.group.WORLD, **SIZES) as buffer:
        mine = small_part(rank)
        layer = torch.compile(
            lambda *inputs: mega_moe.moe(*inputs, buffer=buffer), dynamic=True, backend="aot_eager"
        )
        layer(*mine.inputs)
        layer(*(call_of(mine, "capacity")[0] if rank == 0 else mine.inputs))


def test_a_bad_call_of_a_compiled_layer() -> None:
    outcomes = TWO.run(refused_when_compiled)
    error, text = REFUSED["capacity"]
    expect(outcomes[0], error, text, seconds=30)  # the compiler's time
    expect(outcomes[1], PeerError, f"refused by rank 0: {error.__name__}: {text}", seconds=30)


def disagree(rank: int, about: str) -> None:
    """Good calls that are not the same call."""
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **SIZES) as buffer:
        leaves = mine.requires_grad()
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        if about == "clamp":
            mega_moe.moe(*mine.inputs, buffer=buffer, activation_clamp=(0.1, 7.5)[rank])
        elif about == "no clamp":
            mega_moe.moe(*mine.inputs, buffer=buffer, activation_clamp=(None, 7.5)[rank])
        elif about == "dtype":
            x, idx, weights, w1, w2 = mine.inputs
            dtype = (torch.float32, torch.bfloat16)[rank]
            mega_moe.moe(x.to(dtype), idx, weights, w1.to(dtype), w2.to(dtype), buffer=buffer)
        elif rank == 0:
            mega_moe.moe(*mine.inputs, buffer=buffer)
        else:
            y.backward(leaves.dy)


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ("clamp", "the clamp of forward call 2: rank 0: 0.1, rank 1: 7.5"),
        ("no clamp", "the clamp of forward call 2: rank 0: None, rank 1: 7.5"),
        ("dtype", "the dtype of forward call 2: rank 0: torch.float32, rank 1: torch.bfloat16"),
        ("phase", "call 2: rank 0: forward, rank 1: backward"),
    ],
)
def test_ranks_that_make_different_calls_all_say_so(about: str, text: str) -> None:
    for rank, outcome in enumerate(TWO.run(disagree, about)):
        expect(outcome, PeerError, f"rank {rank}: ranks disagree on ", text)
