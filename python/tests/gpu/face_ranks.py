"""One rank of `torchrun`: DeepGEMM's calls in fp8 on a GPU of its own, alongside the layer that quantizes by itself.

python3 -m torch.distributed.run --nproc-per-node N python/tests/gpu/face_ranks.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from _face_fp8 import both, forward
from fused_ranks import EXPERTS, HIDDEN, INTERMEDIATE, MOST, TOP_K, everyone, of_rank, told

import mega_moe
from mega_moe import deep_gemm as face
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, relative_l2

STEPS = 6
# Against fp64, of results of so many rows: the format itself is 5 to 7 % from it.
TOLERANCE, MANY = 1e-1, 64


def of_layer(own: Problem, buffer: mega_moe.MoEBuffer) -> Gradients:
    leaves = own.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    y.backward(leaves.dy)
    return Gradients(y.detach(), *(grad for grad in leaves.grads() if grad is not None))


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    extents = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K}
    layer = mega_moe.MoEBuffer(
        dist.group.WORLD, **extents, max_tokens_per_rank=MOST, precision="fp8", backend="fused"
    )
    buffer = face.get_symm_buffer_for_mega_moe(
        dist.group.WORLD, EXPERTS, MOST, TOP_K, HIDDEN, INTERMEDIATE, mma_type="fp8xfp8"
    )
    assert buffer.moe.backend == "fused", buffer.moe.explanation
    experts = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    for step in range(STEPS):
        whole, rows = everyone(step, size, device)
        own = of_rank(whole, rows[rank], experts)
        exact = fp64_moe_grads(whole.dy, *whole.inputs)
        mine = Gradients(*(part[rows[rank]] for part in exact[:3]), *(part[experts] for part in exact[3:]))
        for name, got, want, near in zip(
            exact._fields, both(buffer, own), of_layer(own, layer), mine, strict=True
        ):
            assert torch.equal(got, want), (step, name)
            few = name in ("y", "dx", "dtopk") and len(near) < MANY
            assert few or relative_l2(got, near) <= TOLERANCE, (step, name)

    # Bad arguments of the last rank alone: it raises, the others' result is NaN and they learn why.
    last = rank == size - 1
    y = None
    if last:
        error = told(lambda: forward(buffer, own, num_tokens_bound=-1))
    else:
        y = forward(buffer, own)
        error = told(buffer.moe.check)
    assert y is None or bool(y.isnan().all())
    assert type(error) is (ValueError if last else mega_moe.PeerError), error
    stats = torch.zeros(EXPERTS // size, dtype=torch.int32, device=device)
    again = forward(buffer, own, **({"cumulative_local_expert_recv_stats": stats} if rank == 0 else {}))
    assert torch.equal(again, of_layer(own, layer).y)
    if rank == 0:
        held = whole.topk_idx[whole.topk_idx >= 0]
        assert stats.tolist() == torch.bincount(held, minlength=EXPERTS)[experts].tolist()
    for made in (buffer.moe, layer):
        made.check()
    buffer.destroy()
    layer.destroy()
    dist.destroy_process_group()
    print(f"face_ranks: rank {rank} of {size}: {STEPS} steps right")


if __name__ == "__main__":
    main()
