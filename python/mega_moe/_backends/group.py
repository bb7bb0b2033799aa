"""The ranks of one buffer: agreement at construction, and a header before each call of a plain backend.

Ranks that disagree, or that refuse a call, raise everywhere instead of hanging in an exchange of rows. All of it
travels over a process group of its own (gloo, CPU), so its time-out and order are not the trainer's.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import pickle
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_moe._base.errors import MegaMoEError, PeerError, RankTimeoutError

if TYPE_CHECKING:
    from mega_moe._backends.choice.facts import RankFacts

# After a time-out each rank says that it was there; a rank that stays silent this long is the missing one.
_GRACE_SECONDS = 2.0
# Buffers built so far on each group, by the group's name. Construction is collective, so ranks count alike.
_built: Counter[str] = Counter()

_CONSTRUCTION = "construction of MoEBuffer"
# Facts in which ranks may not differ: a wire format or a result could depend on them.
_VERSIONS = ("package_version", "torch_version", "kernels_sha256")


class Control:
    """One rank without a group. ``timeout``: seconds to wait for another rank, None where there is none."""

    rank = 0
    size = 1
    timeout: float | None = None

    def exchange(self, header: Tensor, what: str) -> Tensor:
        """``header [N]`` int64 on the CPU -> ``[R, N]``."""
        return header[None]

    def gather(self, value: Any, what: str) -> list[Any]:
        """One picklable value of every rank, by rank."""
        return [value]

    def gather_errors(self, error: Exception | None, what: str, value: Any = None) -> list[Any]:
        """``value`` of every rank. Raises this rank's own ``error``, else PeerError for another rank's."""
        gathered = self.gather((value, error and f"{type(error).__name__}: {error}"), what)
        if error is not None:
            raise error
        refusals = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in enumerate(gathered) if why)
        if refusals:
            raise PeerError(f"rank {self.rank}: {what} was refused by {refusals}")
        return [value for value, _ in gathered]

    def close(self) -> None:
        pass


class GroupControl(Control):
    """The ranks of ``group``; every wait ends after ``timeout`` seconds in an exception that names who is missing."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None) -> None:
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process is not in it; only the ranks of the group build the buffer")
        self.size = dist.get_world_size(group)
        self.timeout: float = _own_timeout(group) if timeout is None else timeout
        self._step = 0
        self._failed: str | None = None
        # Keys of an earlier buffer stay in the store; names that torch gives to groups come back after a group is
        # destroyed and count what this process has built, so they may differ between ranks. This number does neither.
        _built[group.group_name] += 1
        self._store = _below(
            dist.distributed_c10d._get_default_store(),
            f"mega_moe/{group.group_name}/{_built[group.group_name]}",
        )
        self._group: list[Any] = [self._connect(datetime.timedelta(seconds=self.timeout))]
        # Gloo's threads must end before the interpreter does: C++ aborts the process where one outlives it, as with a
        # buffer in a module's global. A finalizer runs with its object or at exit, whichever comes first.
        self._close_group = weakref.finalize(self, self._group.clear)

    def exchange(self, header: Tensor, what: str) -> Tensor:
        if self._failed:
            raise MegaMoEError(f"the ranks of this buffer lost one another earlier: {self._failed}")
        self._step += 1
        start = time.monotonic()
        gathered = torch.empty(self.size, header.numel(), dtype=header.dtype, device="cpu")
        try:
            self._group[0].allgather([list(gathered)], [header]).wait()
        except RuntimeError as error:
            waited = time.monotonic() - start
            head = f"rank {self.rank} of {self.size}: {what}: exchange {self._step} of this buffer"
            with contextlib.suppress(RuntimeError):  # the store's server is gone too: _who says so
                self._store.set(f"{self._step}/{self.rank}", what)
                time.sleep(_GRACE_SECONDS)
            self._failed = self._who(str(self._step), head, waited, error)
            raise RankTimeoutError(self._failed) from error
        return gathered

    def gather(self, value: Any, what: str) -> list[Any]:
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.exchange(torch.tensor([packed.numel()], device="cpu"), what)[:, 0].tolist()
        rows = self.exchange(torch.nn.functional.pad(packed, (0, max(lengths) - packed.numel())), what)
        return [pickle.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths)]

    def close(self) -> None:
        self._failed = self._failed or "the buffer was destroyed"
        self._close_group()

    def _connect(self, limit: datetime.timedelta) -> Any:
        start = time.monotonic()
        try:
            # First at the store, where a missing rank has a name; gloo would only tell of its own keys.
            self._store.set(f"arrived/{self.rank}", "")
            self._store.wait([f"arrived/{rank}" for rank in range(self.size)], limit)
            # Not through new_group, which registers the group in torch: this one lives and dies with the buffer.
            return dist.ProcessGroupGloo(_below(self._store, "gloo"), self.rank, self.size, limit)
        except RuntimeError as error:
            head = f"rank {self.rank} of {self.size}: {_CONSTRUCTION}"
            raise RankTimeoutError(self._who("arrived", head, time.monotonic() - start, error)) from error

    def _who(self, step: str, head: str, waited: float, error: RuntimeError) -> str:
        """Which ranks said at the store that they came to ``step``."""
        try:
            here = [rank for rank in range(self.size) if self._store.check([f"{step}/{rank}"])]
        except RuntimeError as lost:  # the store's server went down with its rank
            return f"{head} failed after {waited:.1f} s and the store is gone ({lost}); first error: {error}"
        missing = [rank for rank in range(self.size) if rank not in here]
        if missing:
            return f"{head}: waited {waited:.1f} s of {self.timeout:g} s for ranks {missing}; arrived: {here}"
        return f"{head} failed after {waited:.1f} s though all ranks arrived: {error}"


def agree(
    control: Control, settings: dict[str, Any], facts: RankFacts | None, error: Exception | None
) -> list[RankFacts]:
    """Facts of all ranks, when no rank has an ``error`` and all have equal ``settings`` and versions.

    Raises this rank's own ``error``, else PeerError for another rank's, else ValueError for a difference.
    """
    # Settings that were refused may be anything, even what cannot be pickled.
    mine = (None if error is not None else settings, facts)
    gathered = control.gather_errors(error, _CONSTRUCTION, mine)
    for name in settings:
        _same(name, [theirs[name] for theirs, _ in gathered])
    everyone: list[RankFacts] = [fact for _, fact in gathered]
    # Rows of a CPU tensor and of a CUDA tensor travel by different ways: neither would ever arrive.
    _same("device type", [fact.device_type for fact in everyone])
    for name in _VERSIONS:
        _same(name, [getattr(fact, name) for fact in everyone])
    return everyone


def confirm(control: Control, error: Exception | None) -> None:
    """After what each rank builds for itself: this rank's own ``error``, or PeerError for another rank's."""
    control.gather_errors(error, _CONSTRUCTION)


def as_group(group: Any) -> dist.ProcessGroup | None:
    """The process group that ``group`` is, or that a DeviceMesh of one dimension stands for; None for None.

    Raises TypeError for anything else, such as the name of a dimension, and ValueError for a mesh of several.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not in it; only the ranks of the group build the buffer")
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        raise TypeError(
            f"group: got {group!r} ({type(group).__name__}), want a ProcessGroup, a DeviceMesh of one dimension or None"
        )
    if group.ndim != 1:
        names = list(group.mesh_dim_names or map(str, range(group.ndim)))
        raise ValueError(
            f"group: got a DeviceMesh of the dimensions {names}, want one of them, such as mesh['ep']"
        )
    return group.get_group()


def check_timeout(timeout: float | None, name: str = "arrival_timeout") -> float | None:
    """``timeout`` as a float; TypeError or ValueError unless it is None or a finite number above 0."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{name}: got {timeout!r} ({type(timeout).__name__}), want seconds or None")
    if not 0 < timeout < math.inf:
        raise ValueError(f"{name}: got {timeout}, want finite seconds > 0")
    return float(timeout)


def _same(name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise ValueError(f"{name}: ranks disagree ({listed}); it must be equal on all ranks of the group")


def _below(store: Any, prefix: str) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _own_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up; torch's default where the group does not tell."""
    for device in group._device_types:
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return float(dist.constants.default_pg_timeout.total_seconds())
