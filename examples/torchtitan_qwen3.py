"""TorchTitan's trainer with mega-moe's layer: a configuration for its --module and --config.

    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_qwen3 --config qwen3_30b_a3b

or, with any configuration of TorchTitan and nothing of this file::

    torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config qwen3_moe_debug \
        --override.imports mega_moe.integrations.torchtitan_trainer.routed_experts

Needs: pip install mega-moe torchtitan==0.3.0
"""

from __future__ import annotations

import dataclasses

from torchtitan.config.override import OverrideConfig
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

OVERRIDE = "mega_moe.integrations.torchtitan_trainer.routed_experts"


def qwen3_debug() -> Trainer.Config:
    """TorchTitan's debug model of eight layers, experts spread over two GPUs."""
    config = qwen3_moe_debug()
    config.parallelism.expert_parallel_degree = 2
    training = config.training
    training.disable_cuda_graphs = (
        True  # TorchTitan asks for this with its own all-to-all, whose configuration stays
    )
    tokens = training.local_batch_size * training.seq_len
    # Room for one call, so that torch.compile meets a layer that is ready.
    config.override = OverrideConfig(imports=[(OVERRIDE, {"max_tokens_per_rank": tokens})])
    return config


def qwen3_30b_a3b() -> Trainer.Config:
    """Qwen3-30B-A3B over one machine of eight GPUs: experts in fp8, everything else as TorchTitan has it."""
    config = qwen3_debug()
    config.model_spec = model_registry("30B-A3B")
    config.parallelism.expert_parallel_degree = 8
    config.training = dataclasses.replace(config.training, local_batch_size=4, seq_len=4096)
    ((target, settings),) = config.override.imports
    config.override = OverrideConfig(
        imports=[(target, {**settings, "max_tokens_per_rank": 4 * 4096, "precision": "fp8"})]
    )
    return config
