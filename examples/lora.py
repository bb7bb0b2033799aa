"""LoRA on the experts themselves, with PEFT's target_parameters on a converted model: train, save, load, merge.

    python examples/lora.py [--steps N]

Needs: pip install mega-moe transformers peft
"""

from __future__ import annotations

import argparse
import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mega_moe.integrations import DispatchConfig, convert

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
torch.manual_seed(0)
sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=256)).to(device, dtype)
plain = copy.deepcopy(base)  # what a checkpoint on disk would be
tokens = torch.randint(256, (4, 64), device=device)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """Next-token loss of one fixed batch."""
    return model(tokens, labels=tokens, use_cache=False).loss


convert(base, DispatchConfig(), sequence_length=tokens.numel(), dtype=dtype)
# The adapters are added to the expert parameters when the layer reads them, so the kernels see base + B A.
adapters = LoraConfig(r=8, lora_alpha=16, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
model = get_peft_model(base, adapters)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
for step in range(options.steps):
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

model.save_pretrained("demo-run/lora")
with torch.no_grad():
    trained = loss_of(model).item()
    # The adapters belong to the unconverted model as well: load them there, and merge them into its weights.
    merged = PeftModel.from_pretrained(plain, "demo-run/lora").merge_and_unload()
    print(
        f"loss trained {trained:.4f}, loaded into an unconverted model and merged {loss_of(merged).item():.4f}"
    )
