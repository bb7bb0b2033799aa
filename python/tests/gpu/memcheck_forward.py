"""Small cases of the fused forward for a memory checker: every branch of it, few bytes, results compared.

    PYTHONPATH=python/tests compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m gpu.memcheck_forward [RANKS]

RANKS (default 1) ranks share the GPU. A checker that runs kernels one after another can only serve one rank: the
launch of the first would wait for one that is held back, and end with a time-out that says so.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from ._forward import Exact, Layer, assert_right, exact, random_experts, random_layer
from ._forward_ranks import ForwardRanks, new_ranks, shape_of, smallest_pool
from ._virtual import HUGE, NAN, random_ids


class Case(NamedTuple):
    """Extents with odd and even numbers of columns in both products, and one of everything."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int


CASES = (
    Case(150, 4, 8, 512, 384),
    Case(129, 3, 4, 768, 128),
    Case(40, 16, 16, 256, 256),
    Case(1, 1, 2, 256, 128),
)
KINDS = ("random", "one expert", "masked", "duplicates", "empty")


def layers_of(case: Case, num_ranks: int, clamp: float) -> list[Layer]:
    """One of each kind of routing on the CPU; the second with a clamp."""
    cpu = torch.device("cpu")
    experts = random_experts(cpu, case.experts, case.hidden, case.intermediate)
    tokens = [case.tokens if rank % 2 == 0 else case.tokens // 3 for rank in range(num_ranks)]
    layers = [
        random_layer(random_ids(kind, tokens, case.top_k, case.experts, cpu, seed), experts, seed=seed)
        for seed, kind in enumerate(KINDS)
    ]
    layers[1] = replace(layers[1], clamp=clamp)
    return layers


def fewer(layer: Layer) -> list[int]:
    """Tokens of a smaller call: none of the first rank, half of the others'."""
    return [len(own) // 2 if rank else 0 for rank, own in enumerate(layer.x)]


def on_device(layer: Layer, device: torch.device) -> Layer:
    """Made and computed on the CPU, so that the checker watches the kernel and little else."""
    x, ids, weights = (
        [own.to(device, copy=True) for own in part] for part in (layer.x, layer.ids, layer.weights)
    )
    return Layer(x, ids, weights, layer.gate_up.to(device), layer.down.to(device), layer.clamp)


def compare(ranks: ForwardRanks, there: Layer, layer: Layer, want: Exact, delay_seed: int = 0) -> None:
    assert_right(layer, [own.cpu() for own in ranks.forward(there, delay_seed=delay_seed)], want)
    ranks.check()


def main(num_ranks: int, device: torch.device) -> None:
    calls = 0
    for case in CASES:
        layers = layers_of(case, num_ranks, clamp=0.5)
        wanted = [exact(layer) for layer in layers]
        for pool in (0, smallest_pool(shape_of(layers[0]))):
            ranks = new_ranks(device, layers[0], pool_rows=pool, num_sms=4, limit=120.0)
            for seed, (layer, want) in enumerate(zip(layers, wanted)):
                there = on_device(layer, device)
                compare(ranks, there, layer, want)
                ranks.poison(HUGE if seed % 2 else NAN)
                compare(ranks, there, layer, want, delay_seed=seed + 1)
                few = fewer(layer)
                compare(ranks, there.first(few), layer.first(few), want.first(few))
                calls += 3
            there.ids[0][0, 0] = case.experts
            assert ranks.forward(there)[0].isnan().all()
            try:
                ranks.check()
            except ValueError:
                calls += 1
            else:
                raise AssertionError("a bad id was not reported")
            ranks.check()
    print(f"memcheck_forward: {calls} calls with {num_ranks} rank(s), all results right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, torch.device("cuda", torch.cuda.current_device()))
