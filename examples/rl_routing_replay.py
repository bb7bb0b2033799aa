"""One REINFORCE step that trains the very experts that the generator chose: routing replay.

    python examples/rl_routing_replay.py

A generator and a trainer round differently, so near ties send some tokens to other experts. The generator's expert ids
are recorded during the rollout and replayed in training; the weights are the trainer's own, so its router learns.
Needs: pip install mega-moe transformers
"""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mega_moe.integrations import DispatchConfig, LoadMeter, RoutingReplay, convert

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
torch.manual_seed(0)
sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=256)).to(device, dtype)
prompts = torch.randint(256, (8, 16), device=device)
convert(model, DispatchConfig(), sequence_length=prompts.shape[0] * 48, dtype=dtype)
replay, meter = RoutingReplay(model), LoadMeter(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(3):
    # Rollout. An engine such as vLLM or SGLang would return ids of this kind with the text.
    with torch.no_grad():
        text = model.generate(prompts, max_new_tokens=32, do_sample=True, pad_token_id=0)
        with replay.record() as layers:
            model(text, use_cache=False)
    ids = [calls[-1] for calls in layers]
    reward = (text[:, prompts.shape[1] :] < 128).float().mean(-1)  # a toy: low bytes are good

    # Training, through the recorded experts.
    with replay.replay(ids):
        logits = model(text, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
        chosen = text[:, prompts.shape[1] :, None]
        log_prob = logits.log_softmax(-1).gather(-1, chosen)[..., 0].sum(-1)
        loss = -((reward - reward.mean()) * log_prob).mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    uneven = meter.max_over_mean().mean().item()
    print(f"step {step}: reward {reward.mean().item():.3f}, busiest expert over the mean {uneven:.2f}")
    meter.reset()
