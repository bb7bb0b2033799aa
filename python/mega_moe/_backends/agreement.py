"""Construction is collective: ranks whose settings or versions differ all raise, each with both values."""

from __future__ import annotations

from typing import Any

from mega_moe._backends.control import Control
from mega_moe._backends.facts import RankFacts
from mega_moe._base.errors import PeerError

_WHAT = "construction of MoEBuffer"
# Facts in which ranks may not differ: a wire format or a result could depend on them.
_VERSIONS = ("package_version", "torch_version", "kernels_sha256")


def agree(
    control: Control, settings: dict[str, Any], facts: RankFacts | None, error: Exception | None
) -> list[RankFacts]:
    """Facts of all ranks, when no rank has an ``error`` and all have equal ``settings`` and versions.

    Raises this rank's own ``error``, else PeerError for another rank's, else ValueError for a difference.
    """
    # Settings that were refused may be anything, even what cannot be pickled.
    mine = None if error is not None else settings
    gathered = control.gather((mine, facts, error and f"{type(error).__name__}: {error}"), _WHAT)
    if error is not None:
        raise error
    _raise_refusals(control, [why for _, _, why in gathered])
    for name in settings:
        _same(name, [theirs[name] for theirs, _, _ in gathered])
    everyone = [fact for _, fact, _ in gathered]
    # Rows of a CPU tensor and of a CUDA tensor travel by different ways: neither would ever arrive.
    _same("device type", [fact.device_type for fact in everyone])
    for name in _VERSIONS:
        _same(name, [getattr(fact, name) for fact in everyone])
    return everyone


def confirm(control: Control, error: Exception | None) -> None:
    """After what each rank builds for itself: this rank's own ``error``, or PeerError for another rank's."""
    gathered = control.gather(error and f"{type(error).__name__}: {error}", _WHAT)
    if error is not None:
        raise error
    _raise_refusals(control, gathered)


def _raise_refusals(control: Control, reasons: list[str | None]) -> None:
    failed = [f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why]
    if failed:
        raise PeerError(f"rank {control.rank}: {_WHAT} was refused by " + "; ".join(failed))


def _same(name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        raise ValueError(f"{name}: ranks disagree ({listed}); it must be equal on all ranks of the group")
