"""What families of transformers differ in: limits of the activation, quantized weights, rules of the routers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_moe.integrations import RoutingReplay, convert
from mega_moe.integrations.router_rules import rule_of, weights_of
from mega_moe.integrations.served import served_by
from mega_moe.testing import count_op_calls, relative_l2

from ._trainers import GROUPED, need

transformers = need("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
MODEL: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "router_scaling_factor": 2.5,
    "route_scale": 2.5,
    "router_hidden_size": 16,
    "layer_types": ["full_attention"] * 2,
    "pad_token_id": 0,
    "experts_implementation": "eager",
}


def need_class(folder: str, name: str) -> Any:
    """A class of a family that may be younger than the installed transformers."""
    try:
        return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"needs a transformers with {name}: {error}")


def alone(kind: Any, config: Any) -> nn.Module:
    """A model of one expert module, whose products pass any limit on both sides."""
    config._experts_implementation = "eager"
    model = nn.Module()
    model.experts = kind(config)
    torch.manual_seed(0)
    for weight in model.experts.parameters():
        nn.init.normal_(weight)
    return model


def call() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(16, 32, generator=rng)
    return x, torch.randint(8, (16, 2), generator=rng), torch.rand(16, 2, generator=rng)


@pytest.mark.parametrize(
    ("folder", "experts", "config", "limit"),
    [
        ("deepseek_v4", "DeepseekV4Experts", "DeepseekV4Config", 7.0),
        ("glm5_next", "Glm5NextTextExperts", "Glm5NextTextConfig", 10.0),
        ("hy_v4", "HYV4Experts", "HYV4Config", 0.3),
    ],
)
def test_the_limit_of_the_family_is_served(folder: str, experts: str, config: str, limit: float) -> None:
    kind = need_class(folder, experts)
    made = getattr(transformers, config)(**SIZES, swiglu_limit=limit)
    model = alone(kind, made)
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in call()]
    want = model.experts(*inputs)
    want.sum().backward()
    grads = [t.grad.clone() for t in (inputs[0], inputs[2], *model.experts.parameters())]
    for t in (inputs[0], inputs[2], *model.experts.parameters()):
        t.grad = None
    with pytest.raises(ValueError, match=rf"activation: got .*clamp=3\.0.* have .*clamp={limit}"):
        convert(model, GROUPED, sequence_length=64, activation_clamp=3.0)
    convert(model, GROUPED, sequence_length=64)
    assert served_by(model.experts).activation.clamp == limit
    with count_op_calls() as calls:
        got = model.experts(*inputs)
    assert calls["run"] == 1
    assert relative_l2(got, want) < 1e-5
    got.sum().backward()
    for t, grad in zip((inputs[0], inputs[2], *model.experts.parameters()), grads):
        assert relative_l2(t.grad, grad) < 1e-4


def test_a_limit_with_another_activation_is_refused() -> None:
    """sigmoid(alpha g) and up + 1."""
    experts = need_class("minimax_m3_vl", "MiniMaxM3VLExperts")
    model = alone(experts, transformers.MiniMaxM3VLTextConfig(**SIZES))
    with pytest.raises(ValueError, match="is neither silu"):
        convert(model, GROUPED, sequence_length=64)


@pytest.mark.parametrize("fault", ["limit of silu(g)", "limit of up alone", "two limits"])
def test_another_limit_is_refused(fault: str) -> None:
    class Other(need_class("qwen3_moe", "Qwen3MoeExperts")):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            if fault == "limit of silu(g)":
                return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
            if fault == "limit of up alone":
                return F.silu(gate) * up.clamp(-7.0, 7.0)
            return F.silu(gate.clamp(max=8.0)) * up.clamp(-7.0, 7.0)

    model = alone(Other, transformers.Qwen3MoeConfig(**SIZES))
    with pytest.raises(ValueError, match="is neither silu"):
        convert(model, GROUPED, sequence_length=64)


class Quantized(nn.Parameter):
    """Stands for the tensors of quantization libraries, which say another dtype than they hold."""


@pytest.mark.parametrize(
    ("gate_up", "down", "reason"),
    [
        (
            torch.zeros(4096, 1, dtype=torch.uint8),
            None,
            r"gate_up_proj is uint8 \[4096, 1\], want bf16 or fp32 \[E, 2I, H\]",
        ),
        (
            torch.zeros(8, 32, 32).to(torch.float8_e4m3fn),
            None,
            r"gate_up_proj is float8_e4m3fn \[8, 32, 32\]",
        ),
        (
            None,
            torch.zeros(8, 32, 16, dtype=torch.int8),
            r"down_proj is int8 \[8, 32, 16\], want bf16 or fp32 \[E, H, I\]",
        ),
        (torch.zeros(0), None, r"gate_up_proj has shape \[0\], want \[E, 2I, H\]"),
        (torch.zeros(8, 48, 32), None, r"gate_up_proj is \[8, 48, 32\] and down_proj \[8, 32, 16\]"),
        (Quantized(torch.zeros(8, 32, 32)), None, "gate_up_proj is a Quantized, want a plain tensor"),
    ],
)
def test_packed_and_quantized_weights_are_refused(gate_up: Any, down: Any, reason: str) -> None:
    experts = need_class("qwen3_moe", "Qwen3MoeExperts")
    model = alone(experts, transformers.Qwen3MoeConfig(**SIZES))
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        if weight is not None:
            plain = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
            setattr(model.experts, name, plain)
    kind = type(model.experts)
    with pytest.raises(ValueError, match=rf"experts \(Qwen3MoeExperts\): {reason}"):
        convert(model, GROUPED, sequence_length=64)
    assert type(model.experts) is kind


# Scaled, grouped, with a correction of the choice, a share of softmax or of sigmoid, and a class of no expert.
FAMILIES = [
    "DeepseekV3",
    "Glm4Moe",
    "ExaoneMoe",
    "HYV3",
    "Zaya",
    "DeepseekV2",
    "Lfm2Moe",
    "Afmoe",
    "DeepseekV4",
]


def build(kind: str) -> nn.Module:
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip(f"needs a transformers with {kind}")
    torch.manual_seed(0)
    own: dict[str, Any] = {"num_experts_per_tok": 1, "layer_types": None} if kind == "Zaya" else {}
    if kind == "DeepseekV4":
        own = {"layer_types": None}
    made = getattr(transformers, f"{kind}Config")(**{**MODEL, **own})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(made)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)
        for name, b in model.named_buffers():
            if name.endswith("bias"):
                b.uniform_(-0.1, 0.1)
            if name.endswith("balancing_biases"):
                b[-1] = 0.1  # Zaya's class of no expert: some tokens
    return model.eval()


TOKENS = torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", FAMILIES)
def test_replay_of_the_own_ids_is_the_recorded_run(kind: str) -> None:
    model = build(kind)
    done = convert(model, GROUPED, sequence_length=64)
    replay = RoutingReplay(model)
    with replay.record() as layers, torch.no_grad():
        want = model(TOKENS, use_cache=False).logits
    given = [ids for (ids,) in layers]
    assert len(given) == len(done.layers) > 0
    if kind == "Zaya":
        assert any((ids == -1).any() for ids in given)
    with replay.replay(given), torch.no_grad():
        got = model(TOKENS, use_cache=False).logits
    if kind in {
        "Lfm2Moe",
        "Zaya",
    }:  # one adds 1e-6 to a token's sum, the other has its softmax in another shape
        assert relative_l2(got, want) < 1e-5
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", FAMILIES)
def test_slots_and_tokens_without_a_record_are_masked(kind: str) -> None:
    model = build(kind)
    convert(model, GROUPED, sequence_length=64)
    replay = RoutingReplay(model)
    with replay.record() as layers, torch.no_grad():
        own = model(TOKENS, use_cache=False).logits
    given = [ids.clone() for (ids,) in layers]
    for ids in given:
        ids[1, 0] = -1
        ids[-1] = -1
    with replay.replay(given):
        got = model(TOKENS, use_cache=False).logits
        got.square().sum().backward()
    assert relative_l2(got[:, :1], own[:, :1]) < 1e-5  # causal: what is masked comes later
    assert relative_l2(got[:, 1:], own[:, 1:]) > 1e-3
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), name


def test_masked_slots_are_not_in_the_sum() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[1, 3], [2, -1], [-1, -1]])
    router = nn.Module()
    got = weights_of(router, ("sigmoid", True, 2.5), logits, ids)
    scores = logits.detach().sigmoid()
    assert torch.allclose(got[0].double(), 2.5 * scores[0, [1, 3]] / scores[0, [1, 3]].sum())
    assert got[1].tolist() == [2.5, 0]
    assert got[2].tolist() == [0, 0]
    got.sum().backward()
    assert logits.grad.isfinite().all()


def test_an_id_out_of_range_is_the_layer_s_to_refuse() -> None:
    model = build("DeepseekV3")
    convert(model, GROUPED, sequence_length=64)
    replay = RoutingReplay(model)
    with replay.record() as layers, torch.no_grad():
        model(TOKENS, use_cache=False)
    given = [ids.clone() for (ids,) in layers]
    given[0][2, 1] = 8
    with pytest.raises(ValueError, match="topk_idx"), replay.replay(given), torch.no_grad():
        model(TOKENS, use_cache=False)


def test_a_rule_is_kept_once_it_is_the_only_one() -> None:
    router, ids = nn.Module(), torch.tensor([[0, 1]])
    router.routed_scaling_factor = 2.5
    even = torch.zeros(1, 4)
    # All alike: softmax and sigmoid give the same shares, and may not the next time.
    rule_of(router, even, torch.full((1, 2), 1.25), ids)
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    many = logits.topk(2)[1]
    weights = logits.sigmoid().gather(1, many)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    assert rule_of(router, logits, weights, many) == ("sigmoid", True, 2.5)
    assert rule_of(router, even, torch.zeros(1, 2), ids) == ("sigmoid", True, 2.5)
