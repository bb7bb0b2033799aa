"""The operator of the fused backward names the argument that is wrong; no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_moe._ops import library

T, K, E, H, I = 4, 2, 8, 256, 128  # noqa: E741


@pytest.fixture
def ops() -> Any:
    if not library.status().loaded:
        pytest.skip("the compiled library is not here")
    return library.require()


def call(ops: Any, **changes: Any) -> None:
    def bf16(*extents: int) -> torch.Tensor:
        return torch.zeros(*extents, dtype=torch.bfloat16)

    known: dict[str, Any] = dict(
        x=bf16(T, H),
        dy=bf16(T, H),
        topk_idx=torch.zeros(T, K, dtype=torch.int64),
        topk_weights=torch.zeros(T, K),
        w_gate_up=bf16(E, 2 * I, H),
        w_down=bf16(E, H, I),
        saved_gate_up=NONE,
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
        rank=0,
        num_sms=0,
        arrival_ns=1,
        progress_ns=1,
        clamp=float("inf"),
        accumulate=False,
        delay_seed=0,
        trace=0,
        trace_bytes=0,
    )
    ops.moe_backward(*(known | changes).values())


NONE = torch.empty(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "topk_idx: device is cpu, must be cuda"),
        (
            dict(dx=NONE, dtopk=NONE, dw_gate_up=NONE, dw_down=NONE),
            "topk_idx: device is cpu, must be cuda",
        ),
        (dict(dy=torch.zeros(T, H)), "dy: dtype is float32, must be bfloat16"),
        (dict(dy=torch.zeros(T + 1, H, dtype=torch.bfloat16)), "dy: shape is"),
        (dict(saved_gate_up=torch.zeros(128, 2 * I)), "saved_gate_up: dtype is float32, must be bfloat16"),
        (dict(saved_gate_up=torch.zeros(128, I, dtype=torch.bfloat16)), "saved_gate_up: shape is"),
        (
            dict(saved_gate_up=torch.zeros(100, 2 * I, dtype=torch.bfloat16)),
            "rows of saved_gate_up is 100, must be a multiple of 128",
        ),
        (dict(saved_gate_up=torch.zeros(7, dtype=torch.bfloat16)), "saved_gate_up: shape is"),
        (
            dict(saved_gate_up=torch.zeros(128, 2 * I, dtype=torch.bfloat16)),
            "topk_idx: device is cpu, must be cuda",
        ),
        (dict(dx=torch.zeros(T, H)), "dx: dtype is float32, must be bfloat16"),
        (dict(dtopk=torch.zeros(T, K, dtype=torch.bfloat16)), "dtopk: dtype is bfloat16, must be float32"),
        (dict(dtopk=torch.zeros(T, K + 1)), "dtopk: shape is"),
        (dict(dw_gate_up=torch.zeros(E, 2 * I, H)), "dw_down: dtype is bfloat16, must be float32"),
        (dict(dw_down=torch.zeros(E, H, I, dtype=torch.float64)), "dw_down: dtype is float64"),
        (dict(dw_down=torch.zeros(E, I, H, dtype=torch.bfloat16).mT), "dw_down: strides are"),
        (dict(clamp=0.0), "clamp is 0"),
        (dict(delay_seed=-1), "delay_seed is -1"),
        (dict(rank=1), "rank is 1, must be 0 to 0"),
        (
            dict(w_down=torch.zeros(E, H, 64, dtype=torch.bfloat16)),
            "intermediate is 64, must be a multiple of 128",
        ),
    ],
)
def test_operator_names_what_is_wrong(ops: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(ops, **changes)
