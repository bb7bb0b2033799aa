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

    def poison(self) -> None:
        """Fills and frees as many bytes as one call's outputs and rows take, so that what it does not write is NaN."""
        rows = self.tokens * self.shape.top_k * (2 * self.shape.intermediate + self.shape.hidden)
        elements = rows + 2 * self.tokens * self.shape.hidden + self.w_gate_up.numel() + self.w_down.numel()
        torch.full((elements,), float("nan"), dtype=self.dtype, device=self.w_down.device)


def random_problem(
    shape: Shape, tokens: int, dtype: torch.dtype, context: Context, *, hot: float | None = None
) -> Problem:
    """N(0, 1) activations, weights of deviation 1/sqrt(fan-in), top-k of a random softmax, normalized per token.

    Experts are spread evenly, and so are tokens, unless `hot` sends that many times an even share of the rows to expert
    0. Raises ValueError when the experts do not divide by the ranks, or hot is not in (1, experts / top_k].
    """
    if hot is not None and not 1 < hot <= shape.num_experts / shape.top_k:
        raise ValueError(
            f"hot: got {hot}, wanted above 1 and at most {shape.num_experts / shape.top_k}, experts over top_k"
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
        if hot is not None:
            # No score of the others reaches 20; softmax still tells them apart.
            wins = torch.rand(tokens, device=context.device, generator=generator)
            scores[:, 0] = torch.where(wins < hot * shape.top_k / shape.num_experts, 20.0, -20.0)
        weights, ids = scores.softmax(-1).topk(shape.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        x, dy = (normal(tokens, shape.hidden) for _ in range(2))
        return InputSet(x.requires_grad_(), ids, weights.requires_grad_(), dy)

    return Problem(
        shape,
        tokens,
        dtype,
        tuple(input_set() for _ in range(INPUT_SETS)),
        # Parameters, as of a model: of other tensors no copy is ever kept.
        nn.Parameter(normal(local, 2 * shape.intermediate, shape.hidden, deviation=shape.hidden**-0.5)),
        nn.Parameter(normal(local, shape.hidden, shape.intermediate, deviation=shape.intermediate**-0.5)),
    )
