"""FLOPs and bytes that the rates are computed from."""

from __future__ import annotations

import pytest

from mega_moe.bench.schema import Timing
from mega_moe.bench.shapes import DIRECTIONS, SHAPES, Work, find_shape, layer_work


def test_published_shapes() -> None:
    sizes = {s.name: (s.hidden, s.intermediate, s.num_experts, s.top_k) for s in SHAPES.values()}
    assert sizes["30B"] == (2048, 768, 128, 8)
    assert sizes["235B"] == (4096, 1536, 128, 8)
    assert sizes["DeepSeek-V3"] == (7168, 2048, 256, 8)


def test_shape_is_found_in_any_case_and_a_stranger_is_refused() -> None:
    assert find_shape("deepseek-v3") is SHAPES["DeepSeek-V3"]
    with pytest.raises(ValueError, match=r"shape: got '31B', wanted one of tiny, 30B"):
        find_shape("31B")


@pytest.mark.parametrize(
    ("direction", "recompute", "units", "rule"),
    [
        ("forward", True, 6, "6*T*K*H*I"),
        ("backward", True, 16, "16*T*K*H*I, gate and up recomputed"),
        ("backward", False, 12, "12*T*K*H*I, nothing recomputed"),
        ("forward_backward", True, 22, "22*T*K*H*I, gate and up recomputed"),
    ],
)
def test_flops_of_a_direction(direction: str, recompute: bool, units: int, rule: str) -> None:
    work = layer_work(
        SHAPES["30B"], 16384, direction, precision="bf16", dtype="bfloat16", recompute=recompute
    )
    assert work == Work({"bfloat16": float(units * 16384 * 8 * 2048 * 768)}, rule)


def test_forward_flops_are_those_of_the_products() -> None:
    shape, tokens = SHAPES["tiny"], 100
    rows = tokens * shape.top_k
    gate_up = 2 * rows * shape.hidden * (2 * shape.intermediate)
    down = 2 * rows * shape.intermediate * shape.hidden
    assert layer_work(shape, tokens, "forward", precision="bf16", dtype="float32").total == gate_up + down


def test_fp8_keeps_the_weight_gradient_in_bf16_unless_asked() -> None:
    unit = 16384 * 8 * 2048 * 768
    for direction, precision, fp8, bf16 in [
        ("forward", "fp8", 6, 0),
        ("backward", "fp8", 10, 6),
        ("forward", "fp8_bwd", 0, 6),
        ("backward", "fp8_bwd", 10, 6),
        ("forward_backward", "fp8_bwd", 10, 12),
    ]:
        work = layer_work(SHAPES["30B"], 16384, direction, precision=precision, dtype="bfloat16")
        assert work.flops.get("float8_e4m3fn", 0.0) == fp8 * unit, (direction, precision)
        assert work.flops.get("bfloat16", 0.0) == bf16 * unit, (direction, precision)
    wanted = {"precision": "fp8", "dtype": "bfloat16", "dw_precision": "fp8"}
    assert layer_work(SHAPES["30B"], 16384, "backward", **wanted).flops == {"float8_e4m3fn": 16 * unit}


def test_unknown_direction_and_precision_are_refused() -> None:
    with pytest.raises(ValueError, match=r"direction: got 'sideways', wanted one of forward"):
        layer_work(SHAPES["tiny"], 1, "sideways", precision="bf16", dtype="float32")
    with pytest.raises(ValueError, match=r"precision: got 'mxfp8', wanted one of bf16"):
        layer_work(SHAPES["tiny"], 1, "forward", precision="mxfp8", dtype="float32")
    assert DIRECTIONS == ("forward", "backward", "forward_backward")


def test_percent_of_ceiling_weighs_each_element_type() -> None:
    from mega_moe.bench.layer import percent_of_ceiling

    timing = Timing("burst", "CUDA events", 0.004, (0.004,), 1, 1, 0.25, 1500.0, None)
    work = Work({"bfloat16": 1e12, "float8_e4m3fn": 2e12}, "made up")
    rates = {("burst", "product bfloat16"): 1000.0, ("burst", "product float8_e4m3fn"): 2000.0}
    # 1 ms at 1000 TF/s and 1 ms at 2000 TF/s in a call of 4 ms.
    assert percent_of_ceiling(work, timing, rates) == pytest.approx(50.0)
    del rates["burst", "product bfloat16"]
    assert percent_of_ceiling(work, timing, rates) is None
