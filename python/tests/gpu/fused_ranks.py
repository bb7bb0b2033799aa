"""One rank of `torchrun`: the fused layer through symmetric memory on a GPU of its own, and what it tells of faults.

python3 -m torch.distributed.run --nproc-per-node N python/tests/gpu/fused_ranks.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mega_moe
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, random_problem, relative_l2

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MOST = 512, 384, 32, 4, 600
STEPS = 12
# architecture: relative L2 of bf16 results against fp64 fed the same inputs.
TOLERANCE = 6e-3


def everyone(step: int, size: int, device: torch.device) -> tuple[Problem, list[slice]]:
    """The tokens of all ranks, and which are whose; in every third step one rank has none."""
    made = torch.Generator().manual_seed(step)
    tokens = [int(torch.randint(1, MOST + 1, (), generator=made)) for _ in range(size)]
    if step % 3 == 1:
        tokens[step % size] = 0
    problem = random_problem(
        sum(tokens), HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, masked=0.1, seed=step, device=device
    )
    ends = torch.tensor(tokens).cumsum(0).tolist()
    return problem, [slice(end - count, end) for end, count in zip(ends, tokens)]


def of_rank(whole: Problem, rows: slice, experts: slice) -> Problem:
    own = whole.tokens(rows)
    return Problem(
        own.x, own.topk_idx, own.topk_weights, whole.w_gate_up[experts], whole.w_down[experts], own.dy
    )


def check_values(own: Problem, want: Gradients, buffer: mega_moe.MoEBuffer, what: str) -> None:
    leaves = own.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    y.backward(leaves.dy)
    for name, got, exact in zip(want._fields, (y, *leaves.grads()), want):
        assert got is not None, (what, name)
        assert got.shape == exact.shape, (what, name)
        error = relative_l2(got, exact) if exact.numel() else 0.0
        assert error <= TOLERANCE, (what, name, error)


def told(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except (ValueError, mega_moe.PeerError) as error:
        return error
    return None


def check_graphs(own: Problem, buffer: mega_moe.MoEBuffer) -> None:
    """A step of each rank's own T in a graph, replayed between eager ones: the same bits of y and of all gradients."""
    static = own.requires_grad()
    wanted = (static.x, static.topk_weights, static.w_gate_up, static.w_down)

    def step() -> list[torch.Tensor]:
        y = mega_moe.moe(*static.inputs, buffer=buffer)
        return [y.detach(), *torch.autograd.grad(y, wanted, static.dy)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(10):
        with torch.no_grad():
            static.x.copy_(torch.randn_like(static.x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, step()))
    buffer.check()


def check_frozen_on_one_rank(own: Problem, rank: int, buffer: mega_moe.MoEBuffer) -> None:
    """Told to all ranks at once, and not after a time limit; the ranks have lost one another."""
    leaves = own.requires_grad((rank != 0, True, True, True))
    y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    start = time.monotonic()
    error = told(lambda: y.backward(leaves.dy)) or told(buffer.check)
    assert type(error) is mega_moe.PeerError, error
    assert "called" in str(error), error
    assert time.monotonic() - start < 20.0, "a time limit, and not the difference, ended the call"


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    buffer = mega_moe.MoEBuffer(
        dist.group.WORLD,
        num_experts=EXPERTS,
        max_tokens_per_rank=MOST,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        backend="fused",
        arrival_timeout=60.0,
    )
    experts = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)

    def own_part(step: int) -> tuple[Problem, Gradients]:
        whole, rows = everyone(step, size, device)
        y, dx, dtopk, dw1, dw2 = fp64_moe_grads(whole.dy, *whole.inputs)
        mine = rows[rank]
        want = Gradients(y[mine], dx[mine], dtopk[mine], dw1[experts], dw2[experts])
        return of_rank(whole, mine, experts), want

    for step in range(STEPS):
        check_values(*own_part(step), buffer, f"step {step}")

    # Too many tokens on the last rank: it raises, the others' result is NaN and they learn why.
    own, want = own_part(0)
    last = rank == size - 1
    if last:
        many = random_problem(MOST + 1, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, device=device)
        error = told(lambda: mega_moe.moe(*many.inputs[:3], own.w_gate_up, own.w_down, buffer=buffer))
    else:
        y = mega_moe.moe(*own.inputs, buffer=buffer)
        error = told(buffer.check)
        assert y.isnan().all()
    assert type(error) is (ValueError if last else mega_moe.PeerError), error
    assert f"{MOST + 1} tokens" in str(error), error
    check_values(own, want, buffer, "after a refusal")

    # A bad id of rank 0 is that rank's alone: its backward, which the others wait for, runs all the same and meets the
    # id again.
    leaves = own.requires_grad()
    x, ids, *rest = leaves.inputs
    if rank == 0:
        ids = ids.clone()
        ids[0, 0] = EXPERTS
    y = mega_moe.moe(x, ids, *rest, buffer=buffer)
    torch.cuda.synchronize()
    for error in (told(lambda: y.backward(leaves.dy)), told(buffer.check)):
        assert (type(error) is ValueError) == (rank == 0), error
        assert rank or f"topk_idx[0, 0]: got expert {EXPERTS}" in str(error), error
    check_values(own, want, buffer, "after a bad id")

    check_graphs(own, buffer)
    # Last: the buffer is lost.
    check_frozen_on_one_rank(own, rank, buffer)
    buffer.destroy()
    dist.destroy_process_group()
    print(f"fused_ranks: rank {rank} of {size}: {STEPS} steps right")


if __name__ == "__main__":
    main()
