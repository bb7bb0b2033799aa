"""SM clock of a timed region, read inside the GPU: clock64 over globaltimer between two probes.

NVML's figure is a sample of its own and does not match what the SMs ran at; a rate without the clock it was taken at
cannot be compared with another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Sample = tuple[int, int, int]
"""(SM id, clock64 in cycles, globaltimer in ns)"""


def mean_mhz(before: Sequence[Sample], after: Sequence[Sample]) -> float | None:
    """Mean over the SMs that both probes reached of cycles per microsecond; None when there is no such SM.

    A probe's blocks need not reach every SM: rows that no block wrote hold -1 and are left out.
    """
    first = {sm: (cycles, nanoseconds) for sm, cycles, nanoseconds in before if sm >= 0}
    rates = []
    for sm, cycles, nanoseconds in after:
        if sm in first and nanoseconds > first[sm][1]:
            rates.append((cycles - first[sm][0]) / (nanoseconds - first[sm][1]) * 1e3)
    return sum(rates) / len(rates) if rates else None


class NoClock:
    """Stands where no clock can be read, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason

    def before(self) -> None: ...

    def after(self) -> None: ...

    def mhz(self) -> float | None:
        return None


class ClockProbe:
    """Two launches of `mega_moe_kernels::clock_probe` around a region on the current stream."""

    reason: str | None = None

    def __init__(self, device: torch.device) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._before = torch.full((num_sms, 3), -1, dtype=torch.int64, device=device)
        self._after = torch.full_like(self._before, -1)

    def before(self) -> None:
        self._before.fill_(-1)
        self._after.fill_(-1)
        torch.ops.mega_moe_kernels.clock_probe(self._before)

    def after(self) -> None:
        torch.ops.mega_moe_kernels.clock_probe(self._after)

    def mhz(self) -> float | None:
        """MHz between the last two probes. Synchronises with the device."""
        return mean_mhz(_samples(self._before), _samples(self._after))


def _samples(rows: torch.Tensor) -> list[Sample]:
    return [(int(row[0]), int(row[1]), int(row[2])) for row in rows.tolist()]


def make_clock(device: torch.device, library_reason: str | None) -> ClockProbe | NoClock:
    """The clock of a device; `library_reason` says why the compiled library is missing, None when it is loaded."""
    if device.type != "cuda":
        return NoClock(f"clocks are read on CUDA devices only, the device is {device.type}")
    if library_reason is not None:
        return NoClock(library_reason)
    return ClockProbe(device)
