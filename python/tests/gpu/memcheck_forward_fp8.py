"""Small cases of the fused forward in fp8 for a memory checker, the smallest first; each is named before it runs.

    PYTHONPATH=python/tests compute-sanitizer --tool memcheck python3 -m gpu.memcheck_forward_fp8 [RANKS]

RANKS as in memcheck_forward.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from ._forward import Layer, random_experts, random_layer
from ._forward_fp8 import Judge
from ._forward_ranks import ForwardRanks, new_ranks, shape_of, smallest_pool
from ._virtual import HUGE, NAN, random_ids
from .memcheck_forward import KINDS, Case, on_device

SMS = 4
# The first has one tile of each product; with 4 SMs the rows of the first three are copied before the roles part.
CASES = (
    Case(1, 1, 2, 512, 128),
    Case(40, 2, 4, 512, 256),
    Case(5, 16, 16, 512, 128),
    Case(65, 2, 4, 512, 256),
    Case(150, 4, 8, 512, 384),
    Case(129, 3, 4, 2560, 128),
)


def compare(ranks: ForwardRanks, there: Layer, judge: Judge, tokens: list[int], delay_seed: int = 0) -> None:
    got = [own.cpu() for own in ranks.forward(there.first(tokens), delay_seed=delay_seed)]
    judge.assert_right(got, tokens)
    ranks.check()


def main(num_ranks: int, device: torch.device) -> None:
    cpu = torch.device("cpu")
    calls = 0
    for case in CASES:
        experts = random_experts(cpu, case.experts, case.hidden, case.intermediate)
        tokens = [case.tokens if rank % 2 == 0 else case.tokens // 3 for rank in range(num_ranks)]
        layers = [
            random_layer(random_ids(kind, tokens, case.top_k, case.experts, cpu, seed), experts, seed=seed)
            for seed, kind in enumerate(KINDS)
        ]
        layers[1] = replace(layers[1], clamp=0.5)
        judges = [Judge(layer) for layer in layers]
        for pool in (0, smallest_pool(shape_of(layers[0]))):
            ranks = new_ranks(device, layers[0], pool_rows=pool, num_sms=SMS, limit=120.0, precision="fp8")
            for seed, (layer, judge) in enumerate(zip(layers, judges)):
                print(f"{case}, {KINDS[seed]}, pool of {pool} rows", flush=True)
                there = on_device(layer, device)
                ranks.forward_copies(0, there)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                print("  weights are quantized", flush=True)
                few = [count // 2 if rank else 0 for rank, count in enumerate(tokens)]
                compare(ranks, there, judge, few)
                print("  a rank without tokens is right", flush=True)
                compare(ranks, there, judge, tokens)
                ranks.poison(HUGE if seed % 2 else NAN)
                compare(ranks, there, judge, tokens, delay_seed=seed + 1)
                calls += 3
    print(f"memcheck_forward_fp8: {calls} calls with {num_ranks} rank(s), all results right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, torch.device("cuda", torch.cuda.current_device()))
