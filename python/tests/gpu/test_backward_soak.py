"""Random small calls in both directions on one buffer, for as long as there is time.

`MEGA_MOE_SOAK_S` is the time of all cases together in seconds: 60 unless it says otherwise, at most 240. A call is a
function of the number in the message of a failure, whatever came before it.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import pytest
import torch

from ._backward import assert_same_bits, random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import pool_of, shape_of
from ._precision import FP8, FP8_DW, assert_gradients_right, assert_y_right
from ._virtual import HUGE, NAN
from .test_forward_values import KINDS, ids_of

DEFAULT_S, MOST_S = 60.0, 240.0
CASES = [
    ("bf16", 1, "one chunk"),
    ("bf16", 1, "many chunks"),
    ("bf16", 2, "one chunk"),
    ("bf16", 2, "many chunks"),
    ("bf16", 4, "many chunks"),
    ("bf16", 8, "one chunk"),
    ("fp8", 1, "many chunks"),
    ("fp8", 2, "one chunk"),
    ("fp8", 4, "many chunks"),
    ("fp8", 8, "one chunk"),
    ("fp8_dw", 1, "many chunks"),
    ("fp8_dw", 2, "one chunk"),
    ("fp8_dw", 4, "many chunks"),
]
MARKS = {"fp8": FP8.marks, "fp8_dw": FP8_DW.marks}
MOST, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 400, 16, 4, 512, 384

pytestmark = pytest.mark.timeout(MOST_S / len(CASES) + 60, method="thread")


def seconds() -> float:
    """Of one case."""
    return min(float(os.environ.get("MEGA_MOE_SOAK_S", DEFAULT_S)), MOST_S) / len(CASES)


class Step(NamedTuple):
    """One call of each direction."""

    layer: Layer
    dy: list[torch.Tensor]
    needs: tuple[bool, bool, bool, bool]
    dw_dtype: torch.dtype
    delay_seed: int
    num_sms: int
    word: int | None  # what memory holds before


def draw(
    number: int, num_ranks: int, device: torch.device, experts: tuple[torch.Tensor, torch.Tensor]
) -> Step:
    made = torch.Generator().manual_seed(number)

    def below(high: int) -> int:
        return int(torch.randint(0, high, (), generator=made))

    # Often few tokens, sometimes none: the borders of blocks and tiles are there.
    most = (1, 65, 130, MOST)[below(4)]
    tokens = [below(most + 1) for _ in range(num_ranks)]
    ids = ids_of(KINDS[below(len(KINDS))], tokens, TOP_K, EXPERTS, device)
    layer = random_layer(
        ids, experts, weights=("positive", "signed")[below(2)], seed=number, clamp=(None, 20.0)[below(2)]
    )
    needs = (True, True, True, True) if below(2) else tuple(bool(below(2)) for _ in range(4))
    return Step(
        layer,
        random_dy(layer, number),
        (needs[0], needs[1], needs[2], needs[3]),
        (torch.bfloat16, torch.float32)[below(2)],
        below(3) * (1 + below(1000)),
        2 * (1 + below(8)),
        (None, None, NAN, HUGE)[below(4)],
    )


def check(ranks: BackwardRanks, step: Step, what: str, precision: str = "bf16") -> None:
    """Both directions against what judges them; then, in another order, with delays and few SMs, in the same bits."""
    layer, dy, options = step.layer, step.dy, {"needs": step.needs, "dw_dtype": step.dw_dtype}
    everything = ranks.kernels[0].num_sms
    y = ranks.forward(layer)
    gradients = ranks.backward(layer, dy, **options)
    try:
        assert_y_right(layer, y, precision)
        assert_gradients_right(layer, dy, gradients, ranks.shape)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    if step.word is not None:
        ranks.poison(step.word)
    ranks.use_sms(step.num_sms)
    again = ranks.backward(layer, dy, delay_seed=step.delay_seed, **options)
    assert_same_bits(again, gradients, what)
    assert_same_y(ranks.forward(layer, delay_seed=step.delay_seed), y, what)
    ranks.use_sms(everything)


@pytest.mark.parametrize(
    ("precision", "num_ranks", "chunks"),
    [pytest.param(*case, marks=MARKS.get(case[0], ())) for case in CASES],
)
def test_soak(cuda_device: torch.device, precision: str, num_ranks: int, chunks: str) -> None:
    experts = random_experts(cuda_device, EXPERTS, HIDDEN, INTERMEDIATE)
    largest = random_layer(ids_of("random", [MOST] * num_ranks, TOP_K, EXPERTS, cuda_device), experts)
    pool = pool_of(chunks, shape_of(largest))
    ranks = new_backward_ranks(cuda_device, largest, pool_rows=pool, precision=precision)
    end, number = time.monotonic() + seconds(), 0
    while number == 0 or time.monotonic() < end:
        check(
            ranks,
            draw(number, num_ranks, cuda_device, experts),
            f"{precision}, {num_ranks} ranks, {chunks}, call {number}",
            precision,
        )
        ranks.check()
        number += 1
    print(f"soak: {number} calls of each direction in {precision} with {num_ranks} ranks, {chunks}")
