"""One rank of `torchrun`: routes on a GPU of its own through symmetric memory and compares with stable sorts.

python3 -m torch.distributed.run --nproc-per-node N python/tests/gpu/route_ranks.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import mega_moe
from mega_moe.testing.tables import plain_tables

EXPERTS, TOP_K, MOST = 64, 6, 3000
STEPS = 200


def ids_of(step: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + rank)
    tokens = int(torch.randint(0, MOST + 1, (), generator=made))
    return torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=made)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    buffer = mega_moe.MoEBuffer(
        dist.group.WORLD,
        num_experts=EXPERTS,
        max_tokens_per_rank=MOST,
        top_k=TOP_K,
        hidden=256,
        intermediate=128,
        backend="grouped",
        arrival_timeout=60.0,
    )
    assert buffer.router == "kernel", buffer.router_reason
    results = [mega_moe.route(ids_of(step, rank).to(device), buffer=buffer) for step in range(STEPS)]
    buffer.check()
    for step, routing in enumerate(results):
        everyone = [ids_of(step, other) for other in range(size)]
        want = plain_tables(everyone, rank, EXPERTS, size * MOST * TOP_K)
        assert torch.equal(routing.tokens_per_expert.cpu(), want.counts[: EXPERTS // size]), step
        assert torch.equal(routing.tokens_per_rank.cpu(), want.tokens), step
    # Too many tokens on the last rank: the others learn of it, and the call after it works.
    many = torch.zeros(MOST + 1, TOP_K, dtype=torch.int64, device=device)
    told: Exception | None = None
    try:
        mega_moe.route(many if rank == size - 1 else many[:10], buffer=buffer)
        buffer.check()
    except (ValueError, mega_moe.PeerError) as error:
        told = error
    assert type(told) is (ValueError if rank == size - 1 else mega_moe.PeerError), told
    assert "3001 tokens" in str(told), told
    assert int(mega_moe.route(many[:10], buffer=buffer).num_rows) == (10 * size * TOP_K if rank == 0 else 0)
    buffer.destroy()
    dist.destroy_process_group()
    print(f"route_ranks: rank {rank} of {size}: {STEPS} launches right")


if __name__ == "__main__":
    main()
