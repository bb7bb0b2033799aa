"""A small mixture-of-experts language model in the manner of Qwen3.

Shape suffixes: B sequences, S positions, T = B * S tokens, H hidden, N query heads, G key/value heads, D head size,
V vocabulary, L layers, E experts (of all ranks), K experts per token.

The experts are `mega_moe.nn.MegaMoE` modules; the rest is plain PyTorch. Nothing here knows about ranks: an expert
module holds the experts of its own rank, and its buffer, attached from outside, moves the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_moe.demo.config import Config
from mega_moe.demo.streams import random_stream
from mega_moe.nn import MegaMoE


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    expert_idx_TK: Tensor  # int64, global expert ids
    weights_TK: Tensor  # fp32, sum to one for each token
    mean_prob_E: Tensor  # fp32, mean router probability of each expert (differentiable)
    load_E: Tensor  # fp32, number of (token, slot) pairs that each expert receives


class ModelOutput(NamedTuple):
    """Prediction and router statistics of one forward pass."""

    logits_BSV: Tensor
    mean_prob_LE: Tensor
    load_LE: Tensor


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values, normalized queries and keys, rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        batch, length, _ = x_BSH.shape
        q_BSND = self.q_proj(x_BSH).view(batch, length, self.num_heads, self.head_dim)
        k_BSGD = self.k_proj(x_BSH).view(batch, length, self.num_kv_heads, self.head_dim)
        v_BSGD = self.v_proj(x_BSH).view(batch, length, self.num_kv_heads, self.head_dim)
        # Norm and rotation in fp32 also under autocast, whose products above are bf16.
        q_BNSD = rotate(self.q_norm(q_BSND.to(cos_SD.dtype)).transpose(1, 2), cos_SD, sin_SD).to(v_BSGD.dtype)
        k_BGSD = rotate(self.k_norm(k_BSGD.to(cos_SD.dtype)).transpose(1, 2), cos_SD, sin_SD).to(v_BSGD.dtype)
        # Query head n reads key/value head n // group_size.
        group_size = self.num_heads // self.num_kv_heads
        k_BNSD = k_BGSD.repeat_interleave(group_size, dim=1)
        v_BNSD = v_BSGD.transpose(1, 2).repeat_interleave(group_size, dim=1)
        y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        out: Tensor = self.o_proj(y_BNSD.transpose(1, 2).reshape(batch, length, -1))
        return out


class Router(nn.Module):
    """Chooses K experts for each token; their softmax probabilities, normalized to sum one, are the weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden))

    def forward(self, x_TH: Tensor) -> Routing:
        # In fp32 also under autocast: a bf16 logit is too coarse to order experts that are nearly tied.
        with torch.autocast(x_TH.device.type, enabled=False):
            probs_TE = F.linear(x_TH.float(), self.weight).softmax(dim=-1)
        top_TK, expert_idx_TK = probs_TE.topk(self.top_k, dim=-1)
        load_E = torch.zeros_like(probs_TE).scatter_(1, expert_idx_TK, 1.0).sum(dim=0)
        return Routing(expert_idx_TK, top_TK / top_TK.sum(dim=-1, keepdim=True), probs_TE.mean(dim=0), load_E)


class Block(nn.Module):
    """One layer: attention, then the experts that the router chose, each on the normalized residual stream."""

    def __init__(self, config: Config, num_local_experts: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.router = Router(config)
        self.experts = MegaMoE(config.hidden, config.intermediate, num_local_experts)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        x_TH = self.moe_norm(x_BSH).flatten(0, 1)
        routing: Routing = self.router(x_TH)
        y_TH = self.experts(x_TH, routing.expert_idx_TK, routing.weights_TK)
        return x_BSH + y_TH.view_as(x_BSH), routing.mean_prob_E, routing.load_E


class LanguageModel(nn.Module):
    """Predicts the next byte at every position. `num_local_experts` of the experts live in this process."""

    def __init__(self, config: Config, num_local_experts: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config, num_local_experts) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def layers(self) -> list[Block]:
        """The blocks, with their type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, tokens_BS: Tensor) -> ModelOutput:
        cos_SD, sin_SD = rotary_table(tokens_BS.shape[1], self.config, tokens_BS.device)
        x_BSH = self.embedding(tokens_BS)
        mean_probs, loads = [], []
        for block in self.layers():
            x_BSH, mean_prob_E, load_E = block(x_BSH, cos_SD, sin_SD)
            mean_probs.append(mean_prob_E)
            loads.append(load_E)
        return ModelOutput(self.head(self.norm(x_BSH)), torch.stack(mean_probs), torch.stack(loads))


def rotary_table(length: int, config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, head_dim] of the angles position * theta ** (-2 i / head_dim), i in either half."""
    half = torch.arange(config.head_dim // 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-2 * half / config.head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


def balance_loss(mean_prob_LE: Tensor, load_LE: Tensor) -> Tensor:
    """Load-balancing loss: E * sum_e (share of the slots that e receives) * (mean probability of e), mean over layers.

    It is 1 where the load is even and E where one expert receives everything. With the loads summed over all ranks it
    balances the global batch, and stays linear in each rank's own probabilities: the ranks' mean is the global value.
    """
    share_LE = load_LE / load_LE.sum(dim=-1, keepdim=True)
    loss: Tensor = load_LE.shape[-1] * (share_LE * mean_prob_LE).sum(dim=-1).mean()
    return loss


@torch.no_grad()
def initialize(model: LanguageModel, seed: int, first_expert: int) -> None:
    """Set all weights from `seed`, alike on every device and for every spreading of the experts over ranks.

    Each matrix, and each expert by its global id, has a random stream of its own. `first_expert` is the global id of
    this process's first one.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # gains of the norms
        elif parameter.ndim == 2:
            parameter.copy_(_random_matrix(name, parameter.shape, seed, model.config))
        else:
            for i, matrix in enumerate(parameter):
                matrix.copy_(_random_matrix(f"{name}.{first_expert + i}", matrix.shape, seed, model.config))


def _random_matrix(name: str, shape: torch.Size, seed: int, config: Config) -> Tensor:
    std: float = shape[-1] ** -0.5
    if name.startswith("embedding"):
        std = 1.0
    elif name.startswith("head"):
        std = 0.0  # the first prediction is uniform
    elif "o_proj" in name or "down_proj" in name:
        std *= (2 * config.num_layers) ** -0.5  # so many branches add into the residual stream
    return torch.randn(shape, generator=random_stream(seed, name)) * std
