"""The operators of the fused kernels name the argument that is wrong; no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._backends.fused.memory import Shape, workspace_layout
from mega_moe._base.mode import Mode
from mega_moe._ops import library

T, K, E, H, I = 4, 2, 8, 512, 128  # noqa: E741
E4M3 = torch.float8_e4m3fn
BF16 = Mode("bf16", "bf16", "bf16")
FP8 = Mode("fp8", "fp8", "bf16")
FP8_BWD = Mode("bf16", "fp8", "bf16")
# Where every other check has passed.
PASSED = "topk_idx: device is cpu, must be cuda"


@pytest.fixture
def ops() -> Any:
    if not library.status().loaded:
        pytest.skip("the compiled library is not here")
    return library.require()


def bf16(*extents: int) -> Tensor:
    return torch.zeros(*extents, dtype=torch.bfloat16)


def e4m3(*extents: int) -> Tensor:
    return torch.zeros(*extents, dtype=E4M3)


def rank_words(mode: Mode, **changes: int) -> list[int]:
    shape = Shape(T, K, E, H, 1, intermediate=I if mode.forward != "none" else 0, mode=mode)
    names = [
        "max_tokens",
        "top_k",
        "num_experts",
        "hidden",
        "intermediate",
        "num_ranks",
        "pool_rows",
        "forward",
        "backward",
        "wgrad",
    ]
    names += [
        "scale_format",
        "canaries",
        "rank",
        "num_sms",
        "arrival_ns",
        "progress_ns",
        "workspace",
        "record",
        "buffer",
    ]
    words = dict(zip(names, [*shape.words(), 0, 0, 1, 1, 256, 256, 256], strict=True))
    assert set(changes) <= set(words)
    return list((words | changes).values())


def shared(mode: Mode, changes: dict[str, Any]) -> dict[str, Any]:
    """What both operators take; words of the rank are changed by name."""
    words = {name: changes.pop(name) for name in list(changes) if isinstance(changes[name], int)}
    return {
        "topk_idx": torch.zeros(T, K, dtype=torch.int64),
        "topk_weights": torch.zeros(T, K),
        "summary": torch.zeros(2 + 1 + 3 * E + 2, dtype=torch.int32),
        "rank": rank_words(mode, **words),
        "activation": "swiglu",
        "clamp": None,
        "alpha": None,
    }


def forward(ops: Any, mode: Mode, **changes: Any) -> None:
    fp8 = mode.forward == "fp8"
    weight = e4m3 if fp8 else bf16
    ops.moe_forward(
        **shared(mode, changes)
        | {
            "x": bf16(T, H),
            "w_gate_up": weight(E, 2 * I, H),
            "w_down": weight(E, H, I),
            "gate_up_sf": torch.zeros(E, 2 * I // 128, H // 128) if fp8 else None,
            "down_sf": torch.zeros(E, H // 128, I // 128) if fp8 else None,
            "y": bf16(T, H),
            "saved_gate_up": None,
        }
        | changes
    )


def backward(ops: Any, mode: Mode, **changes: Any) -> None:
    fp8 = mode.backward == "fp8"
    ops.moe_backward(
        **shared(mode, changes)
        | {
            "dy": bf16(T, H),
            "x": bf16(T, H),
            "w_gate_up": (e4m3 if fp8 else bf16)(E, 2 * I, H),
            "w_down": None if fp8 else bf16(E, H, I),
            "w_gate_up_t": e4m3(E, H, 2 * I) if fp8 else None,
            "w_down_t": e4m3(E, I, H) if fp8 else None,
            "gate_up_sf": torch.zeros(E, 2 * I // 128, H // 128) if fp8 else None,
            "down_sf": torch.zeros(E, H // 128, I // 128) if fp8 else None,
            "saved_gate_up": None,
            "dx": bf16(T, H),
            "dtopk": torch.zeros(T, K),
            "dw_gate_up": bf16(E, 2 * I, H),
            "dw_down": bf16(E, H, I),
            "accumulate": False,
        }
        | changes
    )


# Of both operators, in every mode.
OF_A_CALL: list[tuple[dict[str, Any], str]] = [
    ({}, PASSED),
    ({"x": torch.zeros(T, H)}, "x: dtype is float32, must be bfloat16"),
    ({"x": bf16(T + 1, H)}, "x: shape is"),
    ({"topk_idx": torch.zeros(T, K)}, "topk_idx: dtype is float32, must be int32 or int64"),
    ({"topk_weights": torch.zeros(T, K + 1)}, "topk_weights: shape is"),
    ({"summary": torch.zeros(3, dtype=torch.int32)}, "summary: shape is"),
    ({"activation": "relu2"}, "activation is 'relu2', must be 'swiglu'"),
    ({"clamp": 0.0}, "clamp is 0"),
    ({"alpha": 1.7}, "alpha is 1.7"),
    ({"rank": [1, 2]}, "shape has 2 words, must have 12"),
    ({"rank": rank_words(BF16)[:-1]}, "rank has 18 words, must have 19"),
    ({"num_ranks": 2}, "rank has 19 words, must have 20"),
    ({"buffer": 0}, r"buffers\[0\] is a null address: this rank cannot reach rank 0"),
    ({"buffer": 260}, r"buffers\[0\]: address is 4 past a multiple of 256"),
    ({"workspace": 0}, "workspace is a null address"),
    ({"record": 0}, "record is a null address"),
    ({"arrival_ns": 0}, "arrival_ns is 0"),
    ({"num_sms": -1}, "num_sms is -1"),
    ({"hidden": 768 + 8}, "hidden is 776, must be a multiple of"),
    ({"intermediate": 64}, "intermediate is 64, must be a multiple of 128"),
    ({"top_k": 17}, "top_k is 17"),
    ({"num_experts": 2049}, "num_experts is 2049"),
    ({"pool_rows": 128}, "pool_rows is 128, must be"),
    ({"forward": 3}, "forward precision is 3, must be 0 to 2"),
    ({"scale_format": 2}, "scale format is 2, must be 0 to 1"),
    ({"wgrad": 0}, "wgrad precision and backward precision must both be given or both be none"),
    ({"trace": torch.zeros(2, 5, 8, 3)}, "trace: dtype is float32, must be int64"),
    ({"trace": torch.zeros(2, 5, 8, 4, dtype=torch.int64)}, "trace: shape is"),
    ({"trace": torch.zeros(4, dtype=torch.int64)}, "trace: shape is"),
]
SAVED: list[tuple[dict[str, Any], str]] = [
    ({"saved_gate_up": torch.zeros(128, 2 * I)}, "saved_gate_up: dtype is float32, must be bfloat16"),
    ({"saved_gate_up": bf16(128, I)}, "saved_gate_up: shape is"),
    ({"saved_gate_up": bf16(7)}, "saved_gate_up: shape is"),
    ({"saved_gate_up": bf16(100, 2 * I)}, "rows of saved_gate_up is 100, must be a multiple of 128"),
    ({"saved_gate_up": bf16(128, 2 * I)}, PASSED),
]


def refused(call: Any, ops: Any, mode: Mode, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(ops, mode, **changes)


@pytest.mark.parametrize(
    "mode", [BF16, FP8, FP8_BWD, Mode("fp8", "fp8", "fp8", "power_of_two")], ids="/".join
)
@pytest.mark.parametrize("call", [forward, backward])
@pytest.mark.parametrize(("changes", "message"), OF_A_CALL)
def test_both(ops: Any, call: Any, mode: Mode, changes: dict[str, Any], message: str) -> None:
    refused(call, ops, mode, changes, message)


@pytest.mark.parametrize("call", [forward, backward])
@pytest.mark.parametrize("mode", [BF16, FP8, FP8_BWD], ids="/".join)
def test_saved_gate_up(ops: Any, call: Any, mode: Mode) -> None:
    for changes, message in SAVED:
        refused(call, ops, mode, changes, message)


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        (BF16, {"w_gate_up": e4m3(E, 2 * I, H)}, "w_gate_up: dtype is float8_e4m3fn, must be bfloat16"),
        (
            BF16,
            {"gate_up_sf": torch.zeros(1)},
            "gate_up_sf is a tensor, must be None but where the forward is in fp8",
        ),
        (BF16, {"y": torch.zeros(T, H)}, "y: dtype is float32, must be bfloat16"),
        (BF16, {"x": e4m3(T, H)}, "x: dtype is float8_e4m3fn, must be bfloat16"),
        (FP8, {"x": e4m3(T, H)}, PASSED),
        (FP8, {"w_down": bf16(E, H, I)}, "w_down: dtype is bfloat16, must be float8_e4m3fn"),
        (FP8, {"down_sf": None}, "down_sf is None, must be a tensor where the forward is in fp8"),
        (FP8, {"gate_up_sf": torch.zeros(E, 4, 2)}, "gate_up_sf: shape is"),
        (FP8, {"hidden": 768}, "hidden is 768, must be a multiple of 512"),
        (FP8, {"max_tokens": 1024, "pool_rows": 1300}, "pool_rows is 1300, must be a multiple of 128"),
        (Mode(), {}, "the buffer is laid out for routing alone"),
    ],
)
def test_forward(ops: Any, mode: Mode, changes: dict[str, Any], message: str) -> None:
    refused(forward, ops, mode, changes, message)


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        (BF16, dict(dx=None, dtopk=None, dw_gate_up=None, dw_down=None), PASSED),
        (BF16, {"dy": bf16(T + 1, H)}, "dy: shape is"),
        (BF16, {"dx": torch.zeros(T, H)}, "dx: dtype is float32, must be bfloat16"),
        (BF16, {"dtopk": bf16(T, K)}, "dtopk: dtype is bfloat16, must be float32"),
        (BF16, {"dtopk": torch.zeros(T, K + 1)}, "dtopk: shape is"),
        (BF16, {"dw_gate_up": torch.zeros(E, 2 * I, H)}, "dw_down: dtype is bfloat16, must be float32"),
        (BF16, {"dw_down": torch.zeros(E, H, I, dtype=torch.float64)}, "dw_down: dtype is float64"),
        (BF16, {"dw_down": bf16(E, I, H).mT}, "dw_down: strides are"),
        (BF16, {"w_down": None}, "w_down is None, must be a tensor where the backward is not in fp8"),
        (
            BF16,
            {"w_down_t": e4m3(E, I, H)},
            "w_down_t is a tensor, must be None but where the backward is in fp8",
        ),
        (
            FP8,
            {"w_down": e4m3(E, H, I)},
            "w_down is a tensor, must be None but where the backward is not in fp8",
        ),
        (FP8, {"w_gate_up_t": e4m3(E, H, I)}, "w_gate_up_t: shape is"),
        (FP8_BWD, {"w_down_t": torch.zeros(E, I, H)}, "w_down_t: dtype is float32, must be float8_e4m3fn"),
        (FP8_BWD, {"gate_up_sf": None}, "gate_up_sf is None, must be a tensor where the backward is in fp8"),
        (FP8_BWD, {"hidden": 768}, "x: shape is"),  # a multiple of 256 is enough for the backward
        (BF16, {"wgrad": 2}, "wgrad precision is fp8, must be bf16 where the backward precision is not fp8"),
        (Mode("bf16"), {}, "the buffer is laid out without a backward"),
    ],
)
def test_backward(ops: Any, mode: Mode, changes: dict[str, Any], message: str) -> None:
    refused(backward, ops, mode, changes, message)


@pytest.mark.usefixtures("ops")
def test_the_backward_in_fp8_adds_codes_and_their_scale_factors() -> None:
    def parts(mode: Mode) -> dict[str, tuple[int, int]]:
        return workspace_layout(Shape(256, 4, 16, 1024, 2, intermediate=384, mode=mode)).parts

    plain, wide = parts(BF16), parts(FP8_BWD)
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
    codes = parts(Mode("bf16", "fp8", "fp8"))
    changed = {name: size for name, (_, size) in codes.items() if size != wide[name][1]}
    assert changed == {
        "counters": changed["counters"],
        "dz_pool": rows * 768,
        "x_t_pool": rows * 1024,
        "dy_t_pool": rows * 1024,
        "dw_sf_pool": rows // 128 * (768 + 1024 + 4 * 4 + 2 * 4) * 4,
    }
