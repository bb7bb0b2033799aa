"""Independent random streams: the same on every device and rank, and nothing to save in a checkpoint."""

from __future__ import annotations

import zlib

import torch


def random_stream(seed: int, name: str) -> torch.Generator:
    """A fresh CPU generator for what `name` calls, in the run of this seed."""
    # The generator's Mersenne twister takes 32 bits of its seed and drops the rest, so both are mixed into those.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
