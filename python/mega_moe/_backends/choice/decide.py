"""Which backends can serve a request: a pure function of (request, facts of all ranks). No torch, no device, no file.

A backend is refused with every reason that applies, so that a person mends them in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mega_moe._base.errors import BackendRefusedError
from mega_moe._base.types import DISPATCHERS, MAX_RANKS, SCALE_BLOCK

if TYPE_CHECKING:
    from mega_moe._backends.choice.facts import RankFacts, Variant
    from mega_moe._backends.choice.request import Request

# In the order of preference of the automatic choice.
BACKENDS = ("fused", "dispatched", "deep_gemm", "grouped", "reference")

# One cluster of two SMs is the least that a fused kernel runs on.
FUSED_MIN_SMS = 2
# torch's grouped GEMM reads rows in 16-byte pieces: 8 bf16 numbers.
GROUPED_MULTIPLE = 8
# The routing kernel takes only whole 16-byte pieces too.
ROUTE_MULTIPLE = 8
# DeepGEMM's grouped GEMMs advance along K in steps of 64 bf16 numbers, and tile outputs likewise.
DEEP_GEMM_MULTIPLE = 64
# Compute capabilities for which it has bf16 grouped GEMMs in all three layouts.
DEEP_GEMM_CAPABILITIES = ((9, 0), (10, 0))

_WHAT_TO_INSTALL = ": `mega-moe doctor` says what to install"
_NO_MXFP8 = "precision mxfp8 needs Blackwell kernels, which do not exist yet"
# What stands in for a backward kernel, by its precision: the numerics are the same.
_STAND_INS = {
    "bf16": "runs on torch's grouped GEMMs",
    "fp8": "is emulated by plain operators, slowly",
}


@dataclass(frozen=True)
class Verdict:
    """One backend judged: ``reasons`` is empty exactly when it is accepted; ``note`` says what it leaves to another."""

    backend: str
    reasons: tuple[str, ...] = ()
    note: str | None = None

    @property
    def accepted(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"accepted": self.accepted, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        if not self.accepted:
            return f"{self.backend}: refused: " + "; ".join(self.reasons)
        return f"{self.backend}: accepted" + (f"; {self.note}" if self.note else "")


def decide(request: Request, facts: Sequence[RankFacts], named: str | None = None) -> tuple[Verdict, ...]:
    """Judge every backend for ``request`` on ranks with ``facts`` (one entry per rank); ``named``: the user's wish."""
    judges = {
        "fused": _fused(request, facts),
        "dispatched": _dispatched(request, facts, named),
        "deep_gemm": _deep_gemm(request, facts),
        "grouped": _grouped(request, facts),
        "reference": _reference(request, facts, named),
    }
    notes = {"fused": stand_in, "dispatched": _experts}
    verdicts = (Verdict(name, tuple(dict.fromkeys(judges[name]))) for name in BACKENDS)
    return tuple(
        replace(v, note=notes[v.backend](request, facts)) if v.accepted and v.backend in notes else v
        for v in verdicts
    )


def choose(verdicts: Sequence[Verdict], named: str | None = None, strict: bool = False) -> Verdict:
    """The named backend, or the first accepted one; BackendRefusedError with the whole list of reasons otherwise."""
    listed = "\n".join(f"  {v}" for v in verdicts)
    if named is not None:
        (verdict,) = (v for v in verdicts if v.backend == named)
        if not verdict.accepted:
            raise BackendRefusedError(f"backend {named!r} cannot serve this request:\n{listed}")
        return verdict
    accepted = [v for v in verdicts if v.accepted]
    if not accepted:
        raise BackendRefusedError(f"no backend can serve this request:\n{listed}")
    if strict and accepted[0].backend != "fused":
        raise BackendRefusedError(f"strict mode forbids falling back to {accepted[0].backend!r}:\n{listed}")
    return accepted[0]


def why_no_kernel_router(request: Request, facts: Sequence[RankFacts]) -> list[str]:
    """Every reason against the routing kernel on ranks with ``facts``; empty when all can run it."""
    shape = _multiples(request, hidden=ROUTE_MULTIPLE)
    device = _of_ranks(facts, lambda fact: _route_device(request, fact))
    return [*shape, *_num_ranks(request), *device, *_links(facts)]


def check_name(name: str, backend: str) -> str | None:
    """None for 'auto', the backend itself when it exists; ValueError otherwise."""
    if backend == "auto":
        return None
    if backend not in BACKENDS:
        raise ValueError(f"{name}: got {backend!r}, want auto, {', '.join(BACKENDS)}")
    return backend


def why_no_fused_experts(request: Request, facts: Sequence[RankFacts]) -> list[str]:
    """Every reason against the fused kernels where each rank runs them for its own experts alone (EP=1)."""
    shape = [_NO_MXFP8] if request.precision == "mxfp8" else []
    shape += _fused_shape(request, [v for fact in facts for v in fact.variants])
    return [*shape, *_of_ranks(facts, lambda fact: _fused_device(request, fact))]


def _fused(request: Request, facts: Sequence[RankFacts]) -> Iterator[str]:
    yield from why_no_fused_experts(request, facts)
    yield from _num_ranks(request)
    yield from _links(facts)
    if stand_in(request, facts) is not None:
        yield from _group(facts)


def why_no_fused_shape(request: Request, variants: Sequence[Variant], *, alone: bool = False) -> list[str]:
    """Every reason in ``request`` itself against a wheel with ``variants``; empty where some device could serve it.

    ``alone``: each rank runs the kernels for its own experts (EP=1).
    """
    lacking = [need for need in _needed(request) if not any(v.computes(*need) for v in variants)]
    kernels = [f"this wheel holds no {_called(op)} kernel in {precision}" for op, precision in lacking]
    return [*_fused_shape(request, variants), *kernels, *([] if alone else _num_ranks(request))]


def holds_backward(request: Request, variants: Sequence[Variant]) -> bool:
    """Whether a wheel with ``variants`` has a fused backward kernel for some device."""
    return any(v.computes("backward", request.backward_precision, request.dw_precision) for v in variants)


def _needed(request: Request) -> Iterator[tuple[str, str]]:
    """Kernels besides the routing, as (op, precision), without which the fused backend cannot serve ``request``."""
    yield "forward", request.forward_precision
    if request.forward_precision == "fp8":
        yield "quantize_weights", "fp8"
    if request.backward_precision not in _STAND_INS:
        yield "backward", request.backward_precision


def _called(op: str) -> str:
    return {"quantize_weights": "weight-quantizing"}.get(op, f"fused {op}")


def _fused_shape(request: Request, variants: Sequence[Variant]) -> Iterator[str]:
    """What ``variants`` cannot serve in any device: the dtype, and extents that no tile of a forward kernel divides."""
    if request.dtype != "bfloat16":
        yield f"takes bfloat16 inputs, got {request.dtype}"
    lacks = [
        list(_multiples(request, hidden=v.hidden_multiple, intermediate=v.intermediate_multiple))
        for v in variants
        if v.computes("forward", request.forward_precision)
    ]
    yield from min(lacks, key=len, default=[])  # of the kernel that divides most of them


def _multiples(request: Request, shown: str | None = None, **multiples: int) -> Iterator[str]:
    """Extents of ``request`` that are no multiple of what is asked; ``shown``: the multiple in words."""
    for name, multiple in multiples.items():
        if getattr(request, name) % multiple:
            yield f"{name} is {getattr(request, name)}, must be a multiple of {shown or multiple}"


def _of_ranks(facts: Sequence[RankFacts], judge: Callable[[RankFacts], Iterator[str]]) -> Iterator[str]:
    """The reasons of each rank, under its number where there are several."""
    for rank, fact in enumerate(facts):
        for reason in judge(fact):
            yield f"rank {rank}: {reason}" if len(facts) > 1 else reason


def stand_in(request: Request, facts: Sequence[RankFacts]) -> str | None:
    """What serves the backward where a rank's wheel holds no kernel for it."""
    precision = request.backward_precision
    if precision not in _STAND_INS or all(_backward(request, fact) for fact in facts):
        return None
    dw = " with dw_precision fp8" if request.dw_precision == "fp8" else ""
    return f"the backward {_STAND_INS[precision]}, since this wheel holds no fused backward kernel in {precision}{dw}"


def _backward(request: Request, fact: RankFacts) -> bool:
    precision = request.backward_precision
    return _holds("backward", precision, fact, request.dw_precision) and (
        precision != "fp8" or _holds("quantize_weights", precision, fact)
    )


def _route_device(request: Request, fact: RankFacts) -> Iterator[str]:
    if not fact.library_loaded:
        yield f"the compiled library is not loaded: {fact.library_reason}"
    if fact.device_type != "cuda" or fact.compute_capability is None:
        yield f"needs an NVIDIA GPU, the device is {fact.device}"
        return
    if not _holds("route", "none", fact):
        yield f"this wheel holds no routing kernel for sm_{_capability(fact)}"
    if (fact.num_sms or 0) <= request.num_reserved_sms:
        yield f"num_reserved_sms={request.num_reserved_sms} leaves none of {fact.num_sms} SMs"


def _fused_device(request: Request, fact: RankFacts) -> Iterator[str]:
    if not fact.library_loaded:
        yield f"the compiled library is not loaded: {fact.library_reason}"
    if fact.device_type != "cuda":
        yield f"needs an NVIDIA GPU, the device is {fact.device}"
        return
    if fact.library_loaded:
        yield from _wheel(request, fact)
    left = (fact.num_sms or 0) - request.num_reserved_sms
    if left < FUSED_MIN_SMS:
        yield (
            f"num_reserved_sms={request.num_reserved_sms} leaves {left} of {fact.num_sms} SMs, needs {FUSED_MIN_SMS}"
        )


def _wheel(request: Request, fact: RankFacts) -> Iterator[str]:
    device = _capability(fact)
    serving = [a for a in fact.library_architectures if a.rstrip("af") == device]
    if not serving:
        holds = ", ".join(f"sm_{a}" for a in fact.library_architectures) or "none"
        yield f"the device is sm_{device} ({fact.device_name}), this wheel holds {holds}{_WHAT_TO_INSTALL}"
    else:
        if not _holds("route", "none", fact):
            yield f"this wheel holds no routing kernel for sm_{device}"
        for op, precision in _needed(request):
            if not _holds(op, precision, fact):
                yield f"this wheel holds no {_called(op)} kernel in {precision} for sm_{serving[0]}"
    # A cubin of CUDA n needs a driver of CUDA n or later.
    if fact.library_cuda is not None and fact.driver_cuda is not None:
        have, built = fact.driver_cuda, fact.library_cuda
        if have[0] < int(built.split(".")[0]):
            yield f"the driver serves CUDA {have[0]}.{have[1]}, this wheel is built with CUDA {built}{_WHAT_TO_INSTALL}"


def _capability(fact: RankFacts) -> str:
    return "{}{}".format(*(fact.compute_capability or (0, 0)))


def _holds(op: str, precision: str, fact: RankFacts, wgrad: str = "none") -> bool:
    """Whether the wheel of ``fact`` has such a kernel for its device."""
    # An 'a' cubin runs on exactly its own compute capability, whatever the major number says.
    return any(
        v.computes(op, precision, wgrad) and v.architecture.rstrip("af") == _capability(fact)
        for v in fact.variants
    )


def _num_ranks(request: Request) -> Iterator[str]:
    if request.num_ranks > MAX_RANKS:
        yield f"the group has {request.num_ranks} ranks, one kernel spans at most {MAX_RANKS}"


def _links(facts: Sequence[RankFacts]) -> Iterator[str]:
    """Every reason why the ranks cannot reach one another's memory."""
    machines: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        machines.setdefault(fact.machine or fact.host, []).append(rank)
    if len(machines) > 1:
        listed = ", ".join(f"{facts[ranks[0]].host}: ranks {ranks}" for ranks in machines.values())
        yield f"the group spans {len(machines)} hosts ({listed}); expert parallelism must stay inside one NVLink domain"
    for rank, fact in enumerate(facts):
        for other in range(rank + 1, len(facts)):
            uuid = facts[other].device_uuid
            if uuid is None or fact.device_uuid is None:
                continue
            if uuid == fact.device_uuid:
                yield f"ranks {rank} and {other} share the GPU {uuid}; each rank needs a GPU of its own"
            # Either may be the one that sees both: a rank whose visible devices are masked knows of no other GPU.
            elif (uuid, False) in fact.peer_access or (fact.device_uuid, False) in facts[other].peer_access:
                yield f"ranks {rank} and {other}: no peer access between {fact.device} and {facts[other].device}"


def _dispatched(request: Request, facts: Sequence[RankFacts], named: str | None) -> Iterator[str]:
    fused, plain = why_no_fused_experts(request, facts), list(dict.fromkeys(_grouped(request, facts)))
    if fused and (plain or named != "dispatched"):
        yield f"no fused experts at EP=1: {'; '.join(dict.fromkeys(fused))}"
        yield f"no grouped experts: {'; '.join(plain) or 'they serve where dispatched is named'}"
    if named != "dispatched" and not any(_links(facts)) and not any(_num_ranks(request)):
        yield "is for ranks outside one NVLink domain: name it (backend='dispatched') to use it inside"
    if request.dispatcher in DISPATCHERS[1:]:
        yield from _engine(request, facts)
    yield from _group(facts)


def _engine(request: Request, facts: Sequence[RankFacts]) -> Iterator[str]:
    name = request.dispatcher
    if request.dtype != "bfloat16":
        yield f"dispatcher {name} moves bfloat16, got {request.dtype}"
    if request.num_ranks == 1:
        yield f"dispatcher {name}: needs a process group of several ranks"
    for reason in _of_ranks(facts, _engine_of):
        yield f"dispatcher {name}: {reason}"
    versions = {rank: fact.engine_version for rank, fact in enumerate(facts)}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"rank {rank}: {version}" for rank, version in versions.items())
        yield f"dispatcher {name}: the ranks have different versions ({listed})"


def _engine_of(fact: RankFacts) -> Iterator[str]:
    if fact.device_type != "cuda":
        yield f"needs an NVIDIA GPU, the device is {fact.device}"
    elif fact.engine_version is None:
        yield str(fact.engine_reason)


def _experts(request: Request, facts: Sequence[RankFacts]) -> str:
    """Which experts the backend `dispatched` runs, and what moves their tokens."""
    head, fused = f"dispatcher {request.dispatcher}, experts by", why_no_fused_experts(request, facts)
    if fused:
        return f"{head} grouped, since no fused experts at EP=1: {'; '.join(dict.fromkeys(fused))}"
    without = stand_in(request, facts)
    return f"{head} fused at EP=1" + (f"; {without}" if without else "")


def _deep_gemm(request: Request, facts: Sequence[RankFacts]) -> Iterator[str]:
    if request.precision != "bf16":
        yield f"computes in bf16 only, precision {request.precision} is not emulated"
    if request.dtype != "bfloat16":
        yield f"takes bfloat16 inputs, got {request.dtype}"
    yield from _multiples(request, hidden=DEEP_GEMM_MULTIPLE, intermediate=DEEP_GEMM_MULTIPLE)
    yield from _of_ranks(facts, _deep_gemm_device)
    versions = {r: fact.deep_gemm_version for r, fact in enumerate(facts) if fact.device_type == "cuda"}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"rank {rank}: {version}" for rank, version in versions.items())
        yield f"the ranks have different versions of DeepGEMM ({listed})"
    yield from _group(facts)


def _deep_gemm_device(fact: RankFacts) -> Iterator[str]:
    if fact.device_type != "cuda":
        yield f"needs an NVIDIA GPU, the device is {fact.device}"
        return
    if fact.compute_capability not in DEEP_GEMM_CAPABILITIES:
        known = " and ".join("sm_{}{}".format(*c) for c in DEEP_GEMM_CAPABILITIES)
        yield f"DeepGEMM serves {known}, the device is sm_{_capability(fact)}"
    if fact.deep_gemm_version is None:
        yield str(fact.deep_gemm_reason)


def _grouped(request: Request, facts: Sequence[RankFacts]) -> Iterator[str]:
    if request.precision != "bf16":
        yield f"computes in the inputs' dtype only, precision {request.precision} is not emulated"
    if request.dtype not in ("bfloat16", "float32"):
        yield f"takes bfloat16 and float32 inputs, got {request.dtype}"
    if any(fact.device_type == "cuda" for fact in facts) and request.dtype == "bfloat16":
        yield from _multiples(
            request, f"{GROUPED_MULTIPLE} on a GPU", hidden=GROUPED_MULTIPLE, intermediate=GROUPED_MULTIPLE
        )
    yield from _plain(facts)


def _reference(request: Request, facts: Sequence[RankFacts], named: str | None) -> Iterator[str]:
    if request.precision == "mxfp8":
        yield _NO_MXFP8
    elif request.precision != "bf16":
        yield from _multiples(
            request, f"the scale block {SCALE_BLOCK}", hidden=SCALE_BLOCK, intermediate=SCALE_BLOCK
        )
        if named != "reference":
            yield f"emulates precision {request.precision} slowly: name it (backend='reference') to use it"
    yield from _plain(facts)


def _plain(facts: Sequence[RankFacts]) -> Iterator[str]:
    """What the plain torch backends need: a device that they know, and a group that can move its tensors."""
    for fact in facts:
        if fact.device_type not in ("cpu", "cuda"):
            yield f"runs on cpu and cuda, the device is {fact.device}"
    yield from _group(facts)


def _group(facts: Sequence[RankFacts]) -> Iterator[str]:
    for fact in facts:
        needed = {"cuda": "nccl", "cpu": "gloo"}.get(fact.device_type)
        if fact.group_backend is not None and needed is not None and needed not in fact.group_backend:
            yield f"the process group is {fact.group_backend}, {fact.device_type} tensors need {needed}"
