"""Late and missing ranks, collectives alongside the layer and every precision, over processes with a GPU each."""

from __future__ import annotations

import pytest
import torch

from ._torchrun import check_ranks, most_ranks


@pytest.mark.multi_gpu
def test_ranks_of_one_host(cuda_devices: list[torch.device]) -> None:
    check_ranks("late_ranks.py", "all right", most_ranks(len(cuda_devices)))
