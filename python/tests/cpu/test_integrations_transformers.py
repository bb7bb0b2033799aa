"""transformers: the real classes, tiny and random, before and after they are switched."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_moe.integrations import Converted, DispatchConfig, LoadMeter, RoutingReplay, convert
from mega_moe.testing import count_op_calls, relative_l2

from ._trainers import GROUPED, need

transformers = need("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def build(kind: str = "Qwen3Moe", **changes: Any) -> nn.Module:
    """A random model of a class of transformers that takes SIZES."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # transformers starts with weights so small that a wrong layer hardly shows in the logits.
            if p.dim() > 1 and "embed" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model


def switched(model: nn.Module, config: DispatchConfig = GROUPED, **options: Any) -> Converted:
    return convert(model, config, sequence_length=32, **options)


def train(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# One of each way of routing: softmax, normalized or not, sigmoid with a correction; with shared experts or without.
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "MiniMaxM2"])
def test_forward_and_backward_agree(kind: str) -> None:
    model = build(kind)
    want, grads = train(model)
    keys = list(model.state_dict())
    done = switched(model)
    assert len(done.layers) == 2
    with count_op_calls() as calls:
        got, after = train(model)
    assert dict(calls) == {"run": 2, "backward": 2}
    assert relative_l2(got, want) < 1e-5
    assert list(model.state_dict()) == keys
    assert after.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative_l2(after[name], grad) < 1e-4, name


def test_in_bf16() -> None:
    model = build().bfloat16()
    want, grads = train(model)
    switched(model)
    got, after = train(model)
    # Each is a few roundings from the exact one; the layers' own bound of 6e-3 grows over two blocks and the head.
    assert relative_l2(got, want) < 3e-2
    for name, grad in grads.items():
        assert relative_l2(after[name], grad) < 8e-2, name


def test_a_converted_model_trains_as_the_unconverted_one() -> None:
    losses = []
    for convert_it in (False, True):
        model = build()
        if convert_it:
            switched(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[9] < 0.8 * losses[0]
    assert losses[10:] == pytest.approx(losses[:10], rel=1e-3)


def test_train_save_and_load_unconverted(tmp_path: Path) -> None:
    model = build()
    switched(model)
    train(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    plain = type(build()).from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        want, got = model(TOKENS).logits, plain(TOKENS).logits
        assert relative_l2(build()(TOKENS).logits, want) > 1e-2
    assert relative_l2(got, want) < 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("GptOss", {"layer_types": None}, "has_bias is True, want False: no biases"),
        ("Qwen3Moe", {"hidden_act": "gelu"}, "is neither silu"),
    ],
)
def test_what_the_layer_does_not_compute_is_refused(kind: str, changes: dict[str, Any], reason: str) -> None:
    model = build(kind, **changes)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=reason):
        switched(model)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_full_checkpointing_runs_each_layer_once() -> None:
    model = build()
    switched(model)
    meter = LoadMeter(model)
    _, want = train(model)
    once = meter.tokens_per_expert.clone()
    meter.reset()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    with count_op_calls() as calls:
        _, got = train(model)
    assert dict(calls) == {"run": 2, "backward": 2}
    assert once.sum(1).tolist() == [TOKENS.numel() * 2] * 2
    assert torch.equal(meter.tokens_per_expert, once)
    for name, grad in want.items():
        assert torch.equal(got[name], grad), name
    with torch.no_grad():
        model(TOKENS)
    assert torch.equal(meter.tokens_per_expert, once)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    made = build()
    done = switched(made)
    yield made
    done.destroy()


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(TOKENS, use_cache=False).logits
    return out


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe"])
def test_replay_of_the_own_ids_changes_nothing(kind: str) -> None:
    made = build(kind)
    switched(made)
    replay = RoutingReplay(made)
    with replay.record() as layers:
        want = logits(made)
    assert [len(ids) for ids in layers] == [1, 1]
    with replay.replay([ids for (ids,) in layers]):
        assert relative_l2(logits(made), want) < 1e-6
    assert torch.equal(logits(made), want)


def test_replay_routes_by_the_given_ids_and_trains_the_router(model: nn.Module) -> None:
    replay = RoutingReplay(model)
    meter = LoadMeter(model)
    with replay.record() as layers:
        own = logits(model)
    given = [(ids + 1) % 8 for (ids,) in layers]
    with replay.replay(given):
        got = logits(model)
        got.square().sum().backward()
    assert relative_l2(got, own) > 1e-2
    for layer, ids in enumerate(given):
        assert torch.equal(meter.tokens_per_expert[layer], torch.bincount(ids.flatten(), minlength=8))
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            assert p.grad is not None
            assert p.grad.any(), name
    with pytest.raises(ValueError, match="got 1 layers, want 2"), replay.replay(given[:1]):
        pass
    with pytest.raises(ValueError, match="got shape"), replay.replay([ids[:1] for ids in given]):
        logits(model)


def test_a_router_with_another_rule_is_not_replayed() -> None:
    made = build()
    switched(made)
    router = made.get_submodule("model.layers.0.mlp.gate")
    kind = type(router)

    class Odd(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
            scores, weights, ids = super().forward(hidden_states)
            return scores, weights.square(), ids

    router.__class__ = Odd
    replay = RoutingReplay(made)
    with replay.record() as layers:
        logits(made)
    with (
        pytest.raises(ValueError, match="Odd: its weights are neither"),
        replay.replay([ids for (ids,) in layers]),
    ):
        logits(made)


def test_a_router_that_returns_logits_alone_is_not_recorded() -> None:
    made = build()
    switched(made)
    made.get_submodule("model.layers.1.mlp.gate").register_forward_hook(lambda _m, _i, out: out[0])
    told = r"returns Tensor, want a tuple \(logits, weights, ids\)"
    with pytest.raises(ValueError, match=told), RoutingReplay(made).record():
        logits(made)


def test_experts_that_another_library_has_spread_are_refused() -> None:
    made = build()
    made.get_submodule("model.layers.1.mlp.experts")._is_expert_parallel = True  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts \(Qwen3MoeExperts\): _is_expert_parallel is True"
    ):
        switched(made)


def test_an_activation_with_weights_elsewhere_is_refused() -> None:
    made = build()

    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, torch.ones(len(x), x.shape[-1] + 1))

    made.get_submodule("model.layers.0.mlp.experts").act_fn = Elsewhere()
    with pytest.raises(ValueError, match="its activation cannot be tried out"):
        switched(made)


def test_the_signature_stays() -> None:
    made = build()
    before = inspect.signature(made.get_submodule("model.layers.0.mlp.experts").forward)
    switched(made)
    assert inspect.signature(made.get_submodule("model.layers.0.mlp.experts").forward) == before


def test_a_copy_and_the_original_are_told_apart(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    assert not torch.equal(logits(twin), logits(model))


def test_nothing_of_transformers_is_imported_by_the_package() -> None:
    code = "import sys, mega_moe.integrations, mega_moe.nn; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
