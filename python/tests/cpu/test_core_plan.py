"""The choice of a backend: order, names, environment, warning, and its explanation as data."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mega_moe
from mega_moe import BackendRefusedError, FallbackWarning, MegaMoEError, MoEBuffer
from mega_moe._backends import build
from mega_moe._backends.choice import explanation as choice
from mega_moe._backends.choice.decide import BACKENDS, check_name, choose, decide
from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe._backends.choice.request import Request
from mega_moe._backends.group import Control

SIZES: dict[str, Any] = {
    "num_experts": 8,
    "max_tokens_per_rank": 64,
    "top_k": 2,
    "hidden": 256,
    "intermediate": 128,
    "device": "cpu",
}
KERNELS = (
    Variant("route", "90a", "none"),
    Variant("forward", "90a", "bf16"),
    Variant("backward", "90a", "bf16", wgrad="bf16"),
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller's shell, and no warning given before."""
    for name in ("MEGA_MOE_BACKEND", "MEGA_MOE_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(choice, "_warned", set())


def request(**changes: Any) -> Request:
    return Request(
        **{
            "num_experts": 8,
            "max_tokens_per_rank": 64,
            "top_k": 2,
            "hidden": 256,
            "intermediate": 128,
            **changes,
        }
    )


CPU = RankFacts(library_reason="no file")


def gpu(capability: tuple[int, int] = (9, 0), name: str = "H200") -> RankFacts:
    return RankFacts(
        device="cuda:0",
        device_name=name,
        device_uuid="gpu0",
        compute_capability=capability,
        num_sms=132,
        driver_cuda=(13, 0),
        library_loaded=True,
        library_cuda="13.0",
        library_architectures=("90a",),
        variants=KERNELS,
    )


def silently(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return build(*args, **kwargs)


# choose


def test_choose_takes_the_first_that_fits() -> None:
    assert choose(decide(request(), [gpu()])).backend == "fused"
    assert choose(decide(request(), [CPU])).backend == "grouped"
    assert choose(decide(request(dtype="float64"), [CPU])).backend == "reference"


def test_choose_takes_the_named_one_or_gives_the_whole_list() -> None:
    verdicts = decide(request(), [CPU], "reference")
    assert choose(verdicts, "reference").backend == "reference"
    with pytest.raises(BackendRefusedError) as caught:
        choose(decide(request(), [CPU], "fused"), "fused")
    text = str(caught.value)
    assert text.startswith("backend 'fused' cannot serve this request:")
    fused = (
        "fused: refused: the compiled library is not loaded: no file; needs an NVIDIA GPU, the device is cpu"
    )
    for line in (fused, "grouped: accepted", "reference: accepted"):
        assert line in text


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "mxfp8"])
def test_another_precision_is_never_chosen_by_itself(precision: str) -> None:
    with pytest.raises(BackendRefusedError, match="no backend can serve") as caught:
        choose(decide(request(precision=precision), [CPU]))
    for backend in BACKENDS:
        assert f"{backend}: refused: " in str(caught.value)


def test_strict_forbids_only_falling_back() -> None:
    assert choose(decide(request(), [gpu()]), strict=True).backend == "fused"
    assert choose(decide(request(), [CPU]), "grouped", strict=True).backend == "grouped"
    with pytest.raises(BackendRefusedError, match="strict mode forbids falling back to 'grouped'") as caught:
        choose(decide(request(), [CPU]), strict=True)
    assert "needs an NVIDIA GPU" in str(caught.value)


def test_names() -> None:
    assert check_name("backend", "auto") is None
    assert [check_name("backend", b) for b in BACKENDS] == list(BACKENDS)
    for wrong in ("Fused", "", "deepgemm", None, 1, []):
        with pytest.raises(
            ValueError, match=r"backend: got .*, want auto, fused, dispatched, deep_gemm, grouped, reference"
        ):
            check_name("backend", wrong)  # type: ignore[arg-type]


def test_a_choice_that_nothing_can_run_is_not_run_by_something_else() -> None:
    explanation = choice.explain(request(), [gpu()])
    with pytest.raises(MegaMoEError, match="'fused' was chosen, but this process cannot run it"):
        build.build_executor(explanation, Control(), None, None)


# A buffer of one rank


def test_the_automatic_choice_of_a_cpu() -> None:
    for dtype, want in (
        (torch.bfloat16, "grouped"),
        (torch.float32, "grouped"),
        (torch.float64, "reference"),
    ):
        with silently(MoEBuffer, dtype=dtype, **SIZES) as buffer:
            assert buffer.backend == want
            assert dtype in buffer.dtypes


def test_a_named_backend_is_taken_and_gives_no_warning() -> None:
    for name in ("grouped", "reference"):
        with MoEBuffer(backend=name, **SIZES) as buffer:
            assert buffer.backend == name


def test_a_named_backend_that_does_not_fit_gives_the_whole_list() -> None:
    with pytest.raises(BackendRefusedError) as caught:
        MoEBuffer(backend="fused", **SIZES)
    for part in ("'fused'", "needs an NVIDIA GPU", "grouped: accepted", "reference: accepted"):
        assert part in str(caught.value)
    with pytest.raises(BackendRefusedError, match="float64"):
        MoEBuffer(backend="grouped", dtype=torch.float64, **SIZES)


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_fp8_without_a_fused_kernel_needs_the_name_of_the_reference(precision: str) -> None:
    with pytest.raises(BackendRefusedError, match=r"backend='reference'"):
        MoEBuffer(precision=precision, **SIZES)
    with pytest.raises(BackendRefusedError, match="not emulated"):
        MoEBuffer(precision=precision, backend="grouped", **SIZES)
    with MoEBuffer(precision=precision, backend="reference", **SIZES) as buffer:
        assert (buffer.backend, buffer.precision) == ("reference", precision)


def test_mxfp8_is_refused_with_the_reason() -> None:
    for backend in ("auto", *BACKENDS):
        with pytest.raises(BackendRefusedError, match="Blackwell kernels, which do not exist yet"):
            MoEBuffer(precision="mxfp8", backend=backend, **SIZES)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (10, 3), (12, 0)])
def test_another_architecture_is_named_within_a_second(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_moe.buffer.collect", lambda *_: gpu(capability, "another GPU"))
    start = time.monotonic()
    with pytest.raises(BackendRefusedError) as caught:
        MoEBuffer(backend="fused", **SIZES)
    assert time.monotonic() - start < 1
    number = "{}{}".format(*capability)
    assert f"the device is sm_{number} (another GPU), this wheel holds sm_90a" in str(caught.value)
    assert "grouped: accepted" in str(caught.value)


# Environment


def test_the_environment_names_the_backend_of_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_BACKEND", "reference")
    with MoEBuffer(**SIZES) as buffer:
        assert buffer.backend == "reference"
    with MoEBuffer(backend="grouped", **SIZES) as buffer:
        assert buffer.backend == "grouped"
    with MoEBuffer(precision="fp8", **SIZES) as buffer:
        assert buffer.backend == "reference"
    monkeypatch.setenv("MEGA_MOE_BACKEND", "fused")
    with pytest.raises(BackendRefusedError, match="backend 'fused' cannot serve"):
        MoEBuffer(**SIZES)


@pytest.mark.parametrize("value", ["", "auto"])
def test_the_environment_may_name_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_BACKEND", value)
    with silently(MoEBuffer, **SIZES) as buffer:
        assert buffer.backend == "grouped"


@pytest.mark.parametrize(
    ("name", "value"), [("MEGA_MOE_BACKEND", "cuda"), ("MEGA_MOE_STRICT", "yes"), ("MEGA_MOE_STRICT", "2")]
)
def test_a_bad_variable_is_named_with_its_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for make in (MoEBuffer, mega_moe.explain):
        with pytest.raises(ValueError, match=rf"{name}: got '{value}', want "):
            make(**SIZES)


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_STRICT", "1")
    with pytest.raises(BackendRefusedError, match="strict mode forbids") as caught:
        MoEBuffer(**SIZES)
    assert "needs an NVIDIA GPU" in str(caught.value)
    with MoEBuffer(backend="grouped", **SIZES) as buffer:  # a name is no fallback
        assert buffer.backend == "grouped"
    with silently(MoEBuffer, strict=False, **SIZES) as buffer:  # the argument wins
        assert buffer.backend == "grouped"
    monkeypatch.setenv("MEGA_MOE_STRICT", "0")
    with pytest.raises(BackendRefusedError, match="strict mode forbids"):
        MoEBuffer(strict=True, **SIZES)
    with pytest.raises(TypeError, match=r"strict: got 'no' \(str\)"):
        MoEBuffer(strict="no", **SIZES)  # type: ignore[arg-type]


# Warning


def test_falling_back_warns_once_per_reason_and_where_the_buffer_is_built() -> None:
    with pytest.warns(
        FallbackWarning, match=r"grouped, since fused: refused: .*needs an NVIDIA GPU"
    ) as first:
        MoEBuffer(**SIZES).destroy()
    assert [w.filename for w in first] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoEBuffer(**SIZES).destroy()
        MoEBuffer(**{**SIZES, "num_experts": 16}).destroy()
    with pytest.warns(FallbackWarning, match="takes bfloat16 inputs, got float32") as second:
        MoEBuffer(dtype=torch.float32, **SIZES).destroy()
    assert len(first) == len(second) == 1


def test_nothing_is_warned_when_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    choice.warn_fallback(choice.explain(request(), [gpu()]))
    monkeypatch.setenv("MEGA_MOE_BACKEND", "grouped")
    MoEBuffer(**SIZES).destroy()


# Explanation


def test_an_explanation_is_data() -> None:
    for explanation in (choice.explain(request(), [CPU]), choice.explain(request(), [gpu()])):
        told = json.loads(json.dumps(explanation.as_dict()))
        assert told["chosen"] == explanation.chosen
        assert [v["backend"] for v in told["verdicts"]] == list(BACKENDS)
        for shown, verdict in zip(told["verdicts"], explanation.verdicts, strict=True):
            assert shown["accepted"] == verdict.accepted == (not shown["reasons"])
            assert shown["reasons"] == list(verdict.reasons)
        assert Request(**told["request"]) == request()


def test_ranks_on_several_hosts_get_the_fused_experts_behind_a_dispatcher() -> None:
    hosts = [dataclasses.replace(gpu(), host=name, device_uuid=name, group_backend="nccl") for name in "ab"]
    explanation = choice.explain(request(num_ranks=2), hosts)
    assert explanation.chosen == "dispatched"
    assert explanation.reason.startswith(
        "dispatched (dispatcher nccl, experts by fused at EP=1), since fused: "
    )
    assert not explanation.has_fused_backward
    forward_alone = [dataclasses.replace(fact, variants=KERNELS[:2]) for fact in hosts]
    told = str(choice.explain(request(num_ranks=2), forward_alone))
    assert "experts by fused at EP=1; the backward runs on torch's grouped GEMMs" in told
    with pytest.raises(BackendRefusedError, match="strict mode forbids falling back to 'dispatched'"):
        choice.explain(request(num_ranks=2), hosts, strict=True)


def test_an_explanation_is_readable() -> None:
    explanation = choice.explain(request(), [CPU])
    lines = str(explanation).splitlines()
    assert lines[0].startswith("fused: refused: the compiled library is not loaded")
    assert lines[1].startswith("dispatched: refused: no fused experts at EP=1: the compiled library")
    assert lines[2] == "deep_gemm: refused: needs an NVIDIA GPU, the device is cpu"
    assert lines[3:] == ["grouped: accepted", "reference: accepted", "chosen: grouped"]
    assert explanation.reason.startswith("grouped, since fused: refused: ")
    assert choice.explain(request(), [gpu()]).reason == "fused"


def test_explain_says_what_a_buffer_does() -> None:
    for extra in (
        {},
        {"dtype": torch.float64},
        {"backend": "reference", "precision": "fp8"},
        {"backend": "reference", "precision": "fp8_bwd", "scale_format": "power_of_two"},
        {
            "backend": "reference",
            "precision": "fp8",
            "dw_precision": "fp8",
            "scale_format": "power_of_two",
        },
    ):
        with silently(MoEBuffer, **SIZES, **extra) as buffer:  # type: ignore[arg-type]
            told = mega_moe.explain(**SIZES, **extra)  # type: ignore[arg-type]
            assert told == buffer.explanation
            assert (told.chosen, told.reason) == (buffer.backend, buffer.reason)
            asked = told.as_dict()["request"]
            assert (asked["scale_format"], asked["dw_precision"]) == (
                buffer.scale_format,
                buffer.dw_precision,
            )


def test_explain_gives_a_refusal_as_data() -> None:
    for extra in ({"precision": "fp8"}, {"precision": "mxfp8"}, {"backend": "fused"}):
        told = mega_moe.explain(**SIZES, **extra)
        assert told.chosen is None
        assert "chosen: none" in str(told)
        with pytest.raises(BackendRefusedError):
            MoEBuffer(**SIZES, **extra)


def test_explain_reads_the_environment_as_a_buffer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_MOE_BACKEND", "reference")
    assert mega_moe.explain(**SIZES).chosen == "reference"
    assert mega_moe.explain(**SIZES, backend="grouped").chosen == "grouped"
    monkeypatch.delenv("MEGA_MOE_BACKEND")
    monkeypatch.setenv("MEGA_MOE_STRICT", "1")
    assert mega_moe.explain(**SIZES).chosen is None


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"num_experts": 10, "num_ranks": 4},
            ValueError,
            "num_experts: got 10, want a multiple of the 4 ranks",
        ),
        ({"num_experts": 2049}, ValueError, r"num_experts: got 2049, want in \[1, 2048\]"),
        ({"num_experts": 0}, ValueError, r"num_experts: got 0"),
        ({"top_k": 17}, ValueError, r"top_k: got 17, want in \[1, 16\]"),
        ({"max_tokens_per_rank": 1 << 20}, ValueError, "max_tokens_per_rank: got 1048576"),
        ({"hidden": -8}, ValueError, "hidden: got -8, want at least 1"),
        ({"hidden": 256.0}, TypeError, r"hidden: got 256.0 \(float\), want an int"),
        ({"intermediate": True}, TypeError, r"intermediate: got True \(bool\), want an int"),
        ({"num_reserved_sms": -1}, ValueError, "num_reserved_sms: got -1, want at least 0"),
        ({"precision": "int8"}, ValueError, "precision: got 'int8', want one of bf16, fp8, fp8_bwd, mxfp8"),
        (
            {"precision": "fp8", "scale_format": "ue8m0"},
            ValueError,
            "scale_format: got 'ue8m0', want one of fp32, power_of_two",
        ),
        (
            {"scale_format": "power_of_two"},
            ValueError,
            "scale_format: got 'power_of_two' with precision 'bf16', want it with precision fp8 or fp8_bwd",
        ),
        ({"dtype": torch.float16}, ValueError, "dtype: got float16, want one of bfloat16, float32, float64"),
        ({"backend": "triton"}, ValueError, "backend: got 'triton', want auto, "),
        ({"device": "gpu"}, ValueError, "device: got 'gpu'"),
    ],
)
def test_limits_are_met_at_once_and_alike(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=text):
        mega_moe.explain(**{**SIZES, **changes})
    if "num_ranks" not in changes:
        with pytest.raises(error, match=text):
            MoEBuffer(**{**SIZES, **changes})
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_dw_in_fp8_needs_products_in_fp8(precision: str) -> None:
    with pytest.raises(ValueError, match="dw_precision: got 'fp8' with precision"):
        MoEBuffer(**SIZES, precision=precision, dw_precision="fp8")


@pytest.mark.parametrize("backend", ["deep_gemm", "grouped"])
def test_other_backends_refuse_dw_in_fp8_with_its_precision(backend: str) -> None:
    wanted = request(precision="fp8_bwd", dw_precision="fp8")
    with pytest.raises(BackendRefusedError, match=f"{backend}: refused: .*precision fp8_bwd is not emulated"):
        choose(decide(wanted, [gpu()], backend), backend)


def test_an_unknown_dw_precision() -> None:
    with pytest.raises(ValueError, match="dw_precision: got 'int8', want one of bf16, fp8"):
        MoEBuffer(**SIZES, precision="fp8", dw_precision="int8")


def test_what_users_see_of_a_buffer() -> None:
    with MoEBuffer(**SIZES, backend="grouped") as buffer:
        shown = {name for name in dir(buffer) if not name.startswith("_")}
    request = {"num_experts", "max_tokens_per_rank", "top_k", "hidden", "intermediate", "precision"}
    request |= {"num_local_experts", "dw_precision", "scale_format"}
    choice = {"backend", "reason", "explanation", "dtypes", "router", "router_reason"}
    call = {"activation", "device", "rank", "num_ranks", "save_gate_up", "saved_nbytes"}
    methods = {"check", "destroy", "nbytes", "reuse_weight_copies", "weights_changed"}
    assert shown == request | choice | call | methods
