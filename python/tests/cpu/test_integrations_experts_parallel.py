"""transformers' own expert parallelism over this library, on two gloo ranks, held against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mega_moe.integrations import DispatchConfig
from mega_moe.testing import count_op_calls, relative_l2

from ._ranks import shared_world
from ._trainers import need

transformers = need("transformers")
door = pytest.importorskip("transformers.distributed.expert_parallel", reason="needs its expert parallelism")
if not hasattr(door, "EPImplementationInterface"):
    pytest.skip("needs a transformers with EPImplementationInterface", allow_module_level=True)

TWO = shared_world(2)


def experts(hidden_act: str = "silu") -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        hidden_act=hidden_act,
        experts_implementation="grouped_mm",
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts(config)
    for p in model.parameters():
        nn.init.normal_(p, 0, p.shape[-1] ** -0.5)
    return model


def batch(rank: int, tokens: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 32, generator=rng).requires_grad_()
    ids = torch.randint(8, (tokens, 2), generator=rng)
    return [x, ids, torch.rand(tokens, 2, generator=rng).requires_grad_()]


def spread(model: nn.Module, implementation: str, *, shared: bool) -> nn.Module:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    plan = {
        "experts.gate_up_proj": "grouped_gemm",
        "experts.down_proj": "grouped_gemm",
        "experts": "ep_dispatch_experts",
    }
    tp_mesh = grid["ep"] if shared else grid["tp"]
    made: nn.Module = door.apply_expert_parallelism(
        model, grid["ep"], tp_mesh, plan, ep_implementation=implementation
    )
    return made


def check(rank: int, shared: bool, implementation: str, backend: str) -> None:
    from mega_moe.integrations import transformers as switch

    switch.register(DispatchConfig(backend=backend))
    # Of one batch each rank takes its rows, of which the first gets one more.
    batches = [batch(0, 7)] if shared else [batch(0, 7), batch(1, 4)]
    alone = experts()
    for each in batches:
        y = alone.experts(*each)
        y.backward(torch.ones_like(y))
    model = experts()
    if implementation == "all_to_all":
        model.experts.config._experts_implementation = "mega_moe"
    spread(model, implementation, shared=shared)
    mine = batch(0 if shared else rank, 7 if shared or rank == 0 else 4)
    with count_op_calls() as calls:
        y = model.experts(*mine)
        y.backward(torch.ones_like(y))
    assert dict(calls) == {"run": 1, "backward": 1}
    reference = batches[0 if shared else rank]
    with torch.no_grad():
        assert relative_l2(y, alone.experts(*reference)) < 1e-5
    assert relative_l2(mine[0].grad, reference[0].grad) < 1e-5
    assert relative_l2(mine[2].grad, reference[2].grad) < 1e-5
    for name, p in model.named_parameters():
        want = alone.get_parameter(name).grad.chunk(2)[rank]
        assert relative_l2(p.grad.to_local(), want) < 1e-5, name


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_travel_inside_the_layer(shared: bool) -> None:
    TWO.values(check, shared, "mega_moe", "grouped")


def test_the_switch_serves_its_own_exchange_too() -> None:
    TWO.values(check, False, "all_to_all", "grouped")


def more_tokens(rank: int) -> None:
    from mega_moe import PeerError
    from mega_moe.integrations import transformers as switch

    switch.register(DispatchConfig(backend="grouped"))
    model = spread(experts(), "mega_moe", shared=False)
    with torch.no_grad():
        model.experts(*batch(rank, 10 * rank))
        # The most of any rank, in whole steps.
        model.experts(*batch(rank, 256))
        told = r"got 257 tokens.*: give register\(\) a DispatchConfig\(max_tokens_per_rank=\)"
        with pytest.raises(ValueError if rank else PeerError, match=told if rank else None):
            model.experts(*batch(rank, 256 + rank))
        switch.register(DispatchConfig(backend="grouped", max_tokens_per_rank=300))
        wide = spread(experts(), "mega_moe", shared=False)
        wide.experts(*batch(rank, 257))
        # What was built before goes on with its own.
        model.experts(*batch(rank, 3))


def test_more_tokens_than_the_first_call_had_are_refused() -> None:
    TWO.values(more_tokens)


def refused(rank: int) -> None:
    from mega_moe.integrations import transformers as switch

    switch.register()
    with pytest.raises(
        ValueError, match=r'Qwen3MoeExperts: ep_implementation="mega_moe" cannot serve it: .*silu'
    ):
        spread(experts("gelu"), "mega_moe", shared=False)


def test_a_refusal_comes_before_anything_runs() -> None:
    TWO.values(refused)
