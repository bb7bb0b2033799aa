"""One rank of `torchrun`: ranks that come late or never, collectives on another stream, and every fused precision.

python3 -m torch.distributed.run --nproc-per-node N python/tests/gpu/late_ranks.py [cpu]

Through the public API alone, so that it holds for whatever computes the layer. With `cpu` over gloo, on the grouped
backend.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import mega_moe
from mega_moe.testing import Problem, fp64_moe_grads, random_problem, relative_l2

SIZES = {"num_experts": 32, "top_k": 4, "hidden": 512, "intermediate": 384}
TOKENS = 300
LATE_S, MISSING_S = 3.0, 3.0
CALLS = 10
RESERVED_SMS = 16
# Of results against the emulation of the same precision, and of bf16 against fp64: the bounds of docs/semantics.md.
TOLERANCE = 6e-3

Results = tuple[Tensor, ...]


class Rank:
    """This process, its device, and its part of a problem of all ranks."""

    def __init__(self, on_gpu: bool) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_gpu, self.backend = on_gpu, "fused" if on_gpu else "grouped"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        sizes = (SIZES["hidden"], SIZES["intermediate"], SIZES["num_experts"], SIZES["top_k"])
        self.whole = random_problem(
            TOKENS * self.size, *sizes, masked=0.1, seed=7, dtype=self.dtype, device=self.device
        )
        own = self.whole.tokens(slice(self.rank * TOKENS, (self.rank + 1) * TOKENS))
        local = SIZES["num_experts"] // self.size
        self.experts = slice(self.rank * local, (self.rank + 1) * local)
        w_gate_up, w_down = self.whole.w_gate_up[self.experts], self.whole.w_down[self.experts]
        self.own = Problem(own.x, own.topk_idx, own.topk_weights, w_gate_up, w_down, own.dy)

    def buffer(self, **changes: object) -> mega_moe.MoEBuffer:
        words = {"backend": self.backend, "dtype": self.dtype, "arrival_timeout": 60.0, **changes}
        return mega_moe.MoEBuffer(
            dist.group.WORLD, **SIZES, max_tokens_per_rank=TOKENS, device=self.device, **words
        )

    def results(self, buffer: mega_moe.MoEBuffer, between: Callable[[], None] = lambda: None) -> Results:
        """y, dx, dw, dW_gate_up, dW_down of one step; `between` runs after the forward."""
        leaves = self.own.requires_grad()
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
        between()
        y.backward(leaves.dy)
        return (y.detach(), *(grad for grad in leaves.grads() if grad is not None))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def precisions(me: Rank) -> Iterator[str]:
    """Those that the backend under test serves on this machine."""
    for precision in ("bf16", "fp8", "fp8_bwd"):
        explanation = mega_moe.explain(
            **SIZES,
            max_tokens_per_rank=TOKENS,
            precision=precision,
            dtype=me.dtype,
            num_ranks=me.size,
            device=me.device,
        )
        if any(verdict.backend == me.backend and verdict.accepted for verdict in explanation.verdicts):
            yield precision


def check_precision(me: Rank, precision: str) -> None:
    """bf16 against fp64 fed the same inputs, fp8 against the emulation that says what the format gives."""
    if precision == "bf16":
        exact = fp64_moe_grads(me.whole.dy, *me.whole.inputs)
        rows = slice(me.rank * TOKENS, (me.rank + 1) * TOKENS)
        want = tuple(part[rows] for part in exact[:3]) + tuple(part[me.experts] for part in exact[3:])
    else:
        with me.buffer(precision=precision, backend="reference") as emulation:
            want = me.results(emulation)
    with me.buffer(precision=precision) as buffer:
        got = me.results(buffer)
    assert len(got) == len(want) == 5
    for name, value, exact_value in zip(("y", "dx", "dw", "dW_gate_up", "dW_down"), got, want):
        error = relative_l2(value, exact_value)
        assert error <= TOLERANCE, (precision, name, error)


def check_same(got: Results, want: Results, what: str, backend: str) -> None:
    """Sums in a fixed order have the same bits; torch's products sum weight gradients over rows in any order."""
    fixed = 5 if backend == "fused" else 3
    names = ("y", "dx", "dw", "dW_gate_up", "dW_down")
    for name, value, before in zip(names[:fixed], got, want):
        assert torch.equal(value, before), (what, name)
    for name, value, before in zip(names[fixed:], got[fixed:], want[fixed:]):
        error = relative_l2(value, before)
        assert error <= TOLERANCE, (what, name, error)


def check_late(me: Rank) -> None:
    """The last rank is late to the forward and to the backward, as one that compiles or writes a checkpoint is."""
    last = me.rank == me.size - 1

    def pause() -> None:
        if last:
            me.synchronize()
            time.sleep(LATE_S)

    with me.buffer() as buffer:
        want = me.results(buffer)
        me.synchronize()
        dist.barrier()
        pause()
        start = time.monotonic()
        got = me.results(buffer, pause)
        buffer.check()
        waited = time.monotonic() - start
    if not last:
        assert waited >= LATE_S, waited
    check_same(got, want, "late", me.backend)


def check_beside_collectives(me: Rank) -> None:
    """Steps while the ranks reduce on another stream, as FSDP2 does: the same results, and right sums."""
    if not me.on_gpu:
        return
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = RESERVED_SMS  # a launch waits for its SMs: NCCL must fit into those left to it
    alongside = dist.new_group(pg_options=options)
    stream = torch.cuda.Stream(me.device)
    sums = [torch.full((1 << 22,), float(me.rank + step), device=me.device) for step in range(CALLS)]
    with me.buffer(num_reserved_sms=RESERVED_SMS) as buffer:
        want = me.results(buffer)
        me.synchronize()
        dist.barrier()
        for step in range(CALLS):
            with torch.cuda.stream(stream):
                dist.all_reduce(sums[step], group=alongside)
            got = me.results(buffer)
            check_same(got, want, f"step {step}", me.backend)
        buffer.check()
        me.synchronize()
    for step, total in enumerate(sums):
        exact = sum(range(me.size)) + step * me.size
        assert bool((total == exact).all()), (step, exact)


def check_missing(me: Rank) -> None:
    """The last rank does not call: the others are told within the limit, by name; a new buffer works."""
    if me.size == 1:
        return
    last = me.size - 1
    buffer = me.buffer(arrival_timeout=MISSING_S)
    want = me.results(buffer)
    me.synchronize()
    dist.barrier()
    if me.rank != last:
        start = time.monotonic()
        error: Exception | None = None
        try:
            mega_moe.moe(*me.own.inputs, buffer=buffer)
            buffer.check()
        except mega_moe.MegaMoEError as caught:
            error = caught
        waited = time.monotonic() - start
        # Of several ranks that wait, one may be told by another that gave up first.
        assert isinstance(error, (mega_moe.RankTimeoutError, mega_moe.PeerError)), error
        assert f"rank {last}" in str(error) or f"ranks [{last}]" in str(error), error
        assert MISSING_S - 1 < waited < MISSING_S + 20, waited
    dist.barrier()
    buffer.destroy()
    with me.buffer() as fresh:
        check_same(me.results(fresh), want, "a new buffer", me.backend)


def main() -> None:
    me = Rank("cpu" not in sys.argv[1:])
    served = list(precisions(me))
    assert "bf16" in served, served
    for precision in served:
        check_precision(me, precision)
    check_late(me)
    check_beside_collectives(me)
    check_missing(me)
    print(f"late_ranks: rank {me.rank} of {me.size}: {', '.join(served)}: all right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
