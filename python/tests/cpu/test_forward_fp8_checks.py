"""What judges the forward in fp8 on a GPU: it takes the emulation and small errors, and refuses each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._backends.plain.quantize import quantize_rows

# What is tested here lies alongside the GPU tests that use it.
from ..gpu import _forward, _forward_fp8, memcheck_forward_fp8  # noqa: TID252
from ..gpu._emulated import emulated  # noqa: TID252
from ..gpu._virtual import random_ids  # noqa: TID252

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layer() -> _forward.Layer:
    ids = random_ids("masked", [200, 150], 3, 6, CPU)
    return _forward.random_layer(ids, _forward.random_experts(CPU, 6, 512, 256), weights="signed")


@pytest.fixture(scope="module")
def judge(layer: _forward.Layer) -> _forward_fp8.Judge:
    return _forward_fp8.Judge(layer)


@pytest.fixture
def results(layer: _forward.Layer) -> list[Tensor]:
    return [own.clone() for own in emulated(layer, "fp8")]


def test_the_emulation_passes(judge: _forward_fp8.Judge, results: list[Tensor]) -> None:
    judge.assert_right(results)
    judge.assert_right([own[:70] for own in results], [70, 70])


def test_an_error_of_half_the_tolerance_passes(judge: _forward_fp8.Judge, results: list[Tensor]) -> None:
    """1.5e-2 of one element in a hundred: bf16 holds no smaller one."""
    made = torch.Generator().manual_seed(1)

    def noisy(own: Tensor) -> Tensor:
        some = torch.rand(own.shape, generator=made) < 0.01
        return own + (1.5e-2 * torch.randn(own.shape, generator=made) * some * own).bfloat16()

    judge.assert_right([noisy(own) for own in results])


def other_expert(layer: _forward.Layer, results: list[Tensor]) -> None:
    """Of a third of the experts, weights that are one code off."""
    down = layer.down.clone()
    down[:2] *= 1 + 2.0**-6
    results[:] = emulated(replace(layer, down=down), "fp8")


def no_quantizing(layer: _forward.Layer, results: list[Tensor]) -> None:
    results[:] = emulated(layer, "bf16")


def coarse_x(layer: _forward.Layer, results: list[Tensor]) -> None:
    """Scales of x from the wrong block."""
    xs = []
    for x in layer.x:
        codes, scales = quantize_rows(x)
        wide = codes.float() * scales.roll(1, 1).repeat_interleave(128, 1)
        xs.append(wide.bfloat16())
    results[:] = emulated(replace(layer, x=xs), "fp8")


def one_token(layer: _forward.Layer, results: list[Tensor]) -> None:
    results[1][40] *= 1.1


def swapped_tokens(layer: _forward.Layer, results: list[Tensor]) -> None:
    results[0][[5, 6]] = results[0][[6, 5]]


def a_nan(layer: _forward.Layer, results: list[Tensor]) -> None:
    results[0][9, 3] = torch.nan


def a_lost_rank(layer: _forward.Layer, results: list[Tensor]) -> None:
    results[1].zero_()


@pytest.mark.parametrize(
    "fault", [other_expert, no_quantizing, coarse_x, one_token, swapped_tokens, a_nan, a_lost_rank]
)
def test_a_fault_is_refused(
    layer: _forward.Layer,
    judge: _forward_fp8.Judge,
    results: list[Tensor],
    fault: Callable[[_forward.Layer, list[Tensor]], None],
) -> None:
    fault(layer, results)
    with pytest.raises(AssertionError, match="rank"):
        judge.assert_right(results)


class Ranks:
    """In place of the kernel: the emulation, of which ``spoil`` changes what comes out."""

    def __init__(self, spoil: float) -> None:
        self._spoil = spoil

    def forward_copies(self, rank: int, layer: _forward.Layer) -> None:
        pass

    def poison(self, word: int) -> None:
        pass

    def check(self) -> None:
        pass

    def forward(self, layer: _forward.Layer, *, delay_seed: int = 0) -> list[Tensor]:
        return [own * self._spoil for own in emulated(layer, "fp8")]


@pytest.mark.parametrize("spoil", [1.0, 1.05])
def test_cases_of_the_memory_checker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: float
) -> None:
    def made(*_: Any, **options: Any) -> Ranks:
        assert options["precision"] == "fp8"
        return Ranks(spoil)

    monkeypatch.setattr(memcheck_forward_fp8, "new_ranks", made)
    if spoil == 1.0:
        memcheck_forward_fp8.main(2, CPU)
        assert "all results right" in capsys.readouterr().out
    else:
        with pytest.raises(AssertionError, match="rank"):
            memcheck_forward_fp8.main(2, CPU)
