"""Hugging Face transformers (5.0 and later): Qwen3MoE and every class whose experts have the same layout.

Nothing of transformers is imported: its experts say what they are by the marks that its decorator leaves on them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_moe._base.activation import Activation
from mega_moe.integrations.adapters import PackedExperts
from mega_moe.integrations.router_rules import rule_of, weights_of

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
}


class TransformersExperts(PackedExperts):
    """Modules with ``gate_up_proj``, ``down_proj`` and the marks of transformers' experts decorator."""

    family = "transformers"

    def matches(self, module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "config", "down_proj"))

    def refusals(self, module: nn.Module) -> list[str]:
        if getattr(module, "_is_expert_parallel", False):
            return ["_is_expert_parallel is True, want all experts here: give convert() the mesh instead"]
        if found := self.layout_faults(module):
            return found
        if self._top_k(module) is None:
            return [f"its configuration has none of {', '.join(_TOP_K)}"]
        return []

    def layout_faults(self, module: nn.Module) -> list[str]:
        """Why its weights and activation are not the layer's, whatever its configuration and other ranks say."""
        found = [
            f"{name} is {getattr(module, name)}, want {wanted}: {meaning}"
            for name, (wanted, meaning) in _MARKS.items()
            if getattr(module, name, wanted) != wanted
        ]
        if found:
            return found
        if not hasattr(module, "gate_up_proj"):
            return ["it has no gate_up_proj"]
        if packed := super().refusals(module):
            return packed
        _, reason = _gate_function(module)
        return [] if reason is None else [reason]

    def activation(self, module: nn.Module) -> Activation:
        return Activation(clamp=_gate_function(module)[0])

    def top_k(self, module: nn.Module) -> int:
        found = self._top_k(module)
        assert found is not None
        return found

    def arguments(
        self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        return super().arguments(module, hidden_states, top_k_index, top_k_weights)

    def ids(self, output: Any) -> Tensor:
        # A fourth member, as the state that Zaya's router hands to the next, is not ours.
        if not isinstance(output, tuple) or len(output) < 3:
            raise ValueError(
                f"the router returns {type(output).__name__}, want a tuple (logits, weights, ids)"
            )
        _, weights, topk_idx, *_ = output
        # Zaya's class of no expert comes out as expert 0 with weight 0.
        return topk_idx.masked_fill(weights == 0, -1)  # type: ignore[no-any-return]

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        logits, weights, _, *rest = output
        rule = rule_of(router, logits, weights, self.ids(output))
        return (logits, weights_of(router, rule, logits, topk_idx).to(weights.dtype), topk_idx, *rest)

    def _top_k(self, module: nn.Module) -> int | None:
        for name in _TOP_K:
            value = getattr(module.config, name, None)
            if isinstance(value, int):
                return value
        return None


def _gate_function(module: nn.Module) -> tuple[float | None, str | None]:
    """The limit of gate and up in a SwiGLU, or why it is none: asked by running it, for names tell less."""
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return None, "it does not say how it gates (_apply_gate)"
    # fp64: a limit that is read off a result is then the configuration's own number. Also on the default device meta.
    options: Any = {"dtype": torch.float64, "device": "cpu"}
    gate = torch.cat((torch.linspace(-8, 8, 33, **options), torch.tensor([-1e3, 1e3, 0.125], **options)))
    up = torch.cat((torch.linspace(3, -3, 33, **options), torch.tensor([1e3, -1e3, 1e6], **options)))
    try:
        with torch.no_grad():
            got = apply_gate(torch.cat((gate, up))[None])[0].to(torch.float64)
    except RuntimeError as error:  # an activation with parameters of its own, elsewhere than on the CPU
        return None, f"its activation cannot be tried out: {error}"
    if got.shape == gate.shape:
        # A small gate, which no limit holds back, shows how far up goes.
        highest = float(f"{float(got[-1] / F.silu(gate[-1])):.7g}")
        for limit in (None, highest if highest > 0 else None):
            bound = float("inf") if limit is None else limit
            want = F.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
            if torch.allclose(got, want, rtol=1e-4, atol=1e-5):
                return limit, None
    named = getattr(module, "act_fn", apply_gate)
    return None, (
        f"its activation ({named}) is neither silu(gate) * up nor silu(min(gate, c)) * clamp(up, -c, c) for any c"
    )
