"""Random inputs of one layer, in several sets, and the memory that its outputs will recycle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mega_moe.bench.ceilings import INPUT_SETS
from mega_moe.bench.ranks import Context
from mega_moe.bench.shapes import Shape


@dataclass(frozen=True)
class InputSet:
    """x and dy [T, H], topk_idx [T, K] int64, topk_weights [T, K] fp32 with sum 1 per token."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    dy: Tensor

    def head(self, tokens: int) -> InputSet:
        """The first tokens as leaves of their own."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach()[:tokens].clone()

        return InputSet(
            leaf(self.x).requires_grad_(),
            leaf(self.topk_idx),
            leaf(self.topk_weights).requires_grad_(),
            leaf(self.dy),
        )


@dataclass(frozen=True)
class Problem:
    """This rank's inputs and weights: w_gate_up [E_local, 2I, H], w_down [E_local, H, I]; all need gradients."""

    shape: Shape
    tokens: int
    dtype: torch.dtype
    sets: tuple[InputSet, ...]
    w_gate_up: Tensor
    w_down: Tensor
    skew: float | None = None
    """Rows that come to rank 0 over those of an even routing; None: even."""

    def poison(self) -> None:
        """Fills and frees as many bytes as one call's outputs and rows take, so that what it does not write is NaN."""
        rows = self.tokens * self.shape.top_k * (2 * self.shape.intermediate + self.shape.hidden)
        elements = rows + 2 * self.tokens * self.shape.hidden + self.w_gate_up.numel() + self.w_down.numel()
        torch.full((elements,), float("nan"), dtype=self.dtype, device=self.w_down.device)


def random_problem(
    shape: Shape,
    tokens: int,
    dtype: torch.dtype,
    context: Context,
    *,
    skew: float | None = None,
    hot: float | None = None,
) -> Problem:
    """N(0, 1) activations, weights of deviation 1/sqrt(fan-in), top-k of a random softmax, normalised per token.

    Experts are spread evenly, and so are tokens, unless `skew` sends that many times an even share of all rows to
    rank 0, or `hot` that many times an even share to expert 0. Raises ValueError when the experts do not divide by the
    ranks, the skew is not in (1, ranks], or hot is not in (1, experts / top_k].
    """
    if hot is not None and not 1 < hot <= shape.num_experts / shape.top_k:
        raise ValueError(
            f"hot: got {hot}, wanted above 1 and at most {shape.num_experts / shape.top_k}, experts over top_k"
        )
    if skew is not None and not 1 < skew <= context.num_ranks:
        raise ValueError(
            f"skew: got {skew}, wanted above 1 and at most {context.num_ranks}, the number of ranks"
        )
    if shape.num_experts % context.num_ranks:
        raise ValueError(f"ranks: got {context.num_ranks}, wanted a divisor of {shape.num_experts} experts")
    generator = torch.Generator(context.device).manual_seed(1 + context.rank)
    local = shape.num_experts // context.num_ranks

    def normal(*size: int, deviation: float = 1.0) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device=context.device)
        return tensor.normal_(0.0, deviation, generator=generator)

    def input_set() -> InputSet:
        scores = torch.randn(tokens, shape.num_experts, device=context.device, generator=generator)
        if skew is not None:
            scores = _skewed(scores, local, shape.top_k * skew / context.num_ranks, shape.top_k, generator)
        if hot is not None:
            scores = _skewed(scores, 1, shape.top_k * hot / shape.num_experts, shape.top_k, generator)
        weights, ids = scores.softmax(-1).topk(shape.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return InputSet(
            normal(tokens, shape.hidden).requires_grad_(),
            ids,
            weights.requires_grad_(),
            normal(tokens, shape.hidden),
        )

    return Problem(
        shape,
        tokens,
        dtype,
        tuple(input_set() for _ in range(INPUT_SETS)),
        # Parameters, as of a model: of other tensors no copy is ever kept.
        nn.Parameter(normal(local, 2 * shape.intermediate, shape.hidden, deviation=shape.hidden**-0.5)),
        nn.Parameter(normal(local, shape.hidden, shape.intermediate, deviation=shape.intermediate**-0.5)),
        skew,
    )


def _skewed(scores: Tensor, local: int, hot: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Scores of which the first `local` experts win `hot` of a token's slots on average, the rest the others."""
    draws = torch.rand(len(scores), 1, device=scores.device, generator=generator)
    slots = (hot + draws).floor().long()  # hot rounded up or down, right on average
    place = torch.arange(top_k, device=scores.device)
    here, there = scores[:, :local].topk(min(top_k, local)), scores[:, local:].topk(top_k)
    # A constant that no score reaches lifts the chosen experts above all others and keeps the order among them.
    lifted = scores.clone()
    lift = torch.where(place < slots, 100.0, 0.0)[:, : min(top_k, local)]
    lifted.scatter_(1, here.indices, here.values + lift)
    lift = torch.where(place < top_k - slots, 100.0, 0.0)
    lifted[:, local:].scatter_(1, there.indices, there.values + lift)
    return lifted
