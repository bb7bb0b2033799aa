"""The fused backend over processes with a GPU each."""

from __future__ import annotations

import pytest
import torch

from ._torchrun import check_ranks, most_ranks


@pytest.mark.multi_gpu
@pytest.mark.parametrize("script", ["fused_ranks.py", "face_ranks.py"])
def test_ranks_of_one_host(script: str, cuda_devices: list[torch.device]) -> None:
    check_ranks(script, "steps right", most_ranks(len(cuda_devices)))
