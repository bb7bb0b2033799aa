"""A converted model under FSDP2 over processes with a GPU each; one of them where there is one GPU."""

from __future__ import annotations

import pytest
import torch

from ._torchrun import check_ranks, most_ranks


def test_one_gpu(cuda_device: torch.device) -> None:
    """Experts that FSDP2 shards over one rank: gathered before each call and freed after it, both kernels between."""
    check_ranks("sharded_ranks.py", "all right", 1)


@pytest.mark.multi_gpu
def test_experts_spread_over_all_gpus(cuda_devices: list[torch.device]) -> None:
    check_ranks("sharded_ranks.py", "all right", most_ranks(len(cuda_devices)))
