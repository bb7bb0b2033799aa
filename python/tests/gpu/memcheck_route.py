"""Small cases of the routing kernel for a memory checker: every branch of it, few bytes, results compared.

    PYTHONPATH=python/tests compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m gpu.memcheck_route [RANKS]

RANKS (default 1) ranks share the GPU. A checker that runs kernels one after another can only serve one rank: the
launch of the first would wait for one that is held back, and end with a time-out that says so.
"""

from __future__ import annotations

import sys

import torch

from mega_moe._backends.fused.memory import Shape

from ._virtual import VirtualRanks, assert_tables, random_ids


def main(num_ranks: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launches = 0
    for tokens, top_k, experts in ((300, 8, 32), (129, 3, 8), (64, 16, 64), (20, 2, 16)):
        rows = min(tokens, 128) * num_ranks * top_k + 127 * (experts // num_ranks)
        for pool in (0, (rows + 127) // 128 * 128):
            shape = Shape(tokens, top_k, experts, 128, num_ranks, pool, canaries=True)
            ranks = VirtualRanks(device, shape, num_sms=4, arrival=60.0, progress=60.0)
            for seed, kind in enumerate(("random", "one expert", "masked", "duplicates", "empty")):
                counts = [tokens if rank % 2 == 0 else tokens // 3 for rank in range(num_ranks)]
                ids = random_ids(kind, counts, top_k, experts, device, seed)
                weights = [torch.rand(own.shape, device=device) for own in ids]
                assert_tables(ranks, ids, ranks.launch(ids, weights), weights)
                launches += num_ranks
            bad = [own.clone() for own in ids]
            bad[0][0, 0] = experts
            ranks.launch(bad)
            try:
                ranks.kernels[0].check()
            except ValueError:
                launches += num_ranks
            else:
                raise AssertionError("a bad id was not reported")
            ranks.check()
    print(f"memcheck_route: {launches} launches with {num_ranks} rank(s), all tables right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
