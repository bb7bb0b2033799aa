"""Spread experts inside what a trainer puts around them: hooks, DDP, checkpointing, compilation, many buffers."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mega_moe
from mega_moe import MegaMoEError, MoEBuffer
from mega_moe.testing import Gradients, Problem, count_op_calls, random_problem, relative_l2

from ._ep import Case, gap, of_rank, part, single, spread_buffer
from ._layer import assert_same_bits, make_buffer, results
from ._ranks import shared_world

TWO, FOUR = shared_world(2), shared_world(4)


class Model(nn.Module):
    """Layers of router, experts and residual sum; every rank draws all experts alike and keeps its own."""

    def __init__(self, buffer: MoEBuffer, layers: int = 2) -> None:
        super().__init__()
        experts, local = buffer.num_experts, buffer.num_local_experts
        mine = slice(buffer.rank * local, (buffer.rank + 1) * local)
        self.routers, self.experts = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers):
            torch.manual_seed(layer)
            self.routers.append(nn.Linear(buffer.hidden, experts, bias=False))
            whole = mega_moe.nn.MegaMoE(buffer.hidden, buffer.intermediate, experts)
            own = mega_moe.nn.MegaMoE(buffer.hidden, buffer.intermediate, local, buffer=buffer)
            with torch.no_grad():
                own.gate_up_proj.copy_(whole.gate_up_proj[mine])
                own.down_proj.copy_(whole.down_proj[mine])
            self.experts.append(own)
        self.top_k = buffer.top_k

    def forward(self, x: Tensor, only: int | None = None) -> Tensor:
        """``only``: every slot names an expert below this number."""
        for router, experts in zip(self.routers, self.experts):
            weights, ids = router(x)[:, :only].softmax(-1).topk(self.top_k)
            x = x + experts(x, ids, weights)
        return x


SIZES: dict[str, Any] = {
    "num_experts": 8,
    "max_tokens_per_rank": 64,
    "top_k": 2,
    "hidden": 64,
    "intermediate": 32,
    "dtype": torch.float32,
    "backend": "grouped",
    "device": "cpu",
}


def tokens(step: int = 0) -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(step))


def ddp(rank: int, only: int | None) -> None:
    """DDP's hooks average dense parameters while the layers exchange rows; the layer itself sums the experts'."""
    with MoEBuffer(**SIZES) as buffer:
        alone = Model(buffer)
        alone(tokens(), only).square().sum().backward()
    with MoEBuffer(dist.group.WORLD, arrival_timeout=30, **SIZES) as buffer:
        model = Model(buffer)
        # DDP would average the experts, which differ between ranks.
        own = [name for name, _ in model.named_parameters() if name.startswith("experts")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
        for _ in range(2):
            model.zero_grad()
            wrapped(tokens()[32 * rank : 32 * rank + 32], only).square().sum().backward()
        for mean, whole in zip(model.routers.parameters(), alone.routers.parameters()):
            assert relative_l2(2 * mean.grad, whole.grad) < 1e-5
        mine = slice(4 * rank, 4 * rank + 4)
        for got, whole in zip(model.experts.parameters(), alone.experts.parameters()):
            assert got.grad is not None
            assert relative_l2(got.grad, whole.grad[mine]) < 1e-5
        if only is not None and rank == 1:
            assert not any(p.grad.any() for p in model.experts.parameters())


@pytest.mark.parametrize("only", [None, 4])
def test_ddp_averages_the_dense_part_and_the_layer_sums_the_experts(only: int | None) -> None:
    """``only`` = 4: rank 1 receives no token in any layer."""
    TWO.values(ddp, only)


def own_hooks(rank: int) -> None:
    """A trainer's own reduction: a collective in every parameter's hook, in the middle of backward."""
    with MoEBuffer(dist.group.WORLD, arrival_timeout=30, **SIZES) as buffer:
        model = Model(buffer)
        order: list[str] = []

        def reduce(name: str, grad: Tensor) -> None:
            order.append(name)
            dist.all_reduce(grad)

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: reduce(n, p.grad))
        model(tokens()[rank : 64 * rank]).sum().backward()  # rank 0 without tokens
        names = [name for name, _ in model.named_parameters()]
        assert sorted(order) == sorted(names)
        seen: list[Any] = [None, None]
        dist.all_gather_object(seen, order)
        assert seen[0] == seen[1]


def test_collectives_in_gradient_hooks() -> None:
    TWO.values(own_hooks)


def steps(rank: int, size: int, count: int) -> list[float]:
    """Losses of SGD on one global batch per step, spread over the first ``size`` ranks; the mean is global."""
    group = dist.new_group(list(range(size))) if size > 1 else None
    if rank >= size:
        return []
    losses = []
    each = 64 // size
    with MoEBuffer(group, arrival_timeout=30, **SIZES) as buffer:
        model = Model(buffer)
        optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
        for step in range(count):
            x = tokens(step % 4)[each * rank : each * rank + each]
            optimizer.zero_grad()
            loss = (model(x) - x.flip(1)).square().sum() / (64 * 64)
            loss.backward()
            total = loss.detach().clone()
            if group is not None:
                for parameter in model.routers.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                dist.all_reduce(total, group=group)
            optimizer.step()
            losses.append(total.item())
    return losses


def test_fifty_steps_have_the_same_losses_however_the_experts_are_spread() -> None:
    one, two, four = (FOUR.values(steps, size, 50)[0] for size in (1, 2, 4))
    assert one[-1] < 0.9 * one[0]
    for losses in (two, four):
        assert losses == pytest.approx(one, rel=1e-3)


def recomputed(rank: int) -> None:
    """Gradients bit-equal to those without checkpointing; the forward reaches the backend as often as documented."""
    case = Case((24, 40), dtype="bfloat16")
    whole = case.problem()
    mine = part(whole, rank, 2, case.rows(rank))
    with spread_buffer(whole, backend="reference") as buffer:
        want = results(mine, buffer)
        for reentrant, forwards in ((False, 1), (True, 2)):
            leaves = mine.requires_grad()

            def block(*inputs: Tensor) -> Tensor:
                return mega_moe.moe(*inputs, buffer=buffer)

            with count_op_calls() as calls:
                y = checkpoint(block, *leaves.inputs, use_reentrant=reentrant)
                y.backward(leaves.dy)
            assert dict(calls) == {"run": forwards, "backward": 1}
            assert_same_bits(Gradients(y.detach(), *leaves.grads()), want)  # type: ignore[arg-type]


def test_checkpointing_on_two_ranks() -> None:
    TWO.values(recomputed)


def compiled(rank: int, compiler: str) -> None:
    """One graph for the whole layer, T changing between calls and between ranks; the same bits as eager."""
    whole = random_problem(160, 128, 128, 8, 2, dtype=torch.float32)
    torch._dynamo.reset()
    with spread_buffer(whole, backend="reference") as buffer:

        def layer(*inputs: Tensor) -> Tensor:
            return 2 * mega_moe.moe(*inputs, buffer=buffer)

        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
        for left, right in ((128, 32), (31, 128), (0, 131), (64, 0)):
            rows = slice(0, left) if rank == 0 else slice(left, left + right)
            mine = part(whole, rank, 2, rows)
            got, want = (run(mine, f) for f in (fast, layer))
            assert_same_bits(got, want)


def run(problem: Problem, layer: Callable[..., Tensor]) -> Gradients:
    leaves = problem.requires_grad()
    y = layer(*leaves.inputs)
    y.backward(leaves.dy)
    return Gradients(y.detach(), *leaves.grads())  # type: ignore[arg-type]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_on_two_ranks(compiler: str) -> None:
    TWO.values(compiled, compiler, limit=150)


def repeated(rank: int) -> None:
    case = Case((40, 24), dtype="bfloat16", masked=0.1)
    whole = case.problem()
    mine = part(whole, rank, 2, case.rows(rank))
    with spread_buffer(whole, backend="reference") as buffer:
        first = results(mine, buffer)
        for _ in range(5):
            assert_same_bits(results(mine, buffer), first)
    with spread_buffer(whole, backend="reference") as buffer:
        assert_same_bits(results(mine, buffer), first)


def test_every_run_gives_the_same_bits() -> None:
    TWO.values(repeated)


def accumulated(rank: int) -> None:
    """Three micro-batches added into fp32 buffers by the layer; .grad is zero and hooks fire."""
    whole = random_problem(96, 128, 128, 8, 2, dtype=torch.bfloat16)
    batches = [slice(0, 32), slice(32, 64), slice(64, 96)]
    mine = [
        part(whole, rank, 2, slice(b.start + 16 * rank, b.start + 16 * rank + 16)).requires_grad()
        for b in batches
    ]
    local = mine[0]
    into = tuple(torch.ones(w.shape) for w in (local.w_gate_up, local.w_down))
    fired: list[int] = []
    for weight in (local.w_gate_up, local.w_down):
        weight.register_hook(lambda g: fired.append(int(g.any())))
    with spread_buffer(whole, backend="reference") as buffer:
        for p in mine:
            y = mega_moe.moe(*p.inputs[:3], local.w_gate_up, local.w_down, buffer=buffer, grad_buffers=into)
            y.backward(p.dy)
    want = of_rank(single(whole, Case((96,))), rank, 2, slice(0, 0))
    for got, dw in zip(into, want[3:]):
        assert relative_l2(got - 1, dw) <= 6e-3
    assert fired == [0] * 6
    assert not local.w_gate_up.grad.any()


def test_gradients_added_into_given_buffers() -> None:
    TWO.values(accumulated)


def held() -> tuple[int, int, int]:
    """Process groups known to torch, open files, threads."""
    gc.collect()
    return (
        len(dist.distributed_c10d._world.pg_map),
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208 -- a number of entries
        len(os.listdir("/proc/self/task")),  # noqa: PTH208
    )


def many_buffers(rank: int, how: str) -> None:
    case = Case((16, 16))
    whole = case.problem()
    mine = part(whole, rank, 2, case.rows(rank))
    after_two: tuple[int, ...] = ()
    for number in range(20):
        buffer = spread_buffer(whole, backend="reference")
        results(mine, buffer)
        if how == "destroyed":
            buffer.destroy()
            buffer.destroy()  # a second call does nothing
        else:
            del buffer  # dropped without a word
        if number == 1:
            after_two = held()
    dist.barrier()  # the other rank's last connection is closed too
    assert all(now <= then + 2 for now, then in zip(held(), after_two)), (held(), after_two)
    assert threading.active_count() < 20


@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_twenty_buffers_leave_nothing_behind(how: str) -> None:
    TWO.values(many_buffers, how)


def after_destroy(rank: int) -> None:
    case = Case((16, 16))
    whole = case.problem()
    mine = part(whole, rank, 2, case.rows(rank)).requires_grad()
    buffer = spread_buffer(whole, backend="reference")
    module = mega_moe.nn.MegaMoE(128, 128, 6, buffer=buffer)
    y = mega_moe.moe(*mine.inputs, buffer=buffer)
    buffer.destroy()
    for use in (
        lambda: mega_moe.moe(*mine.inputs, buffer=buffer),
        lambda: y.backward(mine.dy),
        lambda: module(*mine.inputs[:3]),
        lambda: buffer._live().handle,
        lambda: buffer.dtypes,
        buffer.check,
    ):
        with pytest.raises(MegaMoEError, match="destroyed"):
            use()


def test_a_destroyed_buffer_says_so() -> None:
    TWO.values(after_destroy)


def refused_leaves_nothing(rank: int) -> None:
    """Constructions that are refused, over and over, give back what they opened; then one that fits works."""
    whole = Case((16, 16)).problem()
    after_two: tuple[int, ...] = ()
    for number in range(12):
        with pytest.raises(ValueError, match="top_k: ranks disagree"):
            spread_buffer(whole, backend="reference", top_k=2 + rank)
        if number == 1:
            after_two = held()
    assert all(now <= then + 2 for now, then in zip(held(), after_two)), (held(), after_two)
    with spread_buffer(whole, backend="reference") as buffer, make_buffer(whole) as alone:
        mine = part(whole, rank, 2, slice(16 * rank, 16 * rank + 16))
        found = gap(
            results(mine, buffer), of_rank(results(whole, alone), rank, 2, slice(16 * rank, 16 * rank + 16))
        )
        assert found.same_bits


def test_refused_constructions_leave_nothing_behind() -> None:
    TWO.values(refused_leaves_nothing)
