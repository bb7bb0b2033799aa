"""What ranks tell one another outside the data: agreement at construction, and a header before each call.

The header makes ranks that disagree, or that refuse a call, raise everywhere instead of hanging in an exchange of rows.
It travels over a process group of its own (gloo, CPU), so its time-out and order are not the trainer's.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mega_moe._base.errors import MegaMoEError, RankTimeoutError

# After a time-out each rank says that it was there; a rank that stays silent this long is the missing one.
_GRACE_SECONDS = 2.0


class Control(Protocol):
    rank: int
    size: int

    def exchange(self, header: Tensor, what: str) -> Tensor:
        """``header [N]`` int64 on the CPU -> ``[R, N]``."""
        ...

    def gather(self, value: Any, what: str) -> list[Any]:
        """One picklable value of every rank, by rank."""
        ...

    def close(self) -> None: ...


class LocalControl:
    """One rank: nobody to ask."""

    rank = 0
    size = 1

    def exchange(self, header: Tensor, what: str) -> Tensor:
        return header[None]

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


class GroupControl:
    """The ranks of ``group``; every wait ends after ``timeout`` seconds in an exception that names the missing ranks."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        if timeout is None:
            timeout = _own_timeout(group)
        elif not timeout > 0:
            raise ValueError(f"arrival_timeout: got {timeout}, want seconds > 0")
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._timeout = timeout
        self._step = 0
        self._failed: str | None = None
        self._group: Any = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout),
            use_local_synchronization=True,
        )
        self._tag = ""
        self._tag = self.gather(f"{time.time_ns()}", "construction of MoEBuffer")[0]

    def exchange(self, header: Tensor, what: str) -> Tensor:
        gathered = torch.empty(self.size, header.numel(), dtype=header.dtype)
        self._bounded(lambda: dist.all_gather(list(gathered), header, self._group), what)
        return gathered

    def gather(self, value: Any, what: str) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._bounded(lambda: dist.all_gather_object(values, value, self._group), what)
        return values

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _bounded(self, collective: Any, what: str) -> None:
        if self._failed:
            raise MegaMoEError(f"the ranks of this buffer lost one another earlier: {self._failed}")
        self._step += 1
        start = time.monotonic()
        try:
            collective()
        except RuntimeError as error:
            waited = time.monotonic() - start
            self._failed = self._diagnose(what, waited, error)
            raise RankTimeoutError(self._failed) from error

    def _diagnose(self, what: str, waited: float, error: RuntimeError) -> str:
        head = f"rank {self.rank} of {self.size}: {what}: exchange {self._step} of this buffer"
        try:
            store = dist.PrefixStore(
                f"mega_moe/{self._tag}/{self._step}", dist.distributed_c10d._get_default_store()
            )
            store.set(str(self.rank), what)
            time.sleep(_GRACE_SECONDS)
            here = [r for r in range(self.size) if store.check([str(r)])]
        except RuntimeError as lost:  # the store's server went down with its rank
            return f"{head} failed after {waited:.1f} s and the store is gone ({lost}); first error: {error}"
        missing = [r for r in range(self.size) if r not in here]
        if missing:
            return (
                f"{head}: waited {waited:.1f} s of {self._timeout:g} s for ranks {missing}; arrived: {here}"
            )
        return f"{head} failed after {waited:.1f} s though all ranks arrived: {error}"


def _own_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up; torch's default where the group does not tell."""
    for device in group._device_types:
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return float(dist.constants.default_pg_timeout.total_seconds())
