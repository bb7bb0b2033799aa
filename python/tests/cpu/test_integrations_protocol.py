"""Any module through the small protocol: what is switched, what stays, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_moe import BackendRefusedError, FallbackWarning
from mega_moe.integrations import Converted, DispatchConfig, LoadMeter, convert, find
from mega_moe.testing import count_op_calls, relative_l2

from ._trainers import GROUPED, Experts, Model, OwnAdapter


def switched(model: nn.Module, config: DispatchConfig = GROUPED, **options: object) -> Converted:
    return convert(model, config, adapters=[OwnAdapter()], **{"sequence_length": 64, **options})  # type: ignore[arg-type]


def train(model: nn.Module, seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(64, 32, generator=rng) for _ in range(2))
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_forward_and_backward_agree_and_names_stay() -> None:
    model = Model()
    want, grads = train(model)
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    done = switched(model)
    assert done.layers == ("blocks.0.experts", "blocks.1.experts")
    assert done.kept == ()
    assert len(done.buffers) == 1
    assert done.reason.startswith("grouped")
    with count_op_calls() as calls:
        got, after = train(model)
    assert dict(calls) == {"run": 2, "backward": 2}
    assert relative_l2(got, want) < 1e-5
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert after.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative_l2(after[name], grad) < 1e-4, name
    assert isinstance(model.blocks[0].experts, Experts)


def test_round_trip_through_an_unconverted_model() -> None:
    model = Model()
    switched(model)
    train(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    plain = Model(seed=7)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(64, 32)
    assert relative_l2(plain(x), model(x)) < 1e-5
    assert relative_l2(plain(x), Model()(x)) > 1e-2


def test_a_copy_has_weights_of_its_own() -> None:
    model = Model()
    switched(model)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 32)
    before = model(x)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)


# The compiler asks every tensor that it meets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_converted_block_is_one_graph_to_the_compiler() -> None:
    model = Model(layers=1)
    switched(model)
    want, grads = train(model)
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    with count_op_calls() as calls:
        got, after = train(model)
    assert dict(calls) == {"run": 1, "backward": 1}
    assert relative_l2(got, want) < 1e-5
    for name, grad in grads.items():
        assert relative_l2(after[name], grad) < 1e-4, name


def test_frozen_weights_stay_frozen() -> None:
    model = Model()
    model.blocks[0].experts.gate_up_proj.requires_grad_(False)
    _, want = train(model)
    switched(model)
    _, got = train(model)
    assert got.keys() == want.keys()


def test_autocast_computes_in_its_dtype_and_returns_x_s() -> None:
    model = Model()
    switched(model)
    h = torch.randn(16, 32)
    weights, ids = torch.rand(16, 2), torch.randint(0, 8, (16, 2))
    with torch.autocast("cpu", torch.bfloat16):
        y = model.blocks[0].experts(h, ids, weights)
    assert y.dtype == torch.float32
    exact = Experts.forward(model.blocks[0].experts, h, ids, weights)
    assert 1e-4 < relative_l2(y, exact) < 1e-2


@pytest.mark.parametrize(("reentrant", "forwards"), [(None, 1), (False, 1), (True, 2)])
def test_the_load_is_counted_once_a_step(reentrant: bool | None, forwards: int) -> None:
    """Whatever runs twice, and not in evaluation."""
    model = Model()
    switched(model)
    meter = LoadMeter(model)
    with torch.no_grad():
        model(torch.randn(64, 32))
    assert not meter.tokens_per_expert.any()
    for block in model.blocks if reentrant is not None else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    with count_op_calls() as calls:
        train(model)
    assert dict(calls) == {"run": 2 * forwards, "backward": 2}
    assert meter.tokens_per_expert.sum(1).tolist() == [128, 128]
    assert (meter.max_over_mean() >= 1).all()
    meter.close()
    train(model)
    assert meter.tokens_per_expert.sum(1).tolist() == [128, 128]


def test_masked_slots_are_no_load() -> None:
    model = Model(layers=1)
    switched(model)
    meter = LoadMeter(model)
    ids = torch.tensor([[0, -1], [3, 3], [-1, -1]])
    x = torch.randn(3, 32, requires_grad=True)
    model.blocks[0].experts(x, ids, torch.rand(3, 2)).sum().backward()
    assert meter.tokens_per_expert.tolist() == [[1, 0, 0, 2, 0, 0, 0, 0]]


def test_some_layers_only() -> None:
    model = Model(layers=4)
    done = switched(model, DispatchConfig(backend="grouped", layers=(0, 2)))
    assert done.layers == ("blocks.0.experts", "blocks.2.experts")
    assert done.kept == ("blocks.1.experts", "blocks.3.experts")
    with count_op_calls() as calls:
        train(model)
    assert dict(calls) == {"run": 2, "backward": 2}


def test_layers_of_two_sizes_get_two_buffers() -> None:
    model = Model()
    model.blocks[1].experts = Experts(8, 2, 32, 24)
    done = switched(model)
    assert [buffer.intermediate for buffer in done.buffers] == [16, 24]
    train(model)
    done.destroy()
    for buffer in done.buffers:
        with pytest.raises(RuntimeError, match="destroyed"):
            _ = buffer._live().handle


class Refusing(OwnAdapter):
    def refusals(self, module: nn.Module) -> list[str]:
        return ["first reason", "second reason"]


def unchanged(model: nn.Module, call: Callable[[], object], error: type[Exception], match: str) -> None:
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(error, match=match):
        call()
    assert [type(m) for m in model.modules()] == kinds


def test_a_refusal_has_every_reason_and_changes_nothing() -> None:
    model = Model()
    reasons = r"blocks\.0\.experts \(Experts\): first reason\n.*second reason\n.*blocks\.1\.experts"
    unchanged(
        model, lambda: convert(model, GROUPED, sequence_length=64, adapters=[Refusing()]), ValueError, reasons
    )
    unchanged(
        model, lambda: switched(model, sequence_length=None), ValueError, "max_tokens_per_rank: not set"
    )
    unchanged(
        model,
        lambda: convert(model, GROUPED, sequence_length=64),
        ValueError,
        r"no MoE layer of a known family .*_trainers\.Experts may be experts, but have neither gate_up_proj",
    )
    unchanged(
        model,
        lambda: switched(model, DispatchConfig(backend="fused")),
        BackendRefusedError,
        "needs an NVIDIA GPU, the device is cpu",
    )
    unchanged(
        model,
        lambda: switched(model, DispatchConfig(strict=True)),
        BackendRefusedError,
        "strict mode forbids",
    )
    dense = torch.nn.Linear(2, 2)
    unchanged(
        dense,
        lambda: convert(dense, GROUPED, sequence_length=64),
        ValueError,
        r"no module of it holds weights \[experts",
    )
    assert [site.name for site in find(model, [OwnAdapter()])] == ["blocks.0.experts", "blocks.1.experts"]
    switched(model)
    with pytest.raises(ValueError, match="is switched already"):
        switched(model)


def test_a_second_size_that_is_refused_gives_the_first_buffer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from mega_moe.integrations import conversion as module

    built = []

    class Watched(module.MoEBuffer):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            built.append(self)

    monkeypatch.setattr(module, "MoEBuffer", Watched)
    model = Model()
    model.blocks[1].experts = Experts(8, 17, 32, 16)
    with pytest.raises(ValueError, match="top_k: got 17"):
        switched(model)
    (buffer,) = built
    with pytest.raises(RuntimeError, match="destroyed"):
        _ = buffer._live().handle


def test_what_is_asked_of_fp8_is_the_buffers() -> None:
    config = DispatchConfig("fp8", backend="reference", dw_precision="fp8", scale_format="power_of_two")
    (buffer,) = switched(Model(hidden=128, inner=128), config).buffers
    assert (buffer.dw_precision, buffer.scale_format) == ("fp8", "power_of_two")


def test_falling_back_is_said_once() -> None:
    with pytest.warns(FallbackWarning, match="since fused: refused"):
        switched(Model(inner=40), DispatchConfig())


def test_more_tokens_than_the_buffer_holds() -> None:
    model = Model()
    switched(model, DispatchConfig(backend="grouped", max_tokens_per_rank=32))
    with pytest.raises(ValueError, match="got 64 tokens, the buffer was built for 32"):
        model(torch.randn(64, 32))
