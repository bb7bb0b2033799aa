"""The operator of the fused backward in fp8 names the argument that is wrong; no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_moe._backends.symmetric import Shape, workspace_layout
from mega_moe._ops import library

T, K, E, H, I = 4, 2, 8, 256, 128  # noqa: E741
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def ops() -> Any:
    if not library.status().loaded:
        pytest.skip("the compiled library is not here")
    return library.require()


def call(ops: Any, **changes: Any) -> None:
    def bf16(*extents: int) -> torch.Tensor:
        return torch.zeros(*extents, dtype=torch.bfloat16)

    def e4m3(*extents: int) -> torch.Tensor:
        return torch.zeros(*extents, dtype=E4M3)

    known: dict[str, Any] = dict(
        x=bf16(T, H),
        dy=bf16(T, H),
        topk_idx=torch.zeros(T, K, dtype=torch.int64),
        topk_weights=torch.zeros(T, K),
        w_gate_up=e4m3(E, 2 * I, H),
        w_gate_up_t=e4m3(E, H, 2 * I),
        gate_up_sf=torch.zeros(E, 2 * I // 128, H // 128),
        w_down_t=e4m3(E, I, H),
        down_sf=torch.zeros(E, H // 128, I // 128),
        dx=bf16(T, H),
        dtopk=torch.zeros(T, K),
        dw_gate_up=bf16(E, 2 * I, H),
        dw_down=bf16(E, H, I),
        summary=torch.zeros(2 + 1 + 3 * E + 2, dtype=torch.int32),
        buffers=[256],
        workspace=256,
        record=256,
        max_tokens=T,
        num_experts=E,
        pool_rows=0,
        canaries=False,
        quantize=False,
        quantize_gradients=False,
        rank=0,
        num_sms=0,
        arrival_ns=1,
        progress_ns=1,
        clamp=float("inf"),
        power_of_two=False,
        accumulate=False,
        delay_seed=0,
        trace=0,
        trace_bytes=0,
    )
    ops.moe_backward_fp8(*(known | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "topk_idx: device is cpu, must be cuda"),
        (dict(quantize=True), "topk_idx: device is cpu, must be cuda"),
        (
            dict(w_gate_up=torch.zeros(E, 2 * I, H, dtype=torch.bfloat16)),
            "w_gate_up: dtype is bfloat16, must be float8_e4m3fn",
        ),
        (dict(w_gate_up_t=torch.zeros(E, H, I, dtype=E4M3)), "w_gate_up_t: shape is"),
        (dict(w_down_t=torch.zeros(E, I, H)), "w_down_t: dtype is float32, must be float8_e4m3fn"),
        (dict(w_down_t=torch.zeros(E, H, I, dtype=E4M3)), "w_gate_up: shape is"),
        (dict(gate_up_sf=torch.zeros(E, H // 128, 2 * I // 128 + 1)), "gate_up_sf: shape is"),
        (dict(down_sf=torch.zeros(E, H // 128, I // 128, dtype=torch.float64)), "down_sf: dtype is float64"),
        (dict(dy=torch.zeros(T, H)), "dy: dtype is float32, must be bfloat16"),
        (dict(dw_down=torch.zeros(E, H, I)), "dw_down: dtype is float32, must be bfloat16"),
        (dict(clamp=0.0), "clamp is 0"),
        (dict(max_tokens=1024, pool_rows=1300), "pool_rows is 1300, must be a multiple of 128"),
    ],
)
def test_operator_names_what_is_wrong(ops: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(ops, **changes)


@pytest.mark.parametrize("form", [-1, 4])
def test_layouts_know_three_forms_of_backward(ops: Any, form: int) -> None:
    with pytest.raises(RuntimeError, match=f"backward is {form}, must be 0 to 3"):
        ops.workspace_layout(16, 2, 8, 512, 128, 1, 0, False, True, False, form)


@pytest.mark.usefixtures("ops")
def test_the_backward_in_fp8_adds_codes_and_their_scale_factors() -> None:
    def parts(**changes: bool) -> dict[str, tuple[int, int]]:
        return workspace_layout(
            Shape(256, 4, 16, 1024, 2, intermediate=384, home=True, backward=True, **changes)
        ).parts

    plain, wide = parts(), parts(quantize_backward=True)
    added = {name: size for name, (_, size) in wide.items() if size != plain[name][1]}
    rows = wide["o_pool"][1] // 2048
    assert added == {
        "x_sf_pool": rows * 8 * 4,
        "x_e4m3_pool": rows * 1024,
        "dy_e4m3_pool": rows * 1024,
        "dz_e4m3_pool": rows * 768,
        "dy_sf_pool": rows * 8 * 4,
        "dz_sf_pool": rows * 6 * 4,
    }
    codes = parts(quantize_backward=True, quantize_gradients=True)
    changed = {name: size for name, (_, size) in codes.items() if size != wide[name][1]}
    assert changed == {
        "counters": changed["counters"],
        "dz_pool": rows * 768,
        "x_t_pool": rows * 1024,
        "dy_t_pool": rows * 1024,
        "dw_sf_pool": rows // 128 * (768 + 1024 + 4 * 4 + 2 * 4) * 4,
    }
