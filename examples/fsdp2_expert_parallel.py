"""FSDP2 and expert parallelism in a plain training loop, for any number of ranks of one or more machines.

    torchrun --standalone --nproc-per-node 8 examples/fsdp2_expert_parallel.py
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/fsdp2_expert_parallel.py

Needs: pip install mega-moe transformers
"""

from __future__ import annotations

import os

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mega_moe.integrations import DispatchConfig, clip_grad_norm_, convert, make_meshes, shard

on_gpu = torch.cuda.is_available()
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
torch.manual_seed(0)  # every rank builds the whole model and keeps its part
sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=512)).to(device)

meshes = make_meshes(device.type, ep_size=int(os.environ["LOCAL_WORLD_SIZE"]))  # one NVLink domain
dtype = torch.bfloat16 if on_gpu else torch.float32
convert(model, DispatchConfig(), sequence_length=64, mesh=meshes.expert, dtype=dtype)
policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
shard(model, meshes, model.model.layers, mp_policy=policy)
model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

torch.manual_seed(1 + rank)  # every rank feeds its own batch
for step in range(3):
    tokens = torch.randint(512, (1, 64), device=device)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    norm = clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
torch.distributed.destroy_process_group()
