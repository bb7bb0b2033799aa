"""The transformer of the step benchmark, in plain PyTorch; its experts are served by whichever backend is measured.

Shape suffixes: B sequences, S positions, H hidden, N query heads, G key/value heads, D head size, T = B * S tokens,
E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_moe.bench.step.shapes import Model
from mega_moe.integrations import PackedExperts

# Tokens whose logits are alive at once: those of a whole sequence take more memory than a block.
_HEAD_TOKENS = 2048
_THETA = 1e6


class Experts(nn.Module):
    """Weights alone: `convert` gives them a backend."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.top_k = model.top_k
        self.gate_up_proj = nn.Parameter(torch.empty(model.num_experts, 2 * model.intermediate, model.hidden))
        self.down_proj = nn.Parameter(torch.empty(model.num_experts, model.hidden, model.intermediate))


class Adapter(PackedExperts):
    """Tells `convert` of `Experts`."""

    family = "the step benchmark"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, Experts)


class Block(nn.Module):
    """Attention and experts. It ends with the experts and the residual sum, so that a checkpoint stops before them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.shape = model
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.attention_norm = nn.RMSNorm(model.hidden, eps=1e-6)
        self.qkv = nn.Linear(model.hidden, queries + 2 * keys, bias=False)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(model.head_dim, eps=1e-6)
        self.out = nn.Linear(queries, model.hidden, bias=False)
        self.moe_norm = nn.RMSNorm(model.hidden, eps=1e-6)
        self.router = nn.Linear(model.hidden, model.num_experts, bias=False)
        self.experts = Experts(model)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH = x_BSH + self._attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        x_TH = self.moe_norm(x_BSH).flatten(0, 1)
        weights_TK, ids_TK = self.router(x_TH).float().softmax(-1).topk(self.shape.top_k)
        y_TH = self.experts(x_TH, ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True))
        result: Tensor = x_BSH + y_TH.view_as(x_BSH)
        return result

    def _attention(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        batch, length, _ = x_BSH.shape
        shape = self.shape
        heads = self.qkv(x_BSH).view(batch, length, -1, shape.head_dim)
        q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=2)
        q, k = (_rotate(norm(t), cos_SD, sin_SD) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return projected


class Transformer(nn.Module):
    """Embedding, blocks and head; returns the mean cross-entropy of the next token."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.shape = model
        self.embedding = nn.Embedding(model.vocab_size, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden, eps=1e-6)
        self.head = nn.Linear(model.hidden, model.vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        inputs, targets = tokens_BS[:, :-1], tokens_BS[:, 1:].flatten()
        x = self.embedding(inputs)
        cos, sin = _angles(inputs.shape[1], self.shape.head_dim, x)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        x = self.norm(x).flatten(0, 1)
        total = x.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(x.split(_HEAD_TOKENS), targets.split(_HEAD_TOKENS)):
            total = total + checkpoint(self._loss, rows, wanted, use_reentrant=False)
        mean: Tensor = total / len(targets)
        return mean

    def _loss(self, x_TH: Tensor, targets_T: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x_TH).float(), targets_T, reduction="sum")


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Set what this rank holds: norms 1, matrices N(0, 1/fan-in). The same for the same seed and sharding."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if parameter.ndim == 1:
            local.fill_(1.0)
        else:
            local.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)


def _angles(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    half = torch.arange(head_dim // 2, device=like.device, dtype=torch.float32)
    frequency = _THETA ** (-2 * half / head_dim)
    angle = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BSND.chunk(2, dim=-1)
    return x_BSND * cos_SD[:, None] + torch.cat((-second, first), dim=-1) * sin_SD[:, None]
