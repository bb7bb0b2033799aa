"""A converted Qwen3MoE of transformers on a GPU: it trains like the unconverted one, within the noise of one ulp."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_moe.integrations import DispatchConfig, LoadMeter, RoutingReplay, convert
from mega_moe.testing import count_op_calls, relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::FutureWarning")]
transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, VOCAB = 50, 4, 128, 256


def build(device: torch.device, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": VOCAB,
        "norm_topk_prob": True,
        "experts_implementation": "eager",
    }
    model: nn.Module = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**sizes, **changes}))
    return model.to(device)


def tokens(device: torch.device, step: int) -> Tensor:
    """One of four batches, so that there is something to learn: sequences that repeat a short pattern each."""
    rng = torch.Generator().manual_seed(step % 4)
    pattern = torch.randint(VOCAB, (BATCH, 8), generator=rng)
    return pattern.repeat(1, LENGTH // 8).to(device)


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """Every weight one ulp of fp32 away, up or down."""
    rng = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            up = torch.rand(p.shape, generator=rng, device=p.device) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, p + 1, p - 1)))
    return model


def losses(model: nn.Module, device: torch.device, steps: int) -> Tensor:
    """Of AdamW over fp32 weights, products in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        batch = tokens(device, step)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach().float())
    return torch.stack(found).cpu()


def trains_alike(device: torch.device, backend: str, steps: int, **changes: Any) -> None:
    model = build(device, **changes)
    plain = losses(copy.deepcopy(model), device, steps)
    others = torch.stack([losses(nudged(copy.deepcopy(model), seed), device, steps) for seed in (1, 2, 3)])
    config = DispatchConfig(backend=backend, num_reserved_sms=0)
    done = convert(model, config, sequence_length=BATCH * LENGTH, dtype=torch.bfloat16, device=device)
    assert {buffer.backend for buffer in done.buffers} == {backend}
    with count_op_calls() as calls:
        converted = losses(model, device, steps)
    layers = len(done.layers)
    assert dict(calls) == {"run": layers * steps, "backward": layers * steps}
    assert plain[-1] < 0.7 * plain[0], plain
    # How far runs drift apart that differ by one ulp at the start; the converted one may drift as far, and twice, since
    # three runs only sample it.
    noise = (others - plain).abs().amax()
    assert (converted - plain).abs().amax() <= 2 * noise + 5e-3, (plain, converted, noise)
    done.destroy()


@pytest.mark.parametrize("backend", ["fused", "grouped"])
def test_fifty_steps_like_the_unconverted_model(backend: str, cuda_device: torch.device) -> None:
    trains_alike(cuda_device, backend, STEPS)


@pytest.mark.parametrize("backend", ["fused", "grouped"])
def test_forward_and_backward_agree(backend: str, cuda_device: torch.device) -> None:
    model = build(cuda_device).bfloat16()
    batch = tokens(cuda_device, 0)
    out = model(batch, labels=batch, use_cache=False)
    out.loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    convert(model, DispatchConfig(backend=backend, num_reserved_sms=0), sequence_length=BATCH * LENGTH)
    replay = RoutingReplay(model)
    with replay.record() as layers:
        got = model(batch, labels=batch, use_cache=False)
    assert relative_l2(got.logits, out.logits) < 3e-2
    got.loss.backward()
    for name, grad in want.items():
        assert relative_l2(model.get_parameter(name).grad, grad) < 0.15, name  # type: ignore[arg-type]
    with replay.replay([ids for (ids,) in layers]):
        again = model(batch, use_cache=False)
    assert relative_l2(again.logits, got.logits) < 1e-2


def test_full_checkpointing_runs_each_layer_once(cuda_device: torch.device) -> None:
    model = build(cuda_device).bfloat16()
    done = convert(
        model, DispatchConfig(num_reserved_sms=0, backend="grouped"), sequence_length=BATCH * LENGTH
    )
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    batch = tokens(cuda_device, 0)
    with count_op_calls() as calls:
        model(batch, labels=batch, use_cache=False).loss.backward()
    assert dict(calls) == {"run": len(done.layers), "backward": len(done.layers)}


def test_the_load_is_counted_without_a_wait(cuda_device: torch.device) -> None:
    model = build(cuda_device).bfloat16()
    done = convert(
        model, DispatchConfig(num_reserved_sms=0, backend="grouped"), sequence_length=BATCH * LENGTH
    )
    meter = LoadMeter(model)
    ids = torch.randint(-1, 16, (512, 4), device=cuda_device)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            meter._count(1, ids)
            ratio = meter.max_over_mean()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts = torch.bincount(ids[ids >= 0], minlength=16)
    assert torch.equal(meter.tokens_per_expert[1], counts)
    assert ratio[1].item() == pytest.approx((counts.max() / counts.double().mean()).item())
    assert len(meter.tokens_per_expert) == len(done.layers)
