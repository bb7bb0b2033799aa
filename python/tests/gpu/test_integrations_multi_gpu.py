"""A converted model under FSDP2 over processes with a GPU each."""

from __future__ import annotations

import pytest
import torch

from ._torchrun import check_ranks, most_ranks


@pytest.mark.multi_gpu
def test_experts_spread_over_all_gpus(cuda_devices: list[torch.device]) -> None:
    check_ranks("sharded_ranks.py", "all right", most_ranks(len(cuda_devices)))
