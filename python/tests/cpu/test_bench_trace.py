"""Reading, summing up, writing and checking made-up traces of the fused forward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mega_moe.bench.trace_events import KINDS, ROLES, TILE, Kind, State, code, event_name, read, tile
from mega_moe.bench.trace_output import chrome_events, summary, write_chrome

from ..gpu._schedule import order_faults, row_tiles, tile_faults  # noqa: TID252
from ._trace import COLUMNS, LOAD, MATH_0, MATH_1, PULL, PUSH, ROWS, SLOTS, array, schedule, two_tiles

# --- reading


def test_nothing_recorded_is_no_event_and_no_cta() -> None:
    for arrays in ([], [array({})], [torch.zeros(0, 5, 4, 3, dtype=torch.int64)]):
        got = read(arrays)
        assert (len(got), got.span, got.ctas, got.full_lanes, got.malformed) == (0, 0, (), (), 0)


def test_times_count_from_the_first_event_and_unlaunched_ctas_are_left_out() -> None:
    got = read([array({(1, PULL): [(code(11, 2, 5, 9), 70, 100)], (1, LOAD): [(code(16), 50, 60)]}, ctas=4)])
    assert got.ctas == ((0, 1),)
    assert got.start.tolist() == [0, 20]
    assert got.end.tolist() == [10, 50]
    assert got.role.tolist() == [LOAD, PULL]
    assert [column.tolist()[1] for column in (got.kind, got.chunk, got.expert, got.index)] == [11, 2, 5, 9]


def test_rows_out_of_order_read_as_rows_in_order() -> None:
    rows = [(code(11, 0, 0, at), 100 * at, 100 * at + 50) for at in range(6)]
    shuffled = [rows[at] for at in (3, 0, 5, 1, 4, 2)]
    ordered, other = (read([array({(0, PULL): some})]) for some in (rows, shuffled))
    assert ordered.start.tolist() == other.start.tolist() == [0, 100, 200, 300, 400, 500]
    assert ordered.index.tolist() == other.index.tolist()
    assert summary(ordered) == summary(other)


def test_every_field_of_a_code_comes_back_from_its_largest_value() -> None:
    word = code(17, (1 << 16) - 1, (1 << 16) - 1, (1 << 24) - 1)
    assert word < 0  # the sign bit belongs to the index
    got = read([array({(0, LOAD): [(word, 0, 1)]})])
    assert (got.kind[0], got.chunk[0], got.expert[0], got.index[0]) == (17, 65535, 65535, (1 << 24) - 1)


def test_a_lane_without_a_free_row_is_told() -> None:
    rows = [(code(11), at, at + 1) for at in range(8)]
    got = read([array({(0, PULL): rows[:7]}), array({(1, PULL): rows, (1, LOAD): [(code(16), 0, 1)]})])
    assert got.full_lanes == ((1, 1, PULL),)
    assert "dropped events: unknown number in 1 full lanes" in summary(got)
    assert "dropped events: none" in summary(read([array({(0, PULL): rows[:7]})]))


def test_rows_that_are_no_events_are_counted_and_left_out() -> None:
    rows = [(code(11), 10, 20), (code(11), 20, 10), (code(200), 10, 20), (code(11), 30, 30)]
    got = read([array({(0, PULL): rows})])
    assert (len(got), got.malformed) == (2, 2)
    assert "malformed rows: 2" in summary(got)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(1, 5, 4, 3),
        torch.zeros(1, 4, 4, 3, dtype=torch.int64),
        torch.zeros(5, 3, dtype=torch.int64),
    ],
)
def test_an_array_of_another_form_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"wanted torch.int64 \[ctas, 5, events, 3\]"):
        read([wrong])


# --- summary


def line(text: str, start: str) -> list[str]:
    """The words behind `start` of the first line that begins so."""
    found = next(line for line in text.splitlines() if line.startswith(f"{start} "))
    return found.removeprefix(start).split()


def test_summary_of_nothing() -> None:
    head = "kernel 0.0 us, ranks 1, CTAs 0, events 0"
    assert summary(read([array({})])) == f"{head}\ndropped events: none; malformed rows: 0\n"


def test_summary_of_one_cta() -> None:
    text = summary(read([two_tiles()]))
    assert "kernel 10.0 us, ranks 1, CTAs 1, events 11" in text
    # Waiting, copying, GEMM, epilogue, routing.
    assert line(text, "load") == ["0.0", "0.0", "0.0", "0.0", "10.0"]
    assert line(text, "math 0") == ["10.0", "0.0", "30.0", "10.0", "0.0"]
    assert line(text, "push")[:2] == ["70.0", "20.0"]
    assert "tensor cores busy 50.0 % of the kernel's time" in text
    assert "CTAs in a GEMM during pull: 50.0 %" in text  # 2.0 to 2.5 of 1.5 to 2.5 us
    assert "CTAs in a GEMM during push: 25.0 %" in text  # 8.0 to 8.5 of 8 to 10 us
    assert "owner sum" not in text
    assert line(text, "wait for tile") == ["2", "3.25", "5.50"]


def test_overlap_is_the_share_of_ctas_and_counts_no_time_twice() -> None:
    lanes = {
        (0, PULL): [(code(11), 0, 1000)],
        (1, MATH_0): [(code(6, 0, 0, tile(0, 0)), 0, 800)],
        (0, MATH_1): [(code(6, 0, 0, tile(0, 1)), 200, 500)],
        (1, MATH_1): [(code(6, 0, 0, tile(1, 0)), 700, 900)],
    }
    text = summary(read([array(lanes)]))
    assert "CTAs in a GEMM during pull: 60.0 %" in text  # one CTA for 90 %, the other for 30 %
    assert "tensor cores busy 60.0 %" in text


def test_waits_are_no_traffic() -> None:
    lanes = {(0, PUSH): [(code(12), 0, 900)], (0, MATH_0): [(code(6, 0, 0, tile(0, 0)), 0, 900)]}
    assert "during" not in summary(read([array(lanes)]))


def test_ranks_of_one_device_are_summed_up_together() -> None:
    got = read([two_tiles(), two_tiles()])
    assert got.ctas == ((0, 0), (1, 0))
    text = summary(got)
    assert "ranks 2, CTAs 2, events 22" in text
    assert "tensor cores busy 50.0 %" in text


def test_a_new_kind_needs_a_row_of_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = {(0, MATH_0): [(code(30, 0, 1, tile(0, 0)), 0, 500)], (0, LOAD): [(code(16), 0, 1000)]}
    assert read([array(lanes)]).malformed == 1
    monkeypatch.setitem(KINDS, 30, Kind(30, "new", "new", State.GEMM, TILE, after=8))
    got = read([array(lanes)])
    assert "tensor cores busy 50.0 %" in summary(got)
    assert line(summary(got), "new")[0] == "1"
    names = [event["name"] for event in chrome_events(got) if event["ph"] == "X"]
    assert sorted(names) == ["new e1 m0 n0", "routing"]
    assert "no epilogue gate/up of its rows" in order_faults(got)[0]


def test_table_of_kinds_is_sound() -> None:
    assert [kind.number for kind in KINDS.values()] == list(range(1, 30))
    assert all(KINDS[kind.after].index == TILE for kind in KINDS.values() if kind.after)
    assert event_name(KINDS[6], 12, tile(3, 5)) == "gate/up e12 m3 n5"
    assert event_name(KINDS[13], 12, 345) == "push entry 345"
    assert event_name(KINDS[16], 0, 0) == "routing"


def test_table_is_the_kernels_own_list() -> None:
    header = Path(__file__).resolve().parents[3] / "kernels" / "layout" / "trace.h"
    if not header.is_file():
        pytest.skip("the sources of the kernels are not alongside the tests")

    def names(enum: str) -> list[str]:
        body = re.sub(r"//.*", "", header.read_text().split(f"enum class {enum}")[1].split("}")[0])
        return re.findall(r"\bk([A-Z]\w*)", body)

    assert names("TraceRole") == ["Load", "Math0", "Math1", "Pull", "Push", "Count"]
    assert len(ROLES) == 5
    listed = names("TraceKind")
    assert len(listed) == len(KINDS)
    for name, kind in zip(listed, KINDS.values()):
        assert name.startswith("Wait") == (kind.state is State.WAIT), name
        assert name.startswith("Store") == (kind.state is State.EPILOGUE), name
        assert name.endswith("Down") == (kind.part == "down"), name
        assert name.endswith("GateUp") == (kind.part == "gate/up"), name
        for part in ("Pull", "Push", "OwnerSum"):
            assert name.endswith(part) == (kind.part == {"OwnerSum": "owner sum"}.get(part, part.lower())), (
                name
            )


# --- files


def chrome(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_chrome_file_has_a_process_per_cta_and_a_thread_per_role(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_chrome(read([two_tiles(), two_tiles()]), path, {"layer": "made up"})
    events = chrome(path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}  # type: ignore[index]
    assert names == {0: "rank 0 CTA 0", 1: "rank 1 CTA 0"}
    threads = [event for event in events if event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in threads] == [*ROLES, *ROLES]  # type: ignore[index]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 22
    (down,) = (event for event in complete if event["name"] == "down e3 m7 n2" and event["pid"] == 1)
    assert (down["tid"], down["ts"], down["dur"]) == (MATH_1, 6.5, 2.0)
    assert down["args"] == {"kind": 7, "chunk": 0, "expert": 3, "index": tile(7, 2)}
    assert down["cat"] == "down,GEMM"


def test_chrome_file_of_nothing_is_json(tmp_path: Path) -> None:
    write_chrome(read([array({})]), tmp_path / "t.json", {})
    assert chrome(tmp_path / "t.json") == []


# --- schedule


def test_a_right_schedule_has_no_faults() -> None:
    wanted = row_tiles([ROWS], [SLOTS], COLUMNS)
    assert wanted.total() == len(wanted) == 2 * (1 + 2)
    assert tile_faults(schedule(), wanted) == []
    assert order_faults(schedule()) == []


def test_tiles_of_several_ranks_and_chunks() -> None:
    rows, slots = torch.tensor([[1, 64], [0, 129]]), torch.tensor([[0, 128], [256, 256]])
    wanted = row_tiles([rows, rows], [slots, slots], {"gate/up": range(1)})
    assert {(chunk, expert, index) for _, _, chunk, expert, index in wanted} == {
        (0, 0, 0),
        (0, 1, 2),
        (1, 1, 4),
        (1, 1, 5),
        (1, 1, 6),
    }
    assert {rank for rank, *_ in wanted} == {0, 1}


def test_missing_strange_and_repeated_tiles_are_told() -> None:
    wanted = row_tiles([ROWS], [SLOTS], COLUMNS)
    assert tile_faults(schedule(columns=(0,)), wanted) == [
        "rank 0 chunk 0 down e0 m2 n1: not computed",
        "rank 0 chunk 0 down e0 m3 n1: not computed",
    ]
    assert tile_faults(schedule(columns=(0, 1, 2)), wanted) == [
        "rank 0 chunk 0 down e0 m2 n2: no such tile",
        "rank 0 chunk 0 down e0 m3 n2: no such tile",
    ]
    assert tile_faults(schedule(columns=(0, 1, 1)), wanted) == [
        "rank 0 chunk 0 down e0 m2 n1: computed 2 times, wanted 1",
        "rank 0 chunk 0 down e0 m3 n1: computed 2 times, wanted 1",
    ]


def test_the_last_column_of_the_rows_decides() -> None:
    lanes = {
        (0, MATH_0): [(code(8, 0, 0, tile(2, 0)), 0, 300), (code(8, 0, 0, tile(2, 1)), 10, 200)],
        (1, MATH_0): [(code(7, 0, 0, tile(2, 0)), 250, 400)],
    }
    (fault,) = order_faults(read([array(lanes)]))
    assert "ended at 300 ns" in fault


def test_gemms_before_their_inputs_are_told() -> None:
    # The GEMMs of block 2 begin at 370 and 380, those of block 3 at 390 and 400.
    assert order_faults(schedule(down=370, second_epilogue=390)) == []
    assert order_faults(schedule(down=370, second_epilogue=395)) == [
        "rank 0 chunk 0 down e0 m3 n0: began at 390 ns, the last epilogue gate/up of its rows ended at 395 ns"
    ]
