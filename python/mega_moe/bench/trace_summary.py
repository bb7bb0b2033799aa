"""What a trace says in numbers: shares of the roles, the tensor cores over time, and what the products hide."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_moe.bench.trace_events import Trace, kinds_in
from mega_moe.bench.trace_kinds import KINDS, ROLES, TRAFFIC, Kind, State
from mega_moe.bench.trace_spans import Spans

DECILES = 10


@dataclass(frozen=True)
class RoleShare:
    """Percent of the kernel's time, mean of the role's lanes, by state; what is left of 100 no event covers."""

    role: str
    percent: dict[State, float]

    @property
    def untold(self) -> float:
        return 100 - sum(self.percent.values())


@dataclass(frozen=True)
class KindTimes:
    """Events of one kind, in us."""

    kind: Kind
    count: int
    mean: float
    median: float
    longest: float


@dataclass(frozen=True)
class Overlap:
    """Percent of a part's busy time (waits left out, every lane counted)."""

    part: str
    busy_us: float
    device: float  # while any CTA of the device is in products
    same_cta: float  # while the same CTA is
    ctas: float  # mean share of the device's CTAs that are in products meanwhile


@dataclass(frozen=True)
class Products:
    """us from the first event; ``head`` and ``tail`` are the kernel's time without products at either end."""

    first_start: float
    last_end: float
    head: float
    tail: float
    busy_percent: float  # mean over CTAs and time of "a math warpgroup is in products"
    deciles: tuple[float, ...]  # the same, of each tenth of the kernel's time


@dataclass(frozen=True)
class Summary:
    """Of one device; ``products`` is None where there were none."""

    kernel_us: float
    num_ranks: int
    num_ctas: int
    num_events: int
    num_full_lanes: int
    malformed: int
    roles: tuple[RoleShare, ...]
    kinds: tuple[KindTimes, ...]
    overlaps: tuple[Overlap, ...]
    products: Products | None


def summarise(trace: Trace) -> Summary:
    return Summary(
        kernel_us=trace.span * 1e-3,
        num_ranks=trace.num_ranks,
        num_ctas=len(trace.ctas),
        num_events=len(trace),
        num_full_lanes=len(trace.full_lanes),
        malformed=trace.malformed,
        roles=tuple(_role_share(trace, role) for role in range(len(ROLES))),
        kinds=tuple(times for kind in KINDS.values() if (times := _kind_times(trace, kind)) is not None),
        overlaps=tuple(overlap for part in TRAFFIC if (overlap := _overlap(trace, part)) is not None),
        products=_products(trace),
    )


def spans_of(trace: Trace, mask: Tensor) -> Spans:
    return Spans(trace.start[mask], trace.end[mask])


def per_cta(trace: Trace, mask: Tensor) -> Spans:
    """Each CTA's own union of some events, on the one time axis."""
    shift = _shift(trace)[mask]
    apart = spans_of(trace, mask).shifted(shift).union()
    return apart.shifted(-(apart.start // (trace.span + 1)) * (trace.span + 1))


def share_over_time(spans: Spans, edges: Tensor, lanes: int) -> Tensor:
    """Mean number of ``spans`` at work, over ``lanes``, in each interval between the edges (ns, int64 ``[B + 1]``)."""
    covered = spans.before(edges)
    return (covered[1:] - covered[:-1]) / (edges[1:] - edges[:-1]).clamp(min=1) / max(lanes, 1)


def edges_of(trace: Trace, count: int) -> Tensor:
    """Bounds of ``count`` equal intervals of the kernel's time."""
    return torch.linspace(0, trace.span, count + 1, dtype=torch.float64).round().to(torch.int64)


def _shift(trace: Trace) -> Tensor:
    # Apart by more than the whole time, so that spans of two CTAs never meet.
    return trace.cta * (trace.span + 1)


def _role_share(trace: Trace, role: int) -> RoleShare:
    whole = trace.span * len(trace.ctas)
    percent = {
        state: 100 * per_cta(trace, trace.where(kinds_in(state), role)).length() / whole if whole else 0.0
        for state in State
    }
    return RoleShare(ROLES[role], percent)


def _kind_times(trace: Trace, kind: Kind) -> KindTimes | None:
    mask = trace.where([kind])
    times = (trace.end - trace.start)[mask].double() * 1e-3
    if not len(times):
        return None
    return KindTimes(kind, len(times), float(times.mean()), float(times.median()), float(times.max()))


def _overlap(trace: Trace, part: str) -> Overlap | None:
    busy_mask = trace.where(kinds_in(State.COPY, part))
    busy = spans_of(trace, busy_mask)
    length = busy.length()
    if not length:
        return None
    products = trace.where(kinds_in(State.PRODUCTS))
    own = spans_of(trace, products)
    shift = _shift(trace)

    def percent(parts: Tensor) -> float:
        return 100 * float(parts.sum()) / length

    return Overlap(
        part=part,
        busy_us=length * 1e-3,
        device=percent(own.union().within(busy)),
        same_cta=percent(own.shifted(shift[products]).union().within(busy.shifted(shift[busy_mask]))),
        ctas=percent(per_cta(trace, products).within(busy)) / len(trace.ctas),
    )


def _products(trace: Trace) -> Products | None:
    mask = trace.where(kinds_in(State.PRODUCTS))
    if not bool(mask.any()):
        return None
    spans, lanes = per_cta(trace, mask), len(trace.ctas)
    first, last = int(spans.start.min()) * 1e-3, int(spans.end.max()) * 1e-3
    deciles = share_over_time(spans, edges_of(trace, DECILES), lanes)
    return Products(
        first_start=first,
        last_end=last,
        head=first,
        tail=trace.span * 1e-3 - last,
        busy_percent=100 * spans.length() / max(trace.span * lanes, 1),
        deciles=tuple(100 * share for share in deciles.tolist()),
    )
