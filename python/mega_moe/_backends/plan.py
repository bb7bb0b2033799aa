"""The choice of a backend for one buffer, made once and alike on all ranks, and the executor it leads to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_moe._backends.arithmetic import Arithmetic
from mega_moe._backends.control import Control
from mega_moe._backends.decide import Verdict, check_name, choose, decide, why_no_kernel_router
from mega_moe._backends.facts import RankFacts
from mega_moe._backends.grouped import GroupedArithmetic
from mega_moe._backends.plain import PlainExecutor
from mega_moe._backends.reference import ReferenceArithmetic
from mega_moe._backends.request import Request
from mega_moe._backends.router import KernelRouter, Router, TorchRouter
from mega_moe._backends.staging import KernelStager, Stager, TorchStager
from mega_moe._backends.symmetric import (
    Shape,
    allocate,
    of_group,
    of_one_rank,
    symmetric_layout,
    workspace_layout,
)
from mega_moe._backends.transport import GroupTransport, LocalTransport, Transport
from mega_moe._base import env
from mega_moe._base.errors import BackendRefusedError, FallbackWarning, MegaMoEError

_warned: set[str] = set()


@dataclass(frozen=True)
class Explanation:
    """Every backend judged for one request, and the choice."""

    request: Request
    verdicts: tuple[Verdict, ...]
    chosen: str | None

    def verdict(self, backend: str) -> Verdict:
        (found,) = (v for v in self.verdicts if v.backend == backend)
        return found

    @property
    def reason(self) -> str:
        """One line: what was chosen, and why not the fused backend where it is not."""
        if self.chosen is None:
            return "no backend is chosen"
        fused = self.verdict("fused")
        return self.chosen if fused.accepted else f"{self.chosen}, since {fused}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.request.as_dict(),
            "chosen": self.chosen,
            "verdicts": [
                {"backend": v.backend, "accepted": v.accepted, "reasons": list(v.reasons)}
                for v in self.verdicts
            ],
        }

    def __str__(self) -> str:
        return "\n".join([*(str(v) for v in self.verdicts), f"chosen: {self.chosen or 'none'}"])


def wanted(backend: str) -> str | None:
    """The backend that must be used: the argument's, for 'auto' that of MEGA_MOE_BACKEND; None: the first that fits."""
    named = check_name("backend", backend)
    outside = env.backend()
    return named if named is not None or outside is None else check_name("MEGA_MOE_BACKEND", outside)


def wanted_strict(strict: bool | None) -> bool:
    """Whether falling back is forbidden: the argument, for None MEGA_MOE_STRICT."""
    if strict is None:
        return env.strict()
    if not isinstance(strict, bool):
        raise TypeError(f"strict: got {strict!r} ({type(strict).__name__}), want True, False or None")
    return strict


def explain(
    request: Request, facts: Sequence[RankFacts], named: str | None = None, strict: bool = False
) -> Explanation:
    """Judge and choose; BackendRefusedError when nothing, or not the named backend, can serve the request."""
    verdicts = decide(request, facts, named)
    return Explanation(request, verdicts, choose(verdicts, named, strict).backend)


def forecast(
    request: Request, facts: Sequence[RankFacts], named: str | None = None, strict: bool = False
) -> Explanation:
    """As `explain`, with None for the choice where that raises."""
    try:
        return explain(request, facts, named, strict)
    except BackendRefusedError:
        return Explanation(request, decide(request, facts, named), None)


def warn_fallback(explanation: Explanation) -> None:
    """Once per reason and process: the automatic choice is not the fused backend."""
    message = f"mega_moe uses the backend {explanation.reason}"
    if explanation.chosen != "fused" and message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)


def build_executor(
    explanation: Explanation,
    facts: RankFacts,
    device: torch.device,
    control: Control,
    group: Any,
    staging: Tensor | None = None,
) -> PlainExecutor:
    """The executor of the chosen backend on this rank; ``staging``: memory for the staging kernel, if there is some."""
    request = explanation.request
    makers: dict[str | None, Callable[[], Arithmetic]] = {
        "grouped": GroupedArithmetic,
        "reference": lambda: ReferenceArithmetic(request.precision),
    }
    if explanation.chosen not in makers:
        raise MegaMoEError(f"the backend {explanation.chosen!r} was chosen, but this version cannot run it")
    arithmetic = makers[explanation.chosen]()
    transport: Transport = LocalTransport() if group is None else GroupTransport(group)
    return PlainExecutor(request, arithmetic, _stager(request, facts, device, staging), control, transport)


def build_router(
    request: Request,
    everyone: Sequence[RankFacts],
    device: torch.device,
    control: Control,
    group: Any,
    progress_timeout: float,
) -> tuple[Router, str | None]:
    """Collective. The routing kernel where all ranks can run it, else plain operators and the reason why."""
    reasons = why_no_kernel_router(request, everyone)
    if reasons:
        return TorchRouter(request, control), "; ".join(reasons)
    shape = _shape(request)
    nbytes = symmetric_layout(shape).total
    memory = of_one_rank(nbytes, device) if group is None else of_group(nbytes, device, group, control)
    return KernelRouter(
        shape,
        control.rank,
        memory,
        num_sms=(everyone[control.rank].num_sms or 0) - request.num_reserved_sms,
        arrival_timeout=progress_timeout if control.timeout is None else control.timeout,
        progress_timeout=progress_timeout,
    ), None


def buffer_nbytes(request: Request) -> int:
    """Bytes that a buffer holds on a GPU that runs the kernels: the part that peers reach, and the workspace."""
    shape = _shape(request)
    return symmetric_layout(shape).total + workspace_layout(shape).total


def _shape(request: Request) -> Shape:
    # The staging area is laid out for x in bf16, which every precision stages in one direction and which is the larger.
    return Shape(
        request.max_tokens_per_rank,
        request.top_k,
        request.num_experts,
        request.hidden,
        request.num_ranks,
        canaries=env.debug(),
    )


def _staging_nbytes(request: Request) -> int:
    """Bytes of the staging area: the larger of the forms of x that the precision needs."""
    size = request.max_tokens_per_rank, request.top_k, request.hidden
    return max(KernelStager.nbytes(*size, form == "fp8") for form in _staged_forms(request))


def _staged_forms(request: Request) -> tuple[str, ...]:
    # The backward of fp8 stages x in bf16: the weight gradients read it so.
    return ("bf16", "fp8") if request.precision == "fp8" else ("bf16",)


def _stager(request: Request, facts: RankFacts, device: torch.device, memory: Tensor | None) -> Stager:
    """The staging kernel where the wheel holds it in every form that is needed, else plain operators."""
    plain = TorchStager(request.num_experts)
    if device.type != "cuda" or facts.compute_capability is None:
        return plain
    architecture = "{}{}".format(*facts.compute_capability)
    served = {
        v.precision
        for v in facts.variants
        if v.op == "stage"
        and v.architecture.rstrip("af") == architecture
        and request.hidden % v.hidden_multiple == 0
    }
    if not served.issuperset(_staged_forms(request)):
        return plain
    if memory is None:
        memory = allocate(_staging_nbytes(request), device)
    return KernelStager(
        memory, request.max_tokens_per_rank, request.num_experts, request.top_k, request.hidden, plain
    )
