"""TorchTitan by its own means: its configuration, our override, its parallelization and model, over two gloo ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mega_moe.testing import count_op_calls, relative_l2

from ._ranks import shared_world
from ._trainers import need

need("torchtitan.config.override")

LAYERS, DIM, EXPERTS, SEQUENCE, BATCH, VOCABULARY = 2, 64, 8, 32, 2, 128
OVERRIDE = "mega_moe.integrations.torchtitan_trainer.routed_experts"

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")


def trainer_config(ep: int, imports: list[Any], **compiled: Any) -> Any:
    """The trainer's configuration for a tiny Qwen3 MoE, as its command line would make it."""
    from torchtitan.config.override import OverrideConfig
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    model = config.model_spec.model
    layers = _build_qwen3_moe_layers(
        n_layers=LAYERS,
        dim=DIM,
        n_heads=2,
        n_kv_heads=2,
        head_dim=32,
        moe_hidden_dim=32,
        num_experts=EXPERTS,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=32, max_seq_len=SEQUENCE, theta=10_000.0),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU to train
    for part in (model.tok_embeddings, model.lm_head, model.norm):
        for name, value in (
            ("num_embeddings", VOCABULARY),
            ("embedding_dim", DIM),
            ("in_features", DIM),
            ("out_features", VOCABULARY),
            ("normalized_shape", DIM),
        ):
            if hasattr(part, name):
                setattr(part, name, value)
    model.dim, model.vocab_size, model.layers = DIM, VOCABULARY, layers
    config.training.seq_len, config.training.local_batch_size = SEQUENCE, BATCH
    config.parallelism.expert_parallel_degree = ep
    config.parallelism.spmd_backend = "partial_dtensor"
    config.override = OverrideConfig(imports=imports)
    for name, value in compiled.items():
        setattr(config.compile, name, value)
    return config


def build(config: Any, world: int) -> nn.Module:
    """The steps of its trainer between configuration and the first batch, for a CPU."""
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    spec = config.model_spec
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model: nn.Module = spec.model.build()
    set_spmd_backend(config.parallelism.spmd_backend)
    dims = ParallelDims.from_config(config.parallelism, world)
    dims.build_mesh()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=None)  # type: ignore[operator]
    return model.train()


def steps(model: nn.Module, rank: int, number: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, and this rank's gradients of the first, gate and up rows as one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(rank)
    losses, grads = [], {}
    for step in range(number):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=rng)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if step == 0:
            grads = {
                name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for name in [name for name in grads if name.endswith("w1_EFD")]:
        halves = [grads.pop(name), grads.pop(name.replace("w1_EFD", "w3_EFD"))]
        grads[name.replace("w1_EFD", "gate_up_EGD")] = torch.cat(halves, dim=1)
    return losses, grads


def local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def as_on_a_cpu() -> None:
    import torchtitan.distributed.parallel_dims as dims

    dims.device_type = "cpu"  # it takes a machine without an accelerator for one with CUDA
    for message in ("In CPU autocast", "DTensor random operators", "The .grad attribute of a Tensor"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def same_losses(rank: int, ep: int, settings: dict[str, Any], **compiled: Any) -> dict[str, int]:
    as_on_a_cpu()
    torch.manual_seed(0)
    plain = build(trainer_config(ep, []), 2)
    ours = build(trainer_config(ep, [(OVERRIDE, settings)], **compiled), 2)
    assert not [name for name, _ in ours.named_parameters() if name.endswith("w1_EFD")]
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    ours.load_state_dict(state)
    back = ours.state_dict()
    assert list(back) == list(state)
    assert [name for name in state if not torch.equal(local(back[name]), local(state[name]))] == []
    want, want_grads = steps(plain, rank)
    with count_op_calls() as calls:
        got, grads = steps(ours, rank)
    assert got == pytest.approx(want, abs=2e-3)
    assert want[0] != want[-1]
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        # The router's is a difference of sums that both round to bf16: 2.1e-2 was seen.
        assert relative_l2(grad, want_grads[name]) < 4e-2, name
    return dict(calls)


@pytest.mark.parametrize("ep", [1, 2])
def test_same_losses_over_two_ranks(ep: int) -> None:
    """EP, FSDP2, selective activation checkpointing and state dicts, all TorchTitan's and torch's own."""
    for calls in shared_world(2).values(same_losses, ep, {"backend": "grouped"}, limit=200):
        assert calls["backward"] == 3 * LAYERS
        assert calls["run"] >= 3 * LAYERS


def compiled(rank: int) -> None:
    # EP = 1: with EP = 2 torch 2.13 cannot compile TorchTitan's own blocks either.
    settings = {"backend": "grouped", "max_tokens_per_rank": BATCH * SEQUENCE}
    same_losses(rank, 1, settings, enable=True, components=["model"], backend="aot_eager")
    unsized = build(trainer_config(1, [OVERRIDE], enable=True, components=["model"], backend="aot_eager"), 2)
    with pytest.raises(Exception, match=r"max_tokens_per_rank: got None under torch\.compile"):
        steps(unsized, rank, 1)


def test_compiled_blocks_over_two_ranks() -> None:
    shared_world(2).values(compiled, limit=250)


def tensor_parallel(rank: int) -> None:
    as_on_a_cpu()
    config = trainer_config(1, [OVERRIDE])
    config.parallelism.tensor_parallel_degree = 2
    with pytest.raises(ValueError, match="tensor_parallel_degree: got 2 with expert_parallel_degree 1"):
        build(config, 2)


def test_sharding_inside_an_expert_is_refused() -> None:
    shared_world(2).values(tensor_parallel)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precison": "fp8"}, "precison: no such setting, want precision, "),
        ({"precision": "fp7"}, "precision: got 'fp7', want one of bf16"),
        ({"layers": "50%"}, "layers: no such setting"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    from torchtitan.config.override import apply_overrides

    config = trainer_config(1, [(OVERRIDE, settings)])
    with pytest.raises(ValueError, match=message):
        apply_overrides(config.override, config)


def test_experts_of_another_kind_are_refused() -> None:
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    from mega_moe.integrations.torchtitan_trainer import routed_experts

    class Low(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    config = RoutedExperts.Config(
        inner_experts=Low.Config(dim=64, hidden_dim=32, num_experts=8), token_dispatcher=None
    )
    with pytest.raises(ValueError, match=r"inner_experts: got .*Low\.Config, want GroupedExperts\.Config"):
        routed_experts(config)
