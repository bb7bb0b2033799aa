"""Host time of one call of mega_moe.moe: what a CPU spends before the device may begin, whatever the device does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import mega_moe
from mega_moe.bench.layer import Case
from mega_moe.bench.problem import Problem
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import HostRow, Outcome, Timing

LINE = "lin(x[:, :64].float())"
"""A slice, a cast and a 64 x 64 Linear that autograd records: what host times of any machine are held against."""

TOKENS = 64
_WINDOWS = 15
# A few launches each: far from the thousand that fill the queue, where the host would wait for the device.
_CALLS = 20


def measure_host(problem: Problem, case: Case, context: Context) -> Iterator[HostRow]:
    """Rows of the line, then of each backend that `case` names, else of the one chosen. Collective over the ranks."""
    settings = {
        **problem.shape.sizes(),
        "max_tokens_per_rank": problem.tokens,
        "precision": case.precision,
        "dw_precision": case.dw_precision,
        "dtype": problem.dtype,
        "device": context.device,
    }
    inputs, weights = problem.sets[0], (problem.w_gate_up, problem.w_down)
    leaves = (inputs.x, inputs.topk_weights, *weights)
    linear = nn.Linear(64, 64, device=context.device)
    line = _timing(lambda: linear(inputs.x[:, :64].float()), context)
    shape = problem.shape.name
    yield HostRow("host", shape, "-", "line", 1.0, Outcome("measured", (), line))
    chosen = mega_moe.explain(**settings, num_ranks=context.num_ranks).chosen
    for backend in case.backends or (chosen or "auto",):
        try:
            buffer = mega_moe.MoEBuffer(context.group, **settings, backend=backend)
        except mega_moe.BackendRefusedError as error:
            yield HostRow("host", shape, backend, "all", None, Outcome("refused", (str(error),), None))
            continue

        def forward(buffer: mega_moe.MoEBuffer = buffer) -> torch.Tensor:
            return mega_moe.moe(inputs.x, inputs.topk_idx, inputs.topk_weights, *weights, buffer=buffer)

        def forward_backward(forward: Callable[[], torch.Tensor] = forward) -> None:
            for leaf in leaves:
                leaf.grad = None
            forward().backward(inputs.dy)

        with buffer:
            for direction, call in (
                ("forward", torch.no_grad()(forward)),
                ("forward_backward", forward_backward),
            ):
                timing = _timing(call, context)
                ratio = timing.seconds / line.seconds
                yield HostRow("host", shape, backend, direction, ratio, Outcome("measured", (), timing))


def _timing(call: Callable[[], object], context: Context) -> Timing:
    windows = []
    for window in range(_WINDOWS + 1):
        context.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        if window:  # the first warms up
            windows.append(context.maximum((time.perf_counter() - start) / _CALLS))
    context.synchronize()
    seconds = statistics.median(windows)
    reason = "the host's time, not the device's"
    return Timing("host", "perf_counter", seconds, tuple(windows), _CALLS, 1, 0.0, None, reason)
