"""Layouts of the symmetric buffer and the workspace as the library gives them, and what the operator refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mega_moe
from mega_moe._backends.fused.memory import (
    Layout,
    Shape,
    broken_canaries,
    symmetric_layout,
    workspace_layout,
    write_canaries,
)
from mega_moe._base.mode import Mode
from mega_moe._ops import library

LAYER = Mode("bf16")


@pytest.fixture(scope="module")
def ops() -> Any:
    if not library.status().loaded:
        pytest.skip(f"the compiled library is not loaded: {library.status().reason}")
    return library.require()


def shape(**changes: Any) -> Shape:
    known: dict[str, Any] = dict(max_tokens=16384, top_k=8, num_experts=128, hidden=2048, num_ranks=8)
    return Shape(**(known | changes))


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 32])
@pytest.mark.parametrize("canaries", [False, True])
@pytest.mark.parametrize("intermediate", [0, 768])
def test_parts_follow_one_another(num_ranks: int, canaries: bool, intermediate: int) -> None:
    wanted = shape(
        num_ranks=num_ranks,
        canaries=canaries,
        intermediate=intermediate,
        mode=LAYER if intermediate else Mode(),
    )
    for layout in (symmetric_layout(wanted), workspace_layout(wanted)):
        end = 0
        for start, size in layout.parts.values():
            assert start % 256 == 0
            assert start - end >= (256 if canaries else 0)
            assert start - end < (512 if canaries else 256)
            end = start + size
        assert end <= layout.total < end + (512 if canaries else 256)


@pytest.mark.usefixtures("ops")
def test_nbytes_is_the_sum_of_both_layouts() -> None:
    sizes = dict(num_experts=128, max_tokens_per_rank=16384, top_k=8, hidden=2048, intermediate=768)
    for ranks in (1, 8):
        want = symmetric_layout(shape(num_ranks=ranks)).total + workspace_layout(shape(num_ranks=ranks)).total
        assert mega_moe.MoEBuffer.nbytes(**sizes, num_ranks=ranks, backend="grouped") == want


@pytest.mark.usefixtures("ops")
def test_pools_are_there_when_asked_for() -> None:
    without, pooled = (
        workspace_layout(shape()).parts,
        workspace_layout(shape(intermediate=768, mode=LAYER)).parts,
    )
    for name, width in (("x_pool", 2048), ("h_pool", 768), ("o_pool", 2048)):
        assert without[name][1] == 0
        assert pooled[name][1] >= 16384 * 8 * 8 * width * 2, "pool_rows 0: a chunk holds whatever comes"
    assert without["counters"][1] == 0
    assert pooled["counters"][1] > 0


@pytest.mark.usefixtures("ops")
def test_owner_sums_are_there_when_asked_for() -> None:
    without = symmetric_layout(shape()).parts["owner_sums"]
    with_sums = symmetric_layout(shape(intermediate=768, mode=LAYER)).parts["owner_sums"]
    assert without[1] == 0
    assert with_sums[1] == 16384 * 8 * 2048 * 2


@pytest.mark.usefixtures("ops")
def test_x_is_staged_as_the_layer_reads_it() -> None:
    """A buffer that only routes stages none; a backward stages bf16 at the place of a forward's codes."""
    elements = 16384 * 2048
    for mode, x, scales in (
        (Mode(), 0, 0),
        (Mode("bf16"), 2 * elements, 0),
        (Mode("fp8"), elements, elements // 128 * 4),
        (Mode("fp8", "fp8", "bf16"), 2 * elements, elements // 128 * 4),
    ):
        parts = symmetric_layout(shape(intermediate=768 if mode.forward != "none" else 0, mode=mode)).parts
        assert (parts["staged_x"][1], parts["staged_scales"][1]) == (x, scales)


def test_bad_extents_are_named(ops: Any) -> None:
    for changes, message in (
        (dict(num_ranks=33, num_experts=33), "num_ranks is 33, must be 1 to 32"),
        (dict(num_experts=100), "num_experts is 100, must be a multiple of 8"),
        (dict(top_k=17), "top_k is 17"),
        (dict(pool_rows=128), "pool_rows is 128, must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.workspace_layout(shape(**changes).words())


def call(ops: Any, **changes: Any) -> None:
    tensors: dict[str, Any] = dict(
        topk_idx=torch.zeros(4, 2, dtype=torch.int64),
        topk_weights=torch.zeros(4, 2),
        summary=torch.zeros(2 + 1 + 3 * 8 + 2, dtype=torch.int32),
        refused_tokens=0,
    )
    words = dict(rank=0, num_sms=0, arrival_ns=1, progress_ns=1, workspace=256, record=256, buffer=256)
    words |= {name: changes.pop(name) for name in list(changes) if name in words}
    ops.route(**tensors | {"rank": [*Shape(4, 2, 8, 64, 1).words(), *words.values()]} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "topk_idx: device is cpu, must be cuda"),
        (dict(topk_weights=None), "topk_idx: device is cpu, must be cuda"),
        (dict(refused_tokens=7), "topk_idx: device is cpu, must be cuda"),
        (dict(refused_tokens=-1), "refused_tokens is -1"),
        (
            dict(topk_idx=torch.zeros(5, 2, dtype=torch.int64), topk_weights=torch.zeros(5, 2)),
            "number of tokens is 5",
        ),
        (dict(topk_idx=torch.zeros(4, 2)), "topk_idx: dtype is float32, must be int32 or int64"),
        (dict(topk_weights=torch.zeros(3, 2)), "topk_weights: shape is"),
        (dict(summary=torch.zeros(3, dtype=torch.int32)), "summary: shape is"),
        (dict(buffer=0), r"buffers\[0\] is a null address: this rank cannot reach rank 0"),
        (dict(rank=1), "rank is 1, must be 0 to 0"),
        (dict(topk_idx=torch.zeros(2, 4, dtype=torch.int64).t()), "topk_idx: strides are"),
    ],
)
def test_operator_names_what_is_wrong(ops: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(ops, **changes)


def test_canaries_show_a_write_between_parts() -> None:
    layout = Layout({"a": (256, 100), "b": (768, 256)}, 1280)
    memory = torch.zeros(1280, dtype=torch.uint8)
    write_canaries(memory, layout)
    memory[256:356] = 7
    memory[768:1024] = 7
    assert broken_canaries(memory, layout) == []
    memory[356] = 0
    memory[1279] = 0
    assert broken_canaries(memory, layout) == [(356, 768), (1024, 1280)]
