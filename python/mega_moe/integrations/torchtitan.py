"""TorchTitan's MoE: ``RoutedExperts`` with ``GroupedExperts`` and a token dispatcher below it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mega_moe._base.activation import SWIGLU, Activation
from mega_moe.integrations.adapters import Arguments, Sizes, local


class TorchTitanExperts:
    """Replaces dispatch, experts and combine of ``RoutedExperts``; router and shared experts stay TorchTitan's.

    Gate and up projection are two parameters there, so each call writes them side by side: one copy of the local gate
    and up weights, forward and backward.
    """

    family = "torchtitan"
    parameters: tuple[str, ...] = ("w1_EFD", "w3_EFD", "w2_EDF")
    # What its own experts compute in, whatever the model's dtype.
    dtype: torch.dtype | None = torch.bfloat16

    def matches(self, module: nn.Module) -> bool:
        inner = getattr(module, "inner_experts", None)
        return hasattr(module, "token_dispatcher") and all(hasattr(inner, name) for name in self.parameters)

    def refusals(self, module: nn.Module) -> list[str]:
        inner = type(self.owner(module))
        # Low-precision variants are subclasses that replace the product.
        if inner.__name__ != "GroupedExperts":
            return [f"its experts are {inner.__name__}, want GroupedExperts: bf16, SwiGLU, no biases"]
        return []

    def sizes(self, module: nn.Module) -> Sizes:
        experts, intermediate, hidden = self.owner(module).w1_EFD.shape  # type: ignore[misc]
        return Sizes(experts, int(module.token_dispatcher.top_k), hidden, intermediate)  # type: ignore[arg-type, union-attr]

    def owner(self, module: nn.Module) -> nn.Module:
        return module.inner_experts  # type: ignore[return-value]

    def weights(self, owner: nn.Module) -> tuple[Tensor, Tensor]:
        gate, up, down = (local(getattr(owner, name)).to(torch.bfloat16) for name in self.parameters)
        return torch.cat((gate, up), dim=1), down

    def activation(self, module: nn.Module) -> Activation:
        return SWIGLU

    def arguments(
        self,
        module: nn.Module,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Arguments:
        return Arguments(x_BLD, topk_expert_ids_BLK, topk_scores_BLK)

    def ids(self, output: Any) -> Tensor:
        _, topk_idx, _ = output
        return topk_idx  # type: ignore[no-any-return]

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        _, _, scores = output
        weights = scores.gather(-1, topk_idx)
        if router.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * router.route_scale, topk_idx, scores
