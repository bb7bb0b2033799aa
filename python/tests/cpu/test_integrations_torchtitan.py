"""TorchTitan: its own MoE module, tiny and random, before and after it is switched."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_moe.integrations import LoadMeter, RoutingReplay, convert, make_meshes, shard
from mega_moe.testing import count_op_calls, relative_l2

from ._ranks import shared_world
from ._trainers import GROUPED, need

config_utils = need("torchtitan.models.common.config_utils")

# Its router asks a CPU for fp32 autocast, of which torch says that a CPU has none, and goes on in fp32.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")

DIM, HIDDEN, EXPERTS = 64, 32, 8


def build(**router: Any) -> nn.Module:
    torch.manual_seed(0)
    init = partial(nn.init.normal_, std=0.1)
    options = {"top_k": 2, "score_func": "softmax", "route_norm": True, **router}
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), init)
    config = config_utils.make_moe_config(
        num_experts=EXPERTS,
        router=config_utils.make_router_config(
            dim=DIM, num_experts=EXPERTS, gate_param_init={"weight": init}, **options
        ),
        routed_experts=config_utils.make_routed_experts_config(
            dim=DIM,
            hidden_dim=HIDDEN,
            num_experts=EXPERTS,
            top_k=options["top_k"],
            param_init=experts,
            comm_backend="standard",
        ),
    )
    made: nn.Module = config.build()
    made.init_states()  # type: ignore[operator]
    return made


def train(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, 32, DIM, generator=rng) for _ in range(2))
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return y.detach(), {**grads, "x": x.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "router", [{}, {"top_k": 1, "route_norm": False, "route_scale": 2.5}, {"score_func": "sigmoid"}]
)
def test_forward_and_backward_agree(router: dict[str, Any]) -> None:
    model = build(**router)
    want, grads = train(model)
    keys = list(model.state_dict())
    done = convert(model, GROUPED, sequence_length=64)
    assert done.layers == ("routed_experts",)
    with count_op_calls() as calls:
        got, after = train(model)
    assert dict(calls) == {"run": 1, "backward": 1}
    # Both compute in bf16 and differ in where they round: a weight before the down projection or after it.
    assert relative_l2(got, want) < 8e-3
    assert got.dtype == want.dtype
    assert after.keys() == grads.keys()
    for name, grad in grads.items():
        assert relative_l2(after[name], grad) < 1e-2, name
        assert after[name].dtype == grad.dtype
    assert list(model.state_dict()) == keys


def test_round_trip_through_an_unconverted_module() -> None:
    model = build()
    convert(model, GROUPED, sequence_length=64)
    train(model)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    plain = build()
    before = train(plain)[0]
    plain.load_state_dict(model.state_dict())
    want, got = train(model)[0], train(plain)[0]
    assert relative_l2(got, want) < 8e-3
    assert relative_l2(before, want) > 1e-1


def test_hooks_on_the_experts_fire() -> None:
    """FSDP2 gathers the experts' weights in such a hook."""
    model = build()
    convert(model, GROUPED, sequence_length=64)
    fired: list[str] = []
    inner = model.get_submodule("routed_experts.inner_experts")
    inner.register_forward_pre_hook(lambda *_: fired.append("before"))
    inner.register_forward_hook(lambda *_: fired.append("after"))
    train(model)
    assert fired == ["before", "after"]


def test_another_kind_of_experts_is_refused() -> None:
    model = build()
    inner = model.get_submodule("routed_experts.inner_experts")
    inner.__class__ = type("MXFP8GroupedExperts", (type(inner),), {})
    with pytest.raises(ValueError, match="its experts are MXFP8GroupedExperts, want GroupedExperts"):
        convert(model, GROUPED, sequence_length=64)


@pytest.mark.parametrize("router", [{}, {"route_scale": 2.5}, {"score_func": "sigmoid"}])
def test_routing_replay_and_load(router: dict[str, Any]) -> None:
    model = build(**router)
    convert(model, GROUPED, sequence_length=64)
    replay, meter = RoutingReplay(model), LoadMeter(model)
    with replay.record() as layers:
        want, _ = train(model)
    ((ids,),) = layers
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert torch.equal(meter.tokens_per_expert, counts[None])
    assert meter.max_over_mean().item() == pytest.approx(counts.max().item() / counts.double().mean().item())
    with replay.replay([ids]):
        assert relative_l2(train(model)[0], want) < 1e-6
    with replay.replay([(ids + 1) % EXPERTS]):
        other, grads = train(model)
    assert relative_l2(other, want) > 1e-2
    assert grads["router.gate.weight"].any()


def test_copies_are_told_apart() -> None:
    model = build()
    convert(model, GROUPED, sequence_length=64)
    twin = copy.deepcopy(model)
    want, _ = train(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    assert torch.equal(train(model)[0], want)
    assert not torch.equal(train(twin)[0], want)


def spread(rank: int) -> None:
    """EP = 2 alongside two data ranks: the gradients of the whole batch, each a tensor of the parameter's own shape."""
    warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
    alone = build()
    rng = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(4, 16, DIM, generator=rng) for _ in range(2))
    want = alone(x)
    want.backward(dy)
    meshes = make_meshes("cpu", 2)
    model = build()
    convert(model, GROUPED, sequence_length=16, mesh=meshes.expert)
    shard(model, meshes, [], gradients="sum")
    y = model(x[rank : rank + 1])
    y.backward(dy[rank : rank + 1])
    assert relative_l2(y, want[rank : rank + 1]) < 8e-3
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        assert p.grad.shape == q.shape, name
        assert relative_l2(p.grad.full_tensor(), q.grad) < 1e-2, name


def test_spread_over_ranks() -> None:
    shared_world(4).values(spread, limit=150)
