"""transformers' own switch: models train as with its grouped_mm, and buffers come, grow and go as calls need them."""

from __future__ import annotations

import copy
import gc
import io
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_moe import Activation, FallbackWarning
from mega_moe.integrations import DispatchConfig
from mega_moe.testing import count_op_calls, relative_l2

from ._trainers import need

transformers = need("transformers")
try:
    from mega_moe.integrations import transformers as switch
except RuntimeError as too_old:
    pytest.skip(str(too_old), allow_module_level=True)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TOKENS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    switch.register(DispatchConfig(backend="grouped"))
    yield
    switch.register()
    gc.collect()


def build(kind: str = "Qwen3Moe", implementation: str = "mega_moe", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, **changes}, experts_implementation=implementation
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "is_transposed")]


def buffer_of(model: nn.Module) -> Any:
    return experts_of(model)[0]._mega_moe_layer.shared.buffer


def train(model: nn.Module, tokens: Tensor = TOKENS) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3"])
def test_losses_and_gradients_are_those_of_grouped_mm(kind: str) -> None:
    model = build(kind, "grouped_mm")
    want, grads = train(model)
    model.set_experts_implementation("mega_moe")
    with count_op_calls() as calls:
        loss, got = train(model)
    assert dict(calls) == {"run": 2, "backward": 2}
    assert loss == pytest.approx(want, rel=1e-5)
    assert got.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative_l2(got[name], grad) < 1e-4, name


def test_from_pretrained_trains_generates_and_goes_back(tmp_path: Path) -> None:
    plain = build(implementation="grouped_mm").eval()
    plain.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="mega_moe"
    ).eval()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with count_op_calls() as calls:
        got = model.generate(TOKENS, **options)
    assert calls["run"] == 2 * 6
    assert torch.equal(got, plain.generate(TOKENS, **options))
    train(model)  # the buffer of a call in inference mode serves training
    model.set_experts_implementation("grouped_mm")
    with count_op_calls() as calls:
        model(TOKENS)
    assert not calls


def test_importing_the_package_registers_nothing() -> None:
    code = (
        "import mega_moe, mega_moe.integrations\n"
        "from transformers.integrations.moe import ExpertsInterface as known\n"
        "assert 'mega_moe' not in known()\n"
        "import mega_moe.integrations.transformers\n"
        "assert 'mega_moe' in known()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_limit_of_the_family_is_served() -> None:
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip("needs a transformers with DeepseekV4")
    model = build("DeepseekV4", "grouped_mm", swiglu_limit=0.5)
    want, grads = train(model)
    model.set_experts_implementation("mega_moe")
    loss, got = train(model)
    assert loss == pytest.approx(want, rel=1e-5)
    assert experts_of(model)[0]._mega_moe_layer.activation == Activation(clamp=0.5)
    for name, grad in grads.items():
        # Some of this family's gradients are zero but for rounding.
        assert (got[name] - grad).norm() < 1e-4 * grad.norm() + 1e-6, name


def test_autocast_and_bf16_compute_in_bf16_and_return_x_s_dtype() -> None:
    model = build()
    layer = experts_of(model)[0]
    x, ids, weights = torch.randn(8, 32), torch.randint(8, (8, 2)), torch.rand(8, 2)
    exact = layer(x, ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, ids, weights)
    assert y.dtype == torch.float32
    assert 1e-4 < relative_l2(y, exact) < 1e-2
    y = layer.bfloat16()(x, ids, weights)
    assert y.dtype == torch.float32
    assert 1e-4 < relative_l2(y, exact) < 1e-2


def test_ids_of_other_ranks_are_masked() -> None:
    layer = experts_of(build())[0]
    x, ids, weights = torch.randn(3, 32), torch.tensor([[0, 8], [8, 8], [7, 1]]), torch.rand(3, 2)
    with pytest.raises(ValueError, match="topk_idx"):
        layer(x, ids, weights)
    layer._is_expert_parallel = True
    got = layer(x, ids, weights)
    assert not got[1].any()
    layer._is_expert_parallel = False
    assert torch.equal(got, layer(x, ids.masked_fill(ids == 8, -1), weights))


def test_layers_share_one_buffer_that_grows_and_goes() -> None:
    model = build()
    assert not hasattr(experts_of(model)[0], "_mega_moe_layer")
    train(model)
    first = weakref.ref(buffer_of(model))
    assert len({id(m._mega_moe_layer.shared) for m in experts_of(model)}) == 1
    assert buffer_of(model).max_tokens_per_rank == 256
    loss = model(TOKENS, labels=TOKENS).loss
    model(torch.randint(3, 64, (2, 129)))
    assert buffer_of(model).max_tokens_per_rank == 512  # 1.5 times, in whole steps
    gc.collect()
    assert first() is not None, "a backward is still to come"
    loss.backward()
    del loss
    gc.collect()
    assert first() is None
    second = weakref.ref(buffer_of(model))
    del model
    gc.collect()
    assert second() is None


def test_a_checkpointed_step_across_growth() -> None:
    model = build()
    want = train(model)[1]
    layer, x = model.model.layers[0].mlp, torch.randn(2, 16, 32, requires_grad=True)
    layer(x).sum().backward()
    alone = x.grad.clone()
    x.grad = None
    y = checkpoint(layer, x, use_reentrant=False)
    model(torch.randint(3, 64, (2, 300)))
    y.sum().backward()
    assert relative_l2(x.grad, alone) < 1e-6
    again = train(model)[1]
    for name, grad in want.items():
        assert relative_l2(again[name], grad) < 1e-5, name


# The compiler asks every tensor that it meets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_graph_builds_nothing_and_keeps_what_it_used() -> None:
    model = build()
    layer = experts_of(model)[0]
    inputs = torch.randn(8, 32), torch.randint(8, (8, 2)), torch.rand(8, 2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(
        Exception, match=r"first call of so many tokens is in a compiled .*transformers\.reserve"
    ):
        compiled(*inputs)
    switch.reserve(model, 8)
    want = layer(*inputs)
    used = weakref.ref(buffer_of(model))
    y = compiled(*inputs)
    assert relative_l2(y, want) < 1e-6
    layer(torch.randn(300, 32), torch.randint(8, (300, 2)), torch.rand(300, 2))
    gc.collect()
    assert used() is not None
    y.sum().backward()
    assert relative_l2(compiled(*inputs), want) < 1e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_model_compiled_before_its_first_call_runs() -> None:
    model = build()
    with torch.no_grad():
        compiled = torch.compile(model.model.layers[0].mlp, backend="eager")
        x = torch.randn(2, 16, 32)
        first = compiled(x)
        with count_op_calls() as calls:
            assert relative_l2(compiled(x), first) < 1e-6
        assert dict(calls) == {"run": 1}
        assert relative_l2(model.model.layers[0].mlp(x), first) < 1e-6


def test_nothing_is_built_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts_of(build())[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured graph, where no buffer can be built"):
        layer(torch.randn(8, 32), torch.randint(8, (8, 2)), torch.rand(8, 2))


@pytest.mark.parametrize("copied", [copy.deepcopy, "pickle"])
def test_copies_get_a_buffer_with_their_own_first_call(copied: Any) -> None:
    model = build()
    want = model(TOKENS).logits
    if copied == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copied(model)
    with count_op_calls() as calls:
        assert torch.equal(twin(TOKENS).logits, want)
    assert dict(calls) == {"run": 2}


def test_it_says_once_which_backend_serves(caplog: pytest.LogCaptureFixture) -> None:
    switch._said.clear()
    with caplog.at_level(logging.WARNING, "mega_moe"):
        train(build())
        train(build())
    said = [record.getMessage() for record in caplog.records if "mega_moe" in record.name]
    assert len(said) == 1
    assert said[0].startswith("experts of transformers are served by mega_moe: grouped, since fused: refused")


def test_falling_back_is_said_with_the_reason() -> None:
    switch.register()
    with pytest.warns(FallbackWarning, match="grouped, since fused: refused") as said:
        train(build())
    assert len(said) == 1


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("GptOss", {"layer_types": None}, "has_bias is True, want False: no biases"),
        ("Qwen3Moe", {"hidden_act": "gelu"}, "is neither silu"),
        (
            "NemotronH",
            {"layers_block_type": ["moe", "moe"]},
            "has_gate is False, want True: a gate projection",
        ),
    ],
)
def test_a_refusal_has_the_reason(kind: str, changes: dict[str, Any], reason: str) -> None:
    if kind == "NemotronH":
        experts = transformers.models.nemotron_h.modeling_nemotron_h.NemotronHExperts
        made = transformers.NemotronHConfig(**{**SIZES, **changes}, experts_implementation="mega_moe")
        model: Any = nn.ModuleList([experts(made)])
        call = lambda: model[0](torch.randn(4, 32), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))  # noqa: E731
    else:
        model = build(kind, **changes)
        call = lambda: model(TOKENS)  # noqa: E731
    with pytest.raises(ValueError, match=f'experts_implementation="mega_moe" cannot serve it: .*{reason}'):
        call()


def test_another_implementation_computes_only_where_it_was_asked_to() -> None:
    model = build(hidden_act="gelu")
    model.set_experts_implementation("grouped_mm")
    want = model(TOKENS).logits
    model.set_experts_implementation("mega_moe")
    switch.register(DispatchConfig(backend="grouped"), otherwise="grouped_mm")
    with pytest.warns(
        UserWarning, match="Qwen3MoeExperts: .* is neither silu.*; grouped_mm computes them instead"
    ):
        assert torch.equal(model(TOKENS).logits, want)
    assert torch.equal(model(TOKENS).logits, want)  # and says so once a layer
    switch.register(DispatchConfig(backend="grouped"))
    with pytest.raises(ValueError, match="is neither silu"):
        model(TOKENS)


def test_fp8_experts_are_refused_by_name() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    with pytest.raises(ValueError, match="these are quantized to fp8: load them dequantized"):
        fp8.FP8ExpertsInterface()["mega_moe"](build())


def test_what_register_refuses() -> None:
    with pytest.raises(ValueError, match=r"layers: got \(0,\), want \"all\""):
        switch.register(DispatchConfig(layers=(0,)))
    with pytest.raises(ValueError, match=r"otherwise: got 'nope', want one of .*grouped_mm"):
        switch.register(otherwise="nope")
    with pytest.raises(ValueError, match="otherwise: got 'mega_moe'"):
        switch.register(otherwise="mega_moe")


def test_a_transformers_that_takes_no_other_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_its_own(self: Any, name: str) -> str:
        raise ValueError("not supported")

    monkeypatch.setattr(switch.PreTrainedModel, "get_correct_experts_implementation", only_its_own)
    with pytest.raises(
        RuntimeError, match=r"takes no experts implementation but its own: use 5\.7\.0 or later"
    ):
        switch.register()
