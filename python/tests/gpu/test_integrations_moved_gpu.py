"""On GPUs: models that were moved after the switch, layers on two devices, masked replay, transformers' own switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_moe.integrations import DispatchConfig, LoadMeter, RoutingReplay, convert
from mega_moe.testing import count_op_calls, relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::FutureWarning")]
transformers = pytest.importorskip("transformers")

BACKENDS = ["fused", "grouped"]


def build(kind: str = "Qwen3Moe", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "experts_implementation": "eager",
    }
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    )
    return model.bfloat16()


def tokens(device: torch.device, length: int = 64) -> Tensor:
    return torch.randint(64, (1, length), generator=torch.Generator().manual_seed(0)).to(device)


def train(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(batch, labels=batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Each is a few roundings to bf16 from the exact one."""
    assert relative_l2(got[0], want[0]) < 3e-2
    for name, grad in want[1].items():
        assert relative_l2(got[1][name], grad) < 0.15, name


@pytest.mark.filterwarnings("ignore::mega_moe.FallbackWarning")
def test_converted_on_the_cpu_and_moved_to_the_gpu(cuda_device: torch.device) -> None:
    model, plain = build(), build().to(cuda_device)
    want = train(plain, tokens(cuda_device))
    done = convert(model, DispatchConfig(num_reserved_sms=0), sequence_length=64)
    meter = LoadMeter(model)
    model(tokens(torch.device("cpu")))
    model.to(cuda_device)
    with count_op_calls() as calls:
        agree(train(model, tokens(cuda_device)), want)
    assert dict(calls) == {"run": 2, "backward": 2}
    assert [buffer.device for buffer in done.buffers] == [torch.device("cpu"), cuda_device]
    assert done.buffers[1].backend == "fused"
    assert meter.tokens_per_expert.device == cuda_device
    assert meter.tokens_per_expert.sum(1).tolist() == [128, 128]
    done.destroy()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_on_two_devices_have_a_buffer_each(backend: str, cuda_devices: list[torch.device]) -> None:
    first, second = cuda_devices[:2]
    experts = build().model.layers
    model = nn.ModuleList([experts[0].mlp.experts.to(first), experts[1].mlp.experts.to(second)])
    twin = [layer.mlp.experts for layer in build().model.layers]
    done = convert(model, DispatchConfig(backend=backend, num_reserved_sms=0), sequence_length=64)
    assert [buffer.device for buffer in done.buffers] == [first, second]
    x, ids, weights = torch.randn(64, 256).bfloat16(), torch.randint(8, (64, 2)), torch.rand(64, 2)
    for device, layer, plain in zip((first, second), model, twin):
        got = layer(x.to(device), ids.to(device), weights.to(device))
        assert relative_l2(got.cpu(), plain(x, ids, weights.bfloat16())) < 3e-2
    done.destroy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Glm4Moe"])
def test_ids_without_a_record_are_masked(backend: str, kind: str, cuda_device: torch.device) -> None:
    changes = {"n_routed_experts": 8, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5}
    model = build(kind, **(changes if kind == "Glm4Moe" else {})).to(cuda_device)
    convert(model, DispatchConfig(backend=backend, num_reserved_sms=0), sequence_length=64)
    replay, batch = RoutingReplay(model), tokens(cuda_device)
    with replay.record() as layers:
        want = model(batch, use_cache=False).logits
    given = [ids.clone() for (ids,) in layers]
    with replay.replay(given):
        assert relative_l2(model(batch, use_cache=False).logits, want) < 1e-2
    for ids in given:
        ids[-1] = -1
        ids[5, 0] = -1
    with replay.replay(given):
        _, grads = train(model, batch)
    torch.cuda.synchronize()
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sleep_gives_the_memory_back(backend: str, cuda_device: torch.device) -> None:
    model = build().to(cuda_device)
    config = DispatchConfig(backend=backend, num_reserved_sms=0)
    train(model, tokens(cuda_device))
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    done = convert(model, config, sequence_length=4096)
    want = train(model, tokens(cuda_device))[0]  # the gradients' copies are memory too
    done.destroy()
    model.zero_grad()
    del done
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    convert(model, config, sequence_length=8192)
    got, _ = train(model, tokens(cuda_device))
    assert relative_l2(got, want) < 1e-2


@pytest.fixture
def switch(cuda_device: torch.device) -> Iterator[Any]:
    from mega_moe.integrations import transformers as module

    yield module
    module.register()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_transformers_switch(backend: str, kind: str, switch: Any, cuda_device: torch.device) -> None:
    changes = {"num_local_experts": 8} if kind == "Mixtral" else {}
    model = build(kind, **changes).to(cuda_device)
    model.set_experts_implementation("grouped_mm")
    want = train(model, tokens(cuda_device))
    switch.register(DispatchConfig(backend=backend, num_reserved_sms=0))
    model.set_experts_implementation("mega_moe")
    with count_op_calls() as calls:
        agree(train(model, tokens(cuda_device)), want)
    assert dict(calls) == {"run": 2, "backward": 2}
    made = model.generate(tokens(cuda_device, 8), max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 12)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_graph_keeps_its_buffer_when_a_larger_one_comes(
    switch: Any, cuda_device: torch.device
) -> None:
    switch.register(DispatchConfig(backend="fused", num_reserved_sms=0))
    model = build().to(cuda_device)
    model.set_experts_implementation("mega_moe")
    layer = model.model.layers[0].mlp.experts
    x = torch.randn(64, 256, device=cuda_device, dtype=torch.bfloat16)
    ids, weights = torch.randint(8, (64, 2), device=cuda_device), torch.rand(64, 2, device=cuda_device)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="no buffer can be built"), torch.cuda.graph(graph):
            layer(x, ids, weights)
        torch.cuda.synchronize()
        switch.reserve(model, 64)
        want = layer(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, ids, weights)
        layer(x.repeat(16, 1), ids.repeat(16, 1), weights.repeat(16, 1))
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, want)
