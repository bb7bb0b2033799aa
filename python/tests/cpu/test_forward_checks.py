"""The tests of the fused forward on a stand-in without a GPU: they pass, and each finds the faults that it is for."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from mega_moe.testing import fp64_moe

# What is tested here lies alongside the GPU tests that use it.
from ..gpu import (  # noqa: TID252
    _forward,
    _stand_in,
    memcheck_forward,
    test_forward_batch,
    test_forward_inputs,
    test_forward_repeat,
    test_forward_values,
)
from ..gpu._virtual import random_ids  # noqa: TID252

CPU = torch.device("cpu")


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_fast_fp64_is_the_plain_one(clamp: float | None) -> None:
    ids = random_ids("duplicates", [30, 0, 17], 3, 6, CPU)
    layer = _forward.random_layer(ids, _forward.random_experts(CPU, 6, 64, 32), weights="signed", clamp=clamp)
    one = layer.as_one_rank()
    want = fp64_moe(one.x[0], one.ids[0], one.weights[0], one.gate_up, one.down, clamp)
    assert torch.allclose(torch.cat(_forward.exact(layer).y), want, rtol=1e-12, atol=1e-12)


# Extents at which a check takes less than a second here, by module.
SMALL: dict[ModuleType, dict[str, Any]] = {
    test_forward_values: dict(FEW=200, TOKENS=(0, 1, 63, 64, 65, 200), LARGEST=512),
    test_forward_inputs: {},
    test_forward_batch: dict(FEW=130, MANY=300, BLOCKS=8),
    test_forward_repeat: dict(MOST=150, STEPS=20, FEW=130, SEEDS=5),
}


class Check(NamedTuple):
    module: ModuleType
    test: Callable[..., None]
    arguments: tuple[Any, ...]
    faults: tuple[str, ...]


values, inputs, batch, repeat = SMALL
CHECKS = {
    "tokens": Check(
        values,
        values.test_any_number_of_tokens,
        ("one expert each", 2),
        ("token lost", "unwritten", "pad row leaks"),
    ),
    "slots": Check(
        values,
        values.test_any_number_of_tokens,
        ("smoke", 1),
        ("rows swapped", "row dropped", "weight missing", "gate and up swapped"),
    ),
    "routing": Check(
        values,
        values.test_any_routing,
        (2, "one chunk"),
        ("masked slot taken", "weight missing", "rows swapped", "stale result"),
    ),
    "routing in chunks": Check(values, values.test_any_routing, (1, "many chunks"), ("chunk lost",)),
    "routing in both pools": Check(values, values.test_any_routing, (1, "both pools"), ("second pool lost",)),
    "hidden": Check(values, values.test_every_extent, ("hidden", 2), ("token lost",)),
    "intermediate": Check(values, values.test_every_extent, ("intermediate", 1), ("row dropped",)),
    "384 experts": Check(values, values.test_many_experts_of_one_rank, (384,), ("row dropped",)),
    "rounding": Check(
        values,
        values.test_smoke_rounding_points,
        (2, 384),
        ("rows swapped", "weights rounded", "weighted too late"),
    ),
    "ranks": Check(values, values.test_ranks_do_not_change_the_result, (4,), ("ulp in a large batch",)),
    "dtypes": Check(inputs, inputs.test_smoke_dtypes_of_ids_and_weights, (4,), ("ulp in a repeat",)),
    "alignment": Check(inputs, inputs.test_alignment, (1,), ("alignment assumed",)),
    "weights": Check(inputs, inputs.test_weights_scale_their_slots, (4,), ("weight missing",)),
    "weights of 0": Check(
        inputs, inputs.test_slots_of_weight_zero_are_as_if_masked, (1,), ("weight missing",)
    ),
    "clamp": Check(inputs, inputs.test_clamp, (1, 0.25, 384), ("clamp ignored",)),
    "no clamp": Check(inputs, inputs.test_clamp, (4, float("inf"), 384), ("weight missing",)),
    "large values": Check(inputs, inputs.test_small_and_large_values, (1, 100.0), ("sigmoid overflows",)),
    "zeros": Check(inputs, inputs.test_small_and_large_values, (4, 0.0), ("unwritten",)),
    "tiny values": Check(inputs, inputs.test_small_and_large_values, (4, 1e-25), ("unwritten",)),
    "NaN": Check(
        inputs,
        inputs.test_smoke_a_token_that_is_no_number_stays_alone,
        (4, float("nan"), 384),
        ("NaN spreads",),
    ),
    "Inf": Check(
        inputs,
        inputs.test_smoke_a_token_that_is_no_number_stays_alone,
        (1, float("inf"), 384),
        ("NaN spreads",),
    ),
    "unused experts": Check(
        inputs, inputs.test_experts_without_tokens_may_hold_anything, (4,), ("next expert leaks",)
    ),
    "inputs": Check(inputs, inputs.test_inputs_are_left_alone, (4,), ("input overwritten",)),
    "one token": Check(inputs, inputs.test_every_slot_of_a_token_on_one_expert, (4,), ("row dropped",)),
    "other tokens": Check(
        batch, batch.test_smoke_other_tokens, (2, 384), ("ulp in a large batch", "pad row leaks")
    ),
    "other rank": Check(batch, batch.test_the_rank_it_comes_from, (2,), ("ulp in a large batch",)),
    "chunks": Check(
        batch, batch.test_chunks, (2, "random", 384), ("ulp in chunks", "chunk lost", "ulp in a repeat")
    ),
    "empty chunks": Check(batch, batch.test_a_chunk_for_each_block, (), ("chunk lost", "ulp in chunks")),
    "SMs": Check(batch, batch.test_number_of_sms, (2, (66, 31, 2), "random", 384), ("ulp with few SMs",)),
    "launches": Check(
        repeat,
        repeat.test_thousand_launches,
        (2, "many chunks", 384),
        ("ulp in a repeat", "stale result", "token lost", "ulp in a large batch"),
    ),
    "repeats": Check(repeat, repeat.test_repeats_of_models, (2, 40, 256, 128, 9), ("ulp in a repeat",)),
    "memory": Check(
        repeat,
        repeat.test_smoke_what_memory_held_before,
        (2, "one chunk", 384),
        ("pad row leaks", "unwritten"),
    ),
    "delays": Check(repeat, repeat.test_delays, (2, "many chunks", 384), ("ulp when delayed", "token lost")),
}


def test_cases_of_the_memory_checker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memcheck_forward, "new_ranks", _stand_in.StandIn)
    memcheck_forward.main(1, CPU)
    assert "all results right" in capsys.readouterr().out


def run(name: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check = CHECKS[name]

    def made(*arguments: Any, **options: Any) -> _stand_in.StandIn:
        ranks = _stand_in.StandIn(*arguments, **options)
        ranks.fault = fault
        return ranks

    monkeypatch.setattr(check.module, "new_ranks", made)
    for constant, value in SMALL[check.module].items():
        monkeypatch.setattr(check.module, constant, value)
    check.test(CPU, *check.arguments)


@pytest.mark.parametrize("name", CHECKS)
def test_stand_in_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, None, monkeypatch)


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, check in CHECKS.items() for fault in check.faults]
)
def test_planted_fault_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        run(name, fault, monkeypatch)
