"""What the fused backend leaves to others, and what of its reasons lies in the request alone."""

from __future__ import annotations

from typing import Any

import pytest

from mega_moe._backends.choice.decide import decide, holds_backward, why_no_fused_shape, why_no_kernel_router
from mega_moe._backends.choice.facts import Variant

from ._facts import FULL, PROBE_ONLY, gpu, kernels, request
from .test_core_decide import TABLE


@pytest.mark.parametrize(
    "name", [name for name, row in TABLE.items() if row.backend == "fused" and not row.reasons]
)
def test_what_fused_accepts_can_be_routed(name: str) -> None:
    """Its memory and its refusals are the routing kernel's."""
    assert why_no_kernel_router(TABLE[name].request, TABLE[name].facts) == []


def test_a_stand_in_for_the_backward_is_told() -> None:
    whole, forward = gpu(), gpu(variants=kernels("forward bf16"))
    assert decide(request(), [whole])[0].note is None
    verdict = decide(request(), [forward])[0]
    assert verdict.note == (
        "the backward runs on torch's grouped GEMMs, since this wheel holds no fused backward kernel in bf16"
    )
    assert str(verdict) == f"fused: accepted; {verdict.note}"
    for refused in (request(hidden=384), request(precision="fp8")):
        assert decide(refused, [forward])[0].note is None


@pytest.mark.parametrize(("precision", "held"), [("fp8", "forward fp8"), ("fp8_bwd", "forward bf16")])
def test_an_emulated_backward_is_told(precision: str, held: str) -> None:
    verdict = decide(request(precision=precision), [gpu(variants=kernels(held))])[0]
    assert str(verdict) == (
        "fused: accepted; the backward is emulated by plain operators, slowly, "
        "since this wheel holds no fused backward kernel in fp8"
    )
    assert decide(request(precision=precision), [gpu()])[0].note is None


def test_dw_in_fp8_has_a_kernel_of_its_own() -> None:
    wanted = request(precision="fp8", dw_precision="fp8")
    assert decide(wanted, [gpu()])[0].note is None
    assert holds_backward(wanted, FULL)
    without = tuple(v for v in FULL if v.wgrad != "fp8")
    assert decide(wanted, [gpu(variants=without)])[0].note == (
        "the backward is emulated by plain operators, slowly, since this wheel holds no fused backward kernel in fp8 "
        "with dw_precision fp8"
    )
    assert not holds_backward(wanted, without)
    assert decide(request(precision="fp8"), [gpu(variants=without)])[0].note is None


def test_a_backward_in_fp8_needs_copies_of_the_weights() -> None:
    held = tuple(v for v in FULL if v.op != "quantize_weights")
    assert "emulated" in str(decide(request(precision="fp8_bwd"), [gpu(variants=held)])[0])


@pytest.mark.parametrize(
    ("changes", "held", "reasons"),
    [
        ({}, kernels("forward bf16"), []),
        ({"hidden": 384}, kernels("forward bf16"), ["hidden is 384, must be a multiple of 256"]),
        ({"dtype": "float32"}, kernels("forward bf16"), ["takes bfloat16 inputs, got float32"]),
        ({}, PROBE_ONLY, ["this wheel holds no fused forward kernel in bf16"]),
        ({"precision": "fp8_bwd"}, kernels("forward bf16"), []),
        (
            {"precision": "fp8"},
            PROBE_ONLY,
            [
                "this wheel holds no fused forward kernel in fp8",
                "this wheel holds no weight-quantizing kernel in fp8",
            ],
        ),
        ({"precision": "fp8_bwd"}, FULL, []),
        ({"precision": "fp8", "dw_precision": "fp8"}, FULL, []),
    ],
)
def test_what_lies_in_the_request_alone(
    changes: dict[str, Any], held: tuple[Variant, ...], reasons: list[str]
) -> None:
    assert why_no_fused_shape(request(**changes), held) == reasons
