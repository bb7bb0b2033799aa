"""Copies of weights under FSDP2, which gathers a parameter into the same memory under the same version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_moe import MoEBuffer
from mega_moe.nn import MegaMoE
from mega_moe.testing import Problem, random_problem

from ._fake_kernels import FakeKernels, fake_kernels
from ._layer import bits, make_buffer

_ = fake_kernels  # a fixture


@pytest.fixture
def problem() -> Problem:
    return random_problem(24, 256, 128, 4, 2)


@pytest.fixture
def buffer(fake_kernels: FakeKernels, problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "fused", "fp8") as made:
        yield made


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Stack(nn.Module):
    def __init__(self, buffer: MoEBuffer, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MegaMoE(256, 128, 4, buffer=buffer, dtype=torch.bfloat16) for _ in range(depth)
        )

    def forward(self, problem: Problem) -> Tensor:
        x = problem.x
        for layer in self.layers:
            x = x + layer(x, problem.topk_idx, problem.topk_weights)
        return x


def plain_result(model: nn.Module, problem: Problem, depth: int) -> Tensor:
    """What the model computes by the reference, on weights gathered from the shards as they are now."""
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with make_buffer(problem, "reference", "fp8") as reference:
        twin = _Stack(reference, depth)
        twin.load_state_dict(whole)
        with torch.no_grad():
            return twin(problem)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("reuse", [False, True])
def test_shards_that_changed(
    buffer: MoEBuffer, problem: Problem, reuse: bool, depth: int, reshard: bool
) -> None:
    """An optimizer's step, a checkpoint, and in place on the shards, each followed by a forward and a backward."""
    from torch.distributed.fsdp import fully_shard

    model = _Stack(buffer, depth)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def train() -> Tensor:
        y: Tensor = model(problem)
        y.float().square().mean().backward()
        return y.detach()

    def by_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def by_checkpoint() -> None:
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})

    def in_place_on_shards() -> None:
        with torch.no_grad():
            for shard in model.parameters():
                shard.mul_(0.75)
        # Nothing in torch links a shard with the parameter that is gathered from it.
        if reuse:
            buffer.weights_changed()

    with buffer.reuse_weight_copies() if reuse else contextlib.nullcontext():
        before = train()
        for change in (by_step, by_checkpoint, in_place_on_shards):
            change()
            want = plain_result(model, problem, depth)
            got = train()
            assert torch.equal(bits(got), bits(want)), change.__name__
            assert not torch.equal(got, before)
            before = got
