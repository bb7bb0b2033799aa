"""Models whose training step is measured, the work of one step, and how many of their layers fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

# fp32 weight, gradient and two Adam moments.
_STATE_BYTES = 16
# A gathered block: bf16 weights, and its gradients in bf16 before and fp32 after they are reduced.
_GATHERED_BYTES = 8
# Rows of the MoE layer that are alive at once, each of H + 2I bf16 numbers: inputs, GEMM outputs and gradients of both.
_LIVE_ROWS = 8
# What the allocator and NCCL keep alongside it.
_USABLE = 0.85

# Dense bf16 peak of one GPU in FLOP/s, as its maker states it, by a word of the device's name.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12}


@dataclass(frozen=True)
class Model:
    """A decoder with an MoE layer in every block, in the manner of Qwen3."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    intermediate: int
    vocab_size: int
    sequence: int

    @property
    def attention_parameters(self) -> int:
        """Of one block, router and norms left out."""
        return 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one block."""
        return 3 * self.hidden * self.intermediate * self.num_experts

    def with_layers(self, layers: int) -> Model:
        return replace(self, num_layers=layers)

    def flops(self, tokens: int) -> float:
        """Of one training step on ``tokens`` tokens: forward and twice that for the backward, nothing recomputed."""
        # A token attends to half of its sequence on average; scores and their GEMM with the values.
        attention = 2 * self.attention_parameters + 2 * self.sequence * self.num_heads * self.head_dim
        experts = 6 * self.top_k * self.hidden * self.intermediate + 2 * self.hidden * self.num_experts
        head = 2 * self.hidden * self.vocab_size
        return 3.0 * tokens * (self.num_layers * (attention + experts) + head)

    def layers_that_fit(self, memory_bytes: int, num_ranks: int, ep_size: int) -> int:
        """How many blocks one rank of ``num_ranks`` can train with ``memory_bytes``; at least 1, at most all."""
        both_ends = 2 * self.vocab_size * self.hidden
        block = self.attention_parameters + self.expert_parameters
        gathered = self.attention_parameters + self.expert_parameters // ep_size
        working = _LIVE_ROWS * self.sequence * self.top_k * (self.hidden + 2 * self.intermediate) * 2
        fixed = _STATE_BYTES * both_ends / num_ranks + _GATHERED_BYTES * (gathered + both_ends) + working
        each = _STATE_BYTES * block / num_ranks + 2 * self.sequence * self.hidden
        return max(1, min(self.num_layers, int((_USABLE * memory_bytes - fixed) / each)))


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("tiny", 256, 2, 4, 2, 64, 8, 2, 128, 512, 128),
        Model("30B", 2048, 48, 32, 4, 128, 128, 8, 768, 151936, 16384),
        Model("235B", 4096, 94, 64, 4, 128, 128, 8, 1536, 151936, 16384),
    )
}


def find_model(name: str) -> Model:
    """The model of that name, in any case. Raises ValueError that lists the known ones."""
    for known, model in MODELS.items():
        if known.lower() == name.lower():
            return model
    raise ValueError(f"model: got {name!r}, wanted one of {', '.join(MODELS)}")


def peak_flops(device_name: str) -> float | None:
    """The stated bf16 peak of a GPU by its name; None for one that is not listed."""
    return next((peak for word, peak in _PEAKS.items() if word in device_name), None)
