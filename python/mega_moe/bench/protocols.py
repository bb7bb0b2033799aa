"""How a time is taken: burst and sustained, over several input sets, the slowest rank counting.

A card at its power cap runs 15 to 20 % slower after a few hundred milliseconds of GEMMs than right after
a pause. Both rates are true, so both are measured, under their names:

- **burst**: about 10 ms of work after 0.25 s of idle;
- **sustained**: at least 0.3 s back to back, after as long a run that is thrown away.

One *window* is a number of calls between two time stamps; on a GPU the first is taken behind a kernel that runs until
the host has queued the first call, so that a window holds no time of the host after a pause. Its time is the maximum
over the ranks, a measurement is the median over the windows. The calls walk through the input sets in turn, so that no
call finds its inputs in a cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import Timing

Call = Callable[[], object]

_SUSTAINED_MARGIN = 1.05  # aim above the least time, so that noise does not send the window back
_MAX_REGROWTHS = 8
_HIDING_CYCLES = 2_000_000  # 1 ms at 1.98 GHz


@dataclass(frozen=True)
class Protocol:
    """`work_s` is a target, or the least time when `at_least`; `lead_in` windows are run and thrown away."""

    name: str
    idle_s: float
    work_s: float
    at_least: bool
    windows: int
    lead_in: int

    def quick(self) -> Protocol:
        """The same windows, fewer of them: a rate of the same kind with more noise."""
        return replace(self, windows=3)

    def calls_per_window(self, call_s: float) -> int:
        """Calls that fill one window when one call takes `call_s` seconds."""
        if self.at_least:
            return max(1, math.ceil(self.work_s * _SUSTAINED_MARGIN / call_s))
        return max(1, round(self.work_s / call_s))


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("burst", idle_s=0.25, work_s=0.010, at_least=False, windows=9, lead_in=0),
        Protocol("sustained", idle_s=0.0, work_s=0.3, at_least=True, windows=3, lead_in=1),
    )
}


Sample = tuple[int, int, int]
"""SM id, clock64 in cycles, globaltimer in ns."""


def mean_mhz(before: Sequence[Sample], after: Sequence[Sample]) -> float | None:
    """Mean over the SMs that both probes reached of cycles per microsecond; None when there is no such SM.

    A probe's blocks need not reach every SM: rows that no block wrote hold -1 and are left out.
    """
    first = {sm: (cycles, ns) for sm, cycles, ns in before if sm >= 0}
    rates = [
        (cycles - first[sm][0]) / (ns - first[sm][1]) * 1e3
        for sm, cycles, ns in after
        if sm in first and ns > first[sm][1]
    ]
    return sum(rates) / len(rates) if rates else None


class HostTimer:
    """time.perf_counter around calls that have finished when they return."""

    name = "perf_counter"

    def __init__(self, mhz_reason: str | None) -> None:
        self.mhz_reason = mhz_reason

    def window(self, calls: Sequence[Call], count: int) -> tuple[float, float | None]:
        """Runs `count` calls, each set in rotation; returns their seconds and the mean clock in MHz."""
        start = time.perf_counter()
        _run(calls, count)
        return time.perf_counter() - start, None

    def idle(self, seconds: float) -> None:
        """Lets the device rest."""
        time.sleep(seconds)


class CudaTimer:
    """CUDA events on the current stream, and the SM clock: clock64 over globaltimer between two launches of a probe.

    NVML's figure is a sample of its own and does not match what the SMs ran at. `mhz_reason` says why no clock can be
    read, None where the library is loaded. The probes lie outside the events.
    """

    name = "CUDA events"

    def __init__(self, device: torch.device, mhz_reason: str | None = None) -> None:
        self._device, self.mhz_reason = device, mhz_reason
        self._probes: list[torch.Tensor] = []
        if mhz_reason is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._probes = [torch.empty(num_sms, 3, dtype=torch.int64, device=device) for _ in range(2)]

    def window(self, calls: Sequence[Call], count: int) -> tuple[float, float | None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for probe in self._probes:
            probe.fill_(-1)
        for probe in self._probes[:1]:
            torch.ops.mega_moe_kernels.clock_probe(probe)
        # Until the host has queued the first call, the device is busy and the clock has not started: what the host
        # needs after a pause is no time of the device.
        torch.cuda._sleep(_HIDING_CYCLES)
        start.record()
        _run(calls, count)
        end.record()
        for probe in self._probes[1:]:
            torch.ops.mega_moe_kernels.clock_probe(probe)
        torch.cuda.synchronize(self._device)
        samples = [[(int(sm), int(cycles), int(ns)) for sm, cycles, ns in p.tolist()] for p in self._probes]
        return start.elapsed_time(end) * 1e-3, mean_mhz(*samples) if samples else None

    def idle(self, seconds: float) -> None:
        torch.cuda.synchronize(self._device)
        time.sleep(seconds)


Timer = HostTimer | CudaTimer


def make_timer(device: torch.device, library_reason: str | None) -> Timer:
    """The timer of a device; `library_reason` says why the compiled library is missing, None when it is loaded."""
    if device.type != "cuda":
        return HostTimer(f"clocks are read on CUDA devices only, the device is {device.type}")
    return CudaTimer(device, library_reason)


def _run(calls: Sequence[Call], count: int) -> None:
    for index in range(count):
        calls[index % len(calls)]()


def measure(
    calls: Sequence[Call],
    protocol: Protocol,
    timer: Timer,
    ranks: Context,
    *,
    poison: Callable[[], None] = lambda: None,
    budget_s: float = 30.0,
) -> Timing:
    """Median seconds of one call under the protocol. Collective over the ranks.

    `calls` holds one callable per input set. `poison` runs before every window, outside the timed region. `budget_s`
    bounds the time of slow calls: windows are left out beyond it, but three always remain.
    Raises ValueError without calls and RuntimeError when no window reaches the protocol's least time.
    """
    if not calls:
        raise ValueError("calls: got none, wanted one per input set")
    # Each set once for allocations and lazy set-up, then once more under the clock.
    timer.window(calls, len(calls))
    seconds, _ = timer.window(calls, len(calls))
    count = protocol.calls_per_window(ranks.maximum(seconds) / len(calls))
    lead_in, wanted, regrowths = protocol.lead_in, protocol.windows, 0
    windows: list[float] = []
    clocks: list[float] = []
    while len(windows) < wanted:
        poison()
        if protocol.idle_s:
            timer.idle(protocol.idle_s)
        ranks.barrier()
        seconds, mhz = timer.window(calls, count)
        seconds = ranks.maximum(seconds)
        if protocol.at_least and seconds < protocol.work_s:
            regrowths += 1
            if regrowths > _MAX_REGROWTHS:
                raise RuntimeError(
                    f"protocol {protocol.name}: got windows of {seconds:.3f} s, wanted at least {protocol.work_s} s"
                )
            count = max(count + 1, protocol.calls_per_window(seconds / count))
            windows, clocks = [], []
            continue
        if lead_in:
            lead_in -= 1
            continue
        windows.append(seconds / count)
        if mhz is not None:
            clocks.append(mhz)
        wanted = max(3, min(protocol.windows, int(budget_s / (seconds + protocol.idle_s))))
    # The lowest clock of the ranks stands alongside the longest time of the ranks; -1 where a rank could read none.
    lowest = ranks.minimum(statistics.median(clocks) if clocks else -1.0)
    clock = lowest if lowest > 0 else None
    return Timing(
        protocol=protocol.name,
        timer=timer.name,
        seconds=statistics.median(windows),
        windows_s=tuple(windows),
        calls_per_window=count,
        input_sets=len(calls),
        idle_s=protocol.idle_s,
        mhz=clock,
        mhz_reason=None if clock is not None else (timer.mhz_reason or "no SM was seen by both probes"),
    )
