"""Random layers of a stated scale: N(0, 1) activations, weights of standard deviation 1/sqrt(fan-in)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """All inputs of one layer, all experts included, and a gradient ``dy``."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.topk_idx, self.topk_weights, self.w_gate_up, self.w_down

    @property
    def sizes(self) -> dict[str, Any]:
        """Keyword arguments of a MoEBuffer that just holds this problem."""
        return {
            "num_experts": self.w_gate_up.shape[0],
            "max_tokens_per_rank": max(self.x.shape[0], 1),
            "top_k": self.topk_idx.shape[1],
            "hidden": self.x.shape[1],
            "intermediate": self.w_down.shape[2],
            "device": self.x.device,
        }

    def requires_grad(self, needs: tuple[bool, bool, bool, bool] = (True,) * 4) -> Problem:
        """A copy whose x, topk_weights, w_gate_up and w_down are leaves that need gradients as told."""
        names = ("x", "topk_weights", "w_gate_up", "w_down")
        fresh = {n: getattr(self, n).detach().clone().requires_grad_(need) for n, need in zip(names, needs)}
        return replace(self, **fresh)

    def grads(self) -> tuple[Tensor | None, ...]:
        return tuple(t.grad for t in (self.x, self.topk_weights, self.w_gate_up, self.w_down))

    def tokens(self, rows: slice) -> Problem:
        """The same experts with some of the tokens."""
        names = ("x", "topk_idx", "topk_weights", "dy")
        return replace(self, **{n: getattr(self, n)[rows] for n in names})


def random_problem(
    tokens: int = 64,
    hidden: int = 256,
    intermediate: int = 128,
    experts: int = 8,
    top_k: int = 2,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    masked: float = 0.0,
    counts: list[int] | None = None,
    seed: int = 0,
) -> Problem:
    """Distinct random experts per token, softmax weights that are normalized over the slots.

    ``masked``: share of slots set to -1. ``counts``: rows of each expert instead of random ids (then tokens = their sum
    and top_k = 1).
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float32)

    if counts is not None:
        tokens, top_k = sum(counts), 1
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        topk_idx = ids[torch.randperm(tokens, generator=rng)][:, None]
        experts = len(counts)
    else:
        topk_idx = normal(tokens, experts).topk(min(top_k, experts), dim=-1).indices
    topk_weights = normal(tokens, top_k).softmax(-1) if counts is None else normal(tokens, 1).abs() + 0.5
    topk_idx = torch.where(torch.rand(topk_idx.shape, generator=rng) < masked, -1, topk_idx)
    made = Problem(
        normal(tokens, hidden),
        topk_idx,
        topk_weights,
        normal(experts, 2 * intermediate, hidden) * hidden**-0.5,
        normal(experts, hidden, intermediate) * intermediate**-0.5,
        normal(tokens, hidden),
    )
    keep = {"topk_idx": made.topk_idx, "topk_weights": made.topk_weights}
    cast = {n: t if n in keep else t.to(dtype) for n, t in vars(made).items()}
    if dtype == torch.float64:
        cast["topk_weights"] = cast["topk_weights"].double()
    return Problem(**{n: t.to(device) for n, t in cast.items()})


def relative_l2(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in fp64; NaN anywhere gives NaN, which passes no comparison."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float64).tiny))
