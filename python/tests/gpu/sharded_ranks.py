"""One rank of `torchrun`: a model under FSDP2 whose experts are spread over all ranks, against one that spreads none.

python3 -m torch.distributed.run --nproc-per-node N python/tests/gpu/sharded_ranks.py [cpu]
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from mega_moe.bench.step.model import Adapter, Transformer, initialize
from mega_moe.bench.step.shapes import Model
from mega_moe.integrations import DispatchConfig, clip_grad_norm_, convert, make_meshes, shard
from mega_moe.testing import count_op_calls

SHAPE = Model("small", 512, 2, 8, 2, 64, 16, 4, 256, 512, 256)
STEPS = 6
MICRO_BATCHES = 2  # of a step; the ranks reduce gradients after the last one


def build(ep_size: int, backend: str, device: torch.device) -> nn.Module:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device(device):
        model = Transformer(SHAPE)
    initialize(model, 0)  # before it is sharded: whole, and the same on all ranks
    meshes = make_meshes(device.type, ep_size)
    config = DispatchConfig(backend=backend, max_tokens_per_rank=SHAPE.sequence)
    convert(model, config, mesh=meshes.expert, adapters=[Adapter()], dtype=dtype)
    shard(model, meshes, model.blocks, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    return model


def train(model: nn.Module, device: torch.device) -> tuple[list[float], list[float]]:
    """Losses, mean over ranks and micro-batches, and gradient norms of a few steps."""
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            rng = torch.Generator().manual_seed(100 * (step % 2) + 10 * dist.get_rank() + micro)
            tokens = torch.randint(512, (1, SHAPE.sequence + 1), generator=rng).to(device)
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            loss = model(tokens) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, norms


def main() -> None:
    on_gpu = "cpu" not in sys.argv[1:]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    size = dist.get_world_size()
    spread, alone = build(size, "fused" if on_gpu else "grouped", device), build(1, "grouped", device)
    with count_op_calls() as calls:
        losses, norms = train(spread, device)
    num_calls = 2 * STEPS * MICRO_BATCHES  # of two layers
    assert dict(calls) == {"run": num_calls, "backward": num_calls}, dict(calls)
    want, want_norms = train(alone, device)
    assert want[-1] < want[0], want
    for name, got, expected in (("loss", losses, want), ("norm", norms, want_norms)):
        worst = max(abs(a - b) / b for a, b in zip(got, expected))
        # Roundings of two ways to spread the same experts; Adam divides small gradients by their own size.
        assert worst < (5e-2 if on_gpu else 1e-2), (name, got, expected)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    save(get_model_state_dict(spread), checkpoint_id=folder[0])
    state = get_model_state_dict(alone)
    load(state, checkpoint_id=folder[0])
    set_model_state_dict(alone, state)
    for (name, a), b in zip(spread.named_parameters(), alone.parameters()):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name  # type: ignore[attr-defined]
    print(f"rank {dist.get_rank()}: losses {losses[0]:.3f} to {losses[-1]:.3f}, all right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
