"""What the tests of the integrations share: trainers that may not be installed, and a small model of no trainer's."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_moe.integrations import DispatchConfig, PackedExperts

GROUPED = DispatchConfig(backend="grouped")


def need(name: str) -> ModuleType:
    """A module of a trainer; without it the test file is skipped, or fails where the session promised it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if os.environ.get("MEGA_MOE_REQUIRE_TRAINERS") == "1":
            raise AssertionError(f"MEGA_MOE_REQUIRE_TRAINERS=1: {error}") from error
        pytest.skip(f"needs {name}: {error}", allow_module_level=True)


class Experts(nn.Module):
    """A loop over experts whose weights lie as the layer takes them."""

    def __init__(self, experts: int, top_k: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj)):
            gate, up = (x @ gate_up.T).chunk(2, dim=-1)
            share = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
            y = y + share * ((F.silu(gate) * up) @ down.T)
        return y


class Router(nn.Linear):
    def __init__(self, experts: int, top_k: int, hidden: int) -> None:
        super().__init__(hidden, experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).softmax(-1).topk(self.top_k)


class Block(nn.Module):
    def __init__(self, experts: int, top_k: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate = Router(experts, top_k, hidden)
        self.experts = Experts(experts, top_k, hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = self.gate(h)
        return x + self.experts(h, ids, weights)


class Model(nn.Module):
    """Blocks of router and experts between two linear layers; the same for the same seed."""

    def __init__(
        self,
        layers: int = 2,
        experts: int = 8,
        top_k: int = 2,
        hidden: int = 32,
        inner: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(hidden, hidden)
        self.blocks = nn.ModuleList(Block(experts, top_k, hidden, inner) for _ in range(layers))
        self.last = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


class OwnAdapter(PackedExperts):
    """As a user writes one: which modules, and what the router alongside them returns."""

    family = "the test's own"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, Experts)

    def ids(self, output: Any) -> Tensor:
        return output[1]  # type: ignore[no-any-return]
