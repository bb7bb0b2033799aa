"""FSDP2 with expert parallelism on four ranks: clipping, AdamW, accumulation, mixed precision, checkpoints, compile."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mega_moe.integrations import clip_grad_norm_, convert, keep_moe_outputs, make_meshes, shard
from mega_moe.testing import count_op_calls, relative_l2

from ._ranks import shared_world
from ._trainers import GROUPED, Model, OwnAdapter

FOUR = shared_world(4)
TOKENS = 64  # of all ranks


def sharded(ep_size: int, *, gradients: Any = "sum", device: str = "cpu", **options: Any) -> nn.Module:
    meshes = make_meshes("cpu", ep_size)
    with torch.device(device):
        model = Model()
    model.done = convert(
        model,
        GROUPED,
        sequence_length=TOKENS,
        mesh=meshes.expert,
        adapters=[OwnAdapter()],
        device="cpu",
        **options,
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.get("dtype") else None
    shard(model, meshes, model.blocks, gradients=gradients, mp_policy=policy)
    return model


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 + step)
    return torch.randn(TOKENS, 32, generator=rng), torch.randn(TOKENS, 32, generator=rng)


def mine(rank: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(4)[rank]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model: nn.Module, x: Tensor, target: Tensor, count: int = TOKENS) -> Tensor:
    return (model(x) - target).square().sum() / count


def run_alone(steps: int, max_norm: float, fused: bool) -> tuple[dict[str, Tensor], list[float]]:
    """One process, unconverted, torch's own clipping."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}, norms


def train(rank: int, ep_size: int, fused: bool, gradients: str) -> None:
    steps, max_norm = 3, 0.5
    want, norms = run_alone(steps, max_norm, fused)
    model = sharded(ep_size, gradients=gradients)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
    for step in range(steps):
        optimizer.zero_grad()
        x, target = (mine(rank, t) for t in batch(step))
        # "sum": this rank's part of the global mean; "mean": the mean over its own tokens.
        loss_of(model, x, target, TOKENS if gradients == "sum" else len(x)).backward()
        for name, p in model.named_parameters():
            assert isinstance(p.grad, DTensor), name
            assert (p.grad.placements, p.grad.device_mesh) == (p.placements, p.device_mesh)
        if step == 0:
            with pytest.raises(RuntimeError, match="same mesh"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            top = clip_grad_norm_(model, 1e9, norm_type=math.inf)
            assert top.item() == pytest.approx(
                max(full(p.grad).abs().max() for p in model.parameters()).item()
            )
        norm = clip_grad_norm_(model.parameters(), max_norm)
        assert norm.item() == pytest.approx(norms[step], rel=1e-4)
        assert norm > max_norm
        assert clip_grad_norm_(model, max_norm).item() == pytest.approx(max_norm, rel=1e-3)
        optimizer.step()
    for name, p in model.named_parameters():
        assert p.shape == want[name].shape
        assert relative_l2(full(p), want[name]) < 1e-4, name


@pytest.mark.parametrize(
    ("ep_size", "fused", "gradients"),
    [(2, True, "mean"), (2, False, "sum"), (4, False, "mean"), (1, True, "mean")],
)
def test_training_is_that_of_one_process(ep_size: int, fused: bool, gradients: str) -> None:
    FOUR.values(train, ep_size, fused, gradients)


def offloaded(rank: int) -> None:
    """Shards and gradients on the CPU, without pinned memory, which a machine without a GPU has not."""
    want, _ = run_alone(1, 1e9, fused=False)
    meshes = make_meshes("cpu", 2)
    model = Model()
    convert(model, GROUPED, sequence_length=TOKENS, mesh=meshes.expert, adapters=[OwnAdapter()])
    shard(model, meshes, model.blocks, gradients="sum", offload_policy=CPUOffloadPolicy())
    states = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    assert len(states) == 5
    assert all(isinstance(state.offload_policy, CPUOffloadPolicy) for state in states if state is not None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    loss_of(model, *(mine(rank, t) for t in batch(0))).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert relative_l2(full(p), want[name]) < 1e-4, name


def test_the_offload_policy_is_passed_on() -> None:
    FOUR.values(offloaded)


def asleep(rank: int) -> None:
    """The switch undone and done again on shards: the parts stay, and so do the scales of their gradients."""
    model = sharded(4, gradients="mean")
    x, target = (mine(rank, t) for t in batch(0))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        loss_of(model, x, target, len(x)).backward()
        return {n: full(p.grad).clone() for n, p in model.named_parameters()}

    want = gradients()
    model.done.destroy()
    again = convert(
        model, GROUPED, sequence_length=2 * TOKENS, mesh=make_meshes("cpu", 4).expert, adapters=[OwnAdapter()]
    )
    assert again.buffers[0].max_tokens_per_rank == 2 * TOKENS
    got = gradients()
    for name, grad in want.items():
        assert relative_l2(got[name], grad) < 1e-6, name
    again.destroy()
    # Not through the model: FSDP does not get over an error in the middle of a forward.
    with pytest.raises(RuntimeError, match="spread over ranks and not served since destroy"):
        model.blocks[0].experts.forward(x, x, x)


def test_sharded_layers_sleep_and_wake() -> None:
    FOUR.values(asleep)


def not_finite(rank: int) -> None:
    model = sharded(2)
    loss_of(model, *(mine(rank, t) for t in batch())).backward()
    assert clip_grad_norm_([], 1.0).item() == 0
    # On one rank alone: all raise.
    if rank == 3:
        next(model.blocks[1].experts.parameters()).grad.to_local().view(-1)[0] = math.nan
    assert clip_grad_norm_(model, 1.0).isnan()
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="ep_size: got 3, want a divisor of the 4 ranks"):
        make_meshes("cpu", 3)


def test_a_norm_that_is_not_finite() -> None:
    FOUR.values(not_finite)


def few_rows(rank: int) -> None:
    """A matrix of two rows over four ranks, of which two hold nothing, alongside a plain one that all hold."""
    torch.manual_seed(0)
    alone, model, plain = (
        nn.Linear(8, 2, bias=False),
        nn.Linear(8, 2, bias=False),
        nn.Linear(8, 2, bias=False),
    )
    model.load_state_dict(alone.state_dict())
    fully_shard(model, mesh=make_meshes("cpu", 1).world)
    x = torch.randn(4, 8)
    alone(x).sum().backward()
    plain(x).square().sum().backward()
    (4 * model(x[rank : rank + 1]).sum()).backward()
    for norm_type in (1.0, 2.0, math.inf):
        want = torch.nn.utils.get_total_norm([alone.weight.grad, plain.weight.grad], norm_type)
        got = clip_grad_norm_([model.weight, plain.weight], 1e9, norm_type=norm_type)
        assert got.item() == pytest.approx(want.item(), rel=1e-5)


def test_ranks_without_a_row_of_a_matrix() -> None:
    FOUR.values(few_rows)


def accumulate(rank: int) -> None:
    """Three micro-batches, reduced once at the last or each: the sum of three separate backwards."""
    want: dict[str, Tensor] = {}
    alone = Model()
    for step in range(3):
        loss_of(alone, *batch(step)).backward()
    want = {n: p.grad for n, p in alone.named_parameters()}
    for once in (True, False):
        model = sharded(2)
        assert isinstance(model, FSDPModule)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2 or not once)
            loss_of(model, *(mine(rank, t) for t in batch(step))).backward()
        for name, p in model.named_parameters():
            assert relative_l2(full(p.grad), want[name]) < 1e-4, (name, once)


def test_accumulation() -> None:
    FOUR.values(accumulate)


def mixed(rank: int) -> None:
    """bf16 products and gathers, fp32 weights, gradients and reductions; as near to a bf16 model as roundings are."""
    alone = Model().bfloat16()
    loss_of(alone, *(t.bfloat16() for t in batch())).backward()
    model = sharded(2, dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    model.blocks[0].experts.register_forward_hook(
        lambda _m, args, out: seen.extend([args[0].dtype, out.dtype])
    )
    loss_of(model, *(mine(rank, t) for t in batch())).backward()
    assert seen == [torch.bfloat16] * 2
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        assert p.dtype == p.grad.dtype == torch.float32
        error = relative_l2(full(p.grad), q.grad)
        assert 1e-4 < error < 0.2, (name, error)  # a near tie of the router may flip


# The router's linear layer gives the norm bf16 input alongside weights that are gathered in bf16 as well.
def test_mixed_precision() -> None:
    FOUR.values(mixed)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions())
    return {"model": weights, "optimizer": moments}


def save(rank: int, ep_size: int, folder: str) -> dict[str, Tensor]:
    model = sharded(ep_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, *(mine(rank, t) for t in batch())).backward()
    optimizer.step()
    state = whole_state(model, optimizer)
    dcp_save(state, checkpoint_id=folder)
    return bytes_of(state)


def load(rank: int, ep_size: int, folder: str) -> dict[str, Tensor]:
    """Into a model whose weights were never set: built on the meta device."""
    model = sharded(ep_size, device="meta")
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = whole_state(model, optimizer)
    dcp_load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    got = bytes_of(whole_state(model, optimizer))
    loss_of(model, *(mine(rank, t) for t in batch(1))).backward()  # and it trains
    assert all(full(p.grad).isfinite().all() for p in model.parameters())
    return got


def bytes_of(state: dict[str, Any], name: str = "") -> dict[str, Tensor]:
    """Every tensor of a state, whole, by name."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= bytes_of(value, f"{name}.{key}")
        elif isinstance(value, Tensor):
            found[f"{name}.{key}"] = full(value).detach().clone()
    return found


# The last reader is no rank of any group, which torch tells although it was told so.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1)])
def test_a_checkpoint_of_one_ep_size_loads_at_another(saved: int, loaded: int, tmp_path: Path) -> None:
    want = FOUR.values(save, saved, str(tmp_path))[0]
    got = FOUR.values(load, loaded, str(tmp_path))[0]
    assert got.keys() == want.keys()
    assert len(want) > 30
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    # And in one process, unconverted: the checkpoint is the model's own.
    plain = Model(seed=5)
    weights = {"model": plain.state_dict()}
    dcp_load(weights, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in weights["model"].items():
        assert torch.equal(tensor, want[f".model.{name}"]), name


def recompute(rank: int, compiler: str | None) -> None:
    """Checkpointed, and compiled, blocks with experts inside: the same gradients, each layer's forward once."""
    x, target = (mine(rank, t) for t in batch())
    plain = sharded(2)
    loss_of(plain, x, target).backward()
    want = {n: full(p.grad) for n, p in plain.named_parameters()}
    model = sharded(2)
    for block in model.blocks:
        inner = block.forward
        if compiler is not None:
            block.forward = torch.compile(inner, backend=compiler)
        else:
            block.forward = partial(checkpoint, inner, use_reentrant=False)
    with count_op_calls() as calls, warnings.catch_warnings():
        # The compiler asks every tensor that it meets for its gradient.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute", category=UserWarning)
        loss_of(model, x, target).backward()
    assert dict(calls) == {"run": 2, "backward": 2}
    for name, p in model.named_parameters():
        assert relative_l2(full(p.grad), want[name]) < 1e-5, name


def test_checkpointed_blocks_run_each_layer_once() -> None:
    FOUR.values(recompute, None)


def test_compiled_blocks() -> None:
    FOUR.values(recompute, "aot_eager", limit=150)


@pytest.mark.parametrize(("keep", "forwards"), [(False, 2), (True, 1)])
def test_selective_checkpointing_keeps_the_output_of_the_layer(keep: bool, forwards: int) -> None:
    """A norm after the layer saves its input, so that full checkpointing runs the layer again."""
    model = Model(layers=1)
    convert(model, GROUPED, sequence_length=TOKENS, adapters=[OwnAdapter()])
    norm = nn.RMSNorm(32)

    def block(x: Tensor) -> Tensor:
        y: Tensor = norm(model.blocks[0](x))
        return y

    x, dy = batch()
    block(x).backward(dy)
    want = [p.grad.clone() for p in model.blocks.parameters()]
    model.zero_grad()
    options: dict[str, Any] = {"context_fn": keep_moe_outputs()} if keep else {}
    with count_op_calls() as calls:
        checkpoint(block, x, use_reentrant=False, **options).backward(dy)
    assert dict(calls) == {"run": forwards, "backward": 1}
    for p, grad in zip(model.blocks.parameters(), want):
        assert torch.equal(p.grad, grad)


def world_is_the_default(rank: int) -> None:
    assert make_meshes("cpu", 2).expert.get_local_rank() == rank % 2
    assert make_meshes("cpu", 2).data.get_local_rank() == rank // 2
    assert make_meshes("cpu", 4).world.size() == dist.get_world_size()


def test_neighbouring_ranks_share_the_experts() -> None:
    FOUR.values(world_is_the_default)
