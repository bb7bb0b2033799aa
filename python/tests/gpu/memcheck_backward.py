"""Small cases of the fused backward for a memory checker: every branch of it, few bytes, results compared.

    PYTHONPATH=python/tests compute-sanitizer --error-exitcode 1 python3 -m gpu.memcheck_backward [RANKS [PRECISION]]

RANKS (default 1) ranks share the GPU; PRECISION (default bf16) may be fp8_bwd, and
fp8_bwd_dw with the weights' gradients in fp8 too. A checker that runs kernels one after
another can only serve one rank: the launch of the first would wait for one that is held back, and end with a time-out
that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mega_moe._backends.fused.memory import Shape
from mega_moe._base.layer import Gradients

from ._backward import assert_right, exact_gradients, random_dy
from ._backward_fp8 import Judge
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer
from ._forward_ranks import shape_of, smallest_pool
from ._virtual import HUGE, NAN
from .memcheck_forward import CASES, fewer, layers_of, on_device

BF16, FP32 = torch.bfloat16, torch.float32
# What a call is asked for, by its number: all of it, parts of it, and either dtype of the weights' gradients.
ASKED: tuple[dict[str, Any], ...] = (
    {"dw_dtype": BF16},
    {"dw_dtype": FP32},
    {"needs": (True, False, False, False)},
    {"needs": (False, False, True, True), "dw_dtype": FP32},
    {"needs": (False, True, True, False)},
)


def on_cpu(gradients: Sequence[Gradients]) -> list[Gradients]:
    return [Gradients(*(None if part is None else part.cpu() for part in own)) for own in gradients]


def judge_of(layer: Layer, dy: Sequence[Tensor], shape: Shape) -> Callable[[Sequence[Gradients]], None]:
    """What raises AssertionError for gradients that are wrong, of buffers of that shape."""
    if shape.mode.backward == "fp8":
        return Judge(layer, dy, shape).assert_right
    want = exact_gradients(layer, dy)
    return lambda got: assert_right(layer, dy, got, want)


def compare(
    ranks: BackwardRanks,
    there: Layer,
    dy: Sequence[Tensor],
    judge: Callable[[Sequence[Gradients]], None],
    **options: Any,
) -> None:
    got = ranks.backward(there, [own.to(ranks.device, copy=True) for own in dy], **options)
    judge(on_cpu(got))
    ranks.check()


def add_twice(
    ranks: BackwardRanks,
    there: Layer,
    dy: Sequence[Tensor],
    judge: Callable[[Sequence[Gradients]], None],
    dtype: torch.dtype,
) -> None:
    """Into buffers of 0, and then of what that left."""
    into = [
        tuple(torch.zeros_like(weight, dtype=dtype) for weight in there.experts(rank))
        for rank in range(there.num_ranks)
    ]
    dy_there = [own.to(ranks.device, copy=True) for own in dy]
    for _ in range(2):
        ranks.backward(there, dy_there, into=into, dw_dtype=dtype)
    ranks.check()
    halves = [Gradients(None, None, *((own / 2).cpu() for own in pair)) for pair in into]
    judge(halves)


def main(num_ranks: int, device: torch.device, precision: str = "bf16") -> None:
    calls = 0
    for case in CASES:
        layers = layers_of(case, num_ranks, clamp=20.0)
        dys = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
        for pool in (0, smallest_pool(shape_of(layers[0]))):
            form = {} if precision == "bf16" else {"precision": precision}
            ranks = new_backward_ranks(device, layers[0], pool_rows=pool, num_sms=4, limit=120.0, **form)
            judges = [judge_of(layer, dy, ranks.shape) for layer, dy in zip(layers, dys)]
            for seed, (layer, dy, judge) in enumerate(zip(layers, dys, judges)):
                there = on_device(layer, device)
                compare(ranks, there, dy, judge, **ASKED[seed % len(ASKED)])
                ranks.poison(HUGE if seed % 2 else NAN)
                compare(ranks, there, dy, judge, delay_seed=seed + 1, **ASKED[(seed + 1) % len(ASKED)])
                few = fewer(layer)
                few_dy = [own[:count] for own, count in zip(dy, few)]
                part = layer.first(few)
                compare(ranks, there.first(few), few_dy, judge_of(part, few_dy, ranks.shape))
                calls += 3
            add_twice(ranks, on_device(layers[0], device), dys[0], judges[0], FP32 if pool else BF16)
            there.ids[0][0, 0] = case.experts
            got = ranks.backward(there, [own.to(device, copy=True) for own in dys[-1]])[0]
            assert all(part is not None and bool(part.isnan().all()) for part in got)
            try:
                ranks.check()
            except ValueError:
                calls += 3
            else:
                raise AssertionError("a bad id was not reported")
            ranks.check()
    print(f"memcheck_backward: {calls} calls in {precision} with {num_ranks} rank(s), all results right")


if __name__ == "__main__":
    given = sys.argv[1:] + ["1", "bf16"][len(sys.argv) - 1 :]
    main(int(given[0]), torch.device("cuda", torch.cuda.current_device()), given[1])
