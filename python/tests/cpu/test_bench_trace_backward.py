"""Checking and summing up made-up traces of the fused backward."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mega_moe.bench.trace_events import Trace, code, read, tile
from mega_moe.bench.trace_output import chrome_events, summary

from ..gpu._schedule import PART_ROWS, of_backward, order_faults, tile_faults, wgrad_parts  # noqa: TID252
from ._trace import LOAD, MATH_0, MATH_1, PULL, Rows, array

LOAD_DX, LOAD_GRADIENT, DZ, DX, GRADIENT, STORE_DZ, STORE_DX, STORE_GRADIENT = 22, 23, 24, 25, 26, 27, 28, 29
HIDDEN, INTERMEDIATE = 256, 128
# Two experts, the second without a row; two blocks of rows, of which the second holds one.
ROWS, SLOTS = torch.tensor([[65, 0]]), torch.tensor([[0, 128]])
WANTED = of_backward([ROWS], [SLOTS], HIDDEN, INTERMEDIATE)


def gradients(expert: int, start: int) -> list[tuple[int, int, int]]:
    """One warpgroup's events of both weights: an index stands for a tile of each."""
    indices = [tile(row, 0) for row in (0, 1)] * 2
    return [(code(GRADIENT, 0, expert, at), start + 5 * n, start + 5 * n + 5) for n, at in enumerate(indices)]


def schedule(*, dx: int = 300, gradient: int = 320, missing: int = 0) -> Trace:
    """dz of both blocks ends at 200 and 290; loads of dx and of the gradients begin as told."""
    at = [tile(block, 0) for block in (0, 1)]
    zeros, sums = gradients(1, 20), gradients(0, 450)
    math_0: Rows = [
        *zeros,
        (code(DZ, 0, 0, at[0]), 100, 180),
        (code(STORE_DZ, 0, 0, at[0]), 180, 200),
        (code(DX, 0, 0, at[0]), 200, 400),
        (code(STORE_DX, 0, 0, at[0]), 400, 410),
        *sums[missing:],
        (code(STORE_GRADIENT, 0, 0, tile(0, 0)), 480, 490),
    ]
    math_1: Rows = [
        *zeros,
        (code(DZ, 0, 0, at[1]), 100, 250),
        (code(STORE_DZ, 0, 0, at[1]), 250, 290),
        (code(DX, 0, 0, at[1]), 290, 400),
        *sums,
    ]
    load: Rows = [
        (code(LOAD_GRADIENT, 0, 1, tile(0, 0)), 0, 10),  # of an expert without rows, which waits for nothing
        (code(LOAD_DX, 0, 0, at[0]), dx, dx + 10),
        (code(LOAD_GRADIENT, 0, 0, tile(1, 0)), gradient, gradient + 10),
    ]
    lanes = {(0, LOAD): load, (0, MATH_0): math_0, (0, MATH_1): math_1, (0, PULL): [(code(11), 0, 100)]}
    return read([array(lanes, capacity=16)])


def test_a_right_schedule_has_no_faults() -> None:
    assert WANTED.whole == {(0, 0, 0)}
    assert WANTED.total() == 2 + 2 + 2 * 2 * 4  # dz, dx; two warpgroups, two experts, four tiles of either
    made = schedule()
    assert tile_faults(made, WANTED.tiles) == []
    assert order_faults(made, WANTED.whole) == []


def test_missing_and_repeated_gradients_are_told() -> None:
    (fault,) = tile_faults(schedule(missing=1), WANTED.tiles)
    assert fault == "rank 0 chunk 0 wgrad e0 m0 n0: computed 3 times, wanted 4"
    fewer = of_backward([ROWS[:, :1]], [SLOTS[:, :1]], HIDDEN, INTERMEDIATE)
    assert tile_faults(schedule(), fewer.tiles) == [
        f"rank 0 chunk 0 wgrad e1 m{row} n0: no such tile" for row in (0, 1)
    ]


def test_loads_before_their_inputs_are_told() -> None:
    """dx waits for both blocks of its tile, a gradient for all rows of its expert."""
    assert order_faults(schedule(dx=290, gradient=290), WANTED.whole) == []
    assert order_faults(schedule(dx=289), WANTED.whole) == [
        "rank 0 chunk 0 load dx e0 m0 n0: began at 289 ns, the last epilogue dz of its rows ended at 290 ns"
    ]
    assert order_faults(schedule(gradient=250), WANTED.whole) == [
        "rank 0 chunk 0 load wgrad e0 m1 n0: began at 250 ns, the last epilogue dz of its rows ended at 290 ns"
    ]
    # Of an expert with several parts a gradient waits for one of them.
    assert order_faults(schedule(gradient=250)) == []


def test_parts_of_gradients() -> None:
    """Over chunks and within one; an expert without any row is written once, with zeros."""
    tables = [torch.tensor([[40000, 0, 0], [1, 0, 5]]), torch.tensor([[0, 16384, 16385], [0, 0, 0]])]
    assert dict(wgrad_parts(tables)) == {
        (0, 0, 0): 3,
        (0, 1, 0): 1,
        (0, 0, 1): 1,
        (0, 1, 2): 1,
        (1, 0, 0): 1,
        (1, 0, 1): 1,
        (1, 0, 2): 2,
    }
    wanted = of_backward(tables, [torch.zeros_like(own) for own in tables], HIDDEN, INTERMEDIATE)
    assert wanted.tiles[0, GRADIENT, 0, 0, tile(0, 0)] == 3 * 2 * 2
    assert wanted.whole == {(0, 1, 0), (0, 1, 2), (1, 0, 1)}


def test_columns_of_the_index() -> None:
    """Of 128 in every kind: dx and the gradients, whose tiles are 256 wide, take every second one."""
    wanted = of_backward([torch.tensor([[1]])], [torch.tensor([[0]])], 768, 384).tiles
    columns = {
        kind: {index >> 16 for _, number, *_, index in wanted if number == kind}
        for kind in (DZ, DX, GRADIENT)
    }
    assert columns == {DZ: {0, 1, 2}, DX: {0, 2, 4}, GRADIENT: {0, 2, 4}}
    rows = {index & 0xFFFF for _, number, *_, index in wanted if number == GRADIENT}
    assert rows == set(range(6))  # 768 rows of either weight's gradient
    assert wanted[0, GRADIENT, 0, 0, tile(0, 2)] == 4  # both weights: 768 and 384 columns
    assert wanted[0, GRADIENT, 0, 0, tile(0, 4)] == 2  # the first alone


def test_extents_are_the_kernels_own() -> None:
    header = Path(__file__).resolve().parents[3] / "kernels" / "layout" / "gradients.h"
    if not header.is_file():
        pytest.skip("the sources of the kernels are not alongside the tests")
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", header.read_text()))
    assert int(constants["kPartRows"]) == PART_ROWS
    # A tile of a cluster of two CTAs.
    assert (int(constants["kGradientRows"]), int(constants["kGradientColumns"])) == (2 * 128, 256)


def test_it_is_summed_up_and_named() -> None:
    made = schedule()
    text = summary(made)
    for label in ("dz", "epilogue dz", "dx", "wgrad", "epilogue wgrad", "load wgrad"):
        assert re.search(rf"^{label} +\d", text, re.MULTILINE), label
    names = [event["name"] for event in chrome_events(made) if event["ph"] == "X"]
    assert {"wgrad e0 m1 n0", "dz e0 m1 n0", "load dx e0 m0 n0"} <= set(names)
