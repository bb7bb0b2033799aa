"""Fine-tune a mixture-of-experts model with HF Trainer: one import and one argument give it mega-moe's layer.

    python examples/hf_trainer.py [--model NAME_OR_FOLDER] [--text FILE] [--steps N]

Without --model a tiny random Qwen3MoE learns the bytes of this file.
Needs: pip install mega-moe transformers accelerate
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Trainer, TrainingArguments

import mega_moe.integrations.transformers  # noqa: F401  registers experts_implementation="mega_moe"

SEQUENCE = 64


class Windows(Dataset):
    """Windows of a text, each its own label."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = torch.tensor(ids)

    def __len__(self) -> int:
        return len(self.ids) // SEQUENCE

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self.ids[i * SEQUENCE : (i + 1) * SEQUENCE]
        return {"input_ids": window, "labels": window}


parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
dtype = torch.bfloat16 if on_gpu else torch.float32
if options.model:
    ids = AutoTokenizer.from_pretrained(options.model)(options.text.read_text())["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=dtype, experts_implementation="mega_moe"
    )
else:
    ids = list(options.text.read_bytes())
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=256, experts_implementation="mega_moe")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)

arguments = TrainingArguments(
    output_dir="demo-run/hf_trainer",
    max_steps=options.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    bf16=on_gpu,
    use_cpu=not on_gpu,
)
result = Trainer(model=model, args=arguments, train_dataset=Windows(ids)).train()
print(f"mean loss over {options.steps} steps: {result.training_loss:.3f}")
