"""Hugging Face transformers (5.0 and later): Qwen3MoE and every class whose experts have the same layout.

Nothing of transformers is imported: its experts say what they are by the marks that its decorator leaves on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_moe.integrations.adapters import PackedExperts

# Under which name a model's configuration keeps k.
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k",
)
# The marks, and what they must be for a gated SwiGLU expert without biases in [gate; up] order.
_MARKS = {
    "has_gate": (True, "a gate projection"),
    "has_bias": (False, "no biases"),
    "is_transposed": (False, "weights as [experts, out, in]"),
    "is_concatenated": (True, "gate rows before up rows, not interleaved"),
    "has_post_expert_norm": (False, "no norm after an expert"),
    "_is_expert_parallel": (False, "all experts here: give convert() the mesh instead"),
}


class TransformersExperts(PackedExperts):
    """Modules with ``gate_up_proj``, ``down_proj`` and the marks of transformers' experts decorator."""

    family = "transformers"

    def matches(self, module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "config", "down_proj"))

    def refusals(self, module: nn.Module) -> list[str]:
        found = [
            f"{name} is {getattr(module, name)}, want {wanted}: {meaning}"
            for name, (wanted, meaning) in _MARKS.items()
            if getattr(module, name, wanted) != wanted
        ]
        if found:
            return found
        if not hasattr(module, "gate_up_proj"):
            return ["it has no gate_up_proj"]
        if self._top_k(module) is None:
            return [f"its configuration has none of {', '.join(_TOP_K)}"]
        return _activation(module)

    def top_k(self, module: nn.Module) -> int:
        found = self._top_k(module)
        assert found is not None
        return found

    def arguments(
        self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        return super().arguments(module, hidden_states, top_k_index, top_k_weights)

    def ids(self, output: Any) -> Tensor:
        if not isinstance(output, tuple) or len(output) != 3:
            raise ValueError(
                f"the router returns {type(output).__name__}, want a tuple (logits, weights, ids)"
            )
        topk_idx: Tensor = output[2]
        return topk_idx

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        logits, weights, own = output
        rule = _rule_of(router, logits, weights, own)
        return logits, rule(logits, topk_idx).to(weights.dtype), topk_idx

    def _top_k(self, module: nn.Module) -> int | None:
        for name in _TOP_K:
            value = getattr(module.config, name, None)
            if isinstance(value, int):
                return value
        return None


def _activation(module: nn.Module) -> list[str]:
    """Whether the gate function is SwiGLU, asked by running it: names of activations and overrides tell less."""
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return ["it does not say how it gates (_apply_gate)"]
    gate = torch.cat((torch.linspace(-8, 8, 33), torch.tensor([-1e3, 1e3])))
    up = torch.cat((torch.linspace(3, -3, 33), torch.tensor([1e3, -1e3])))
    try:
        with torch.no_grad():
            got = apply_gate(torch.cat((gate, up))[None])[0]
    except RuntimeError as error:  # an activation with parameters of its own, elsewhere than on the CPU
        return [f"its activation cannot be tried out: {error}"]
    want = F.silu(gate) * up
    if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5):
        return []
    return [
        f"its activation ({getattr(module, 'act_fn', apply_gate)}) is not silu(gate) * up without a clamp"
    ]


Rule = Callable[[Tensor, Tensor], Tensor]


def _softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(-1, ids)


def _sigmoid(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().sigmoid().gather(-1, ids)


def _gathered(scores: Tensor, ids: Tensor) -> Tensor:
    return scores.float().gather(-1, ids)


def _normalised(rule: Rule) -> Rule:
    def apply(logits: Tensor, ids: Tensor) -> Tensor:
        weights = rule(logits, ids)
        return weights / weights.sum(-1, keepdim=True)

    return apply


# The router's own probabilities may come instead of its logits: gathering them is a rule as well.
_RULES: tuple[Rule, ...] = (
    _softmax,
    _normalised(_softmax),
    _sigmoid,
    _normalised(_sigmoid),
    _gathered,
    _normalised(_gathered),
)


def _rule_of(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> Rule:
    """The rule by which the router weighs ids, found once by comparing with its own weights of its own ids."""
    known: Rule | None = router.__dict__.get("_mega_moe_rule")
    if known is not None:
        return known
    tolerance = 1e-2 if weights.dtype != torch.float32 else 1e-4
    for rule in _RULES:
        with torch.no_grad():
            if torch.allclose(
                rule(logits, ids).float(), weights.float(), rtol=tolerance, atol=tolerance * 0.1
            ):
                router.__dict__["_mega_moe_rule"] = rule
                return rule
    raise ValueError(
        f"{type(router).__name__}: its weights are neither softmax nor sigmoid of its logits, normalised or not; "
        "give an adapter with a reroute() of its own"
    )
