"""The choice of a backend for one buffer, made once and alike on all ranks, and the executor it leads to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_moe._backends import deep_gemm_library
from mega_moe._backends.arithmetic import Arithmetic
from mega_moe._backends.control import Control
from mega_moe._backends.decide import (
    Verdict,
    check_name,
    choose,
    decide,
    holds_backward,
    why_no_fused_shape,
    why_no_kernel_router,
)
from mega_moe._backends.deep_gemm import DeepGemmArithmetic
from mega_moe._backends.executor import LayerExecutor
from mega_moe._backends.facts import RankFacts, variants
from mega_moe._backends.fused import FusedExecutor
from mega_moe._backends.grouped import GroupedArithmetic
from mega_moe._backends.kernel_build import build_kernel_rank, kernel_nbytes
from mega_moe._backends.kernel_rank import KernelRank
from mega_moe._backends.kernel_router import KernelRouter
from mega_moe._backends.plain import PlainExecutor
from mega_moe._backends.reference import ReferenceArithmetic
from mega_moe._backends.request import Request
from mega_moe._backends.router import Router, TorchRouter
from mega_moe._backends.saved import SavedRows
from mega_moe._backends.staging import KernelStager, Stager, TorchStager
from mega_moe._backends.symmetric import allocate
from mega_moe._backends.transport import GroupTransport, LocalTransport, Transport
from mega_moe._backends.weight_copies import copies_nbytes
from mega_moe._base import env
from mega_moe._base.errors import BackendRefusedError, FallbackWarning, MegaMoEError

_warned: set[str] = set()


@dataclass(frozen=True)
class Explanation:
    """Every backend judged for one request, and the choice; ``refusal`` says why there is none."""

    request: Request
    verdicts: tuple[Verdict, ...]
    chosen: str | None
    refusal: str | None = None

    def verdict(self, backend: str) -> Verdict:
        (found,) = (v for v in self.verdicts if v.backend == backend)
        return found

    @property
    def reason(self) -> str:
        """One line: what was chosen, and why not the fused backend where it is not."""
        if self.chosen is None:
            return f"no backend is chosen: {self.refusal}"
        fused = self.verdict("fused")
        if self.chosen == "fused":
            return "fused" if fused.note is None else f"fused; {fused.note}"
        return self.chosen if fused.accepted else f"{self.chosen}, since {fused}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.request.as_dict(),
            "chosen": self.chosen,
            "refusal": self.refusal,
            "verdicts": [v.as_dict() for v in self.verdicts],
        }

    def __str__(self) -> str:
        chosen = self.chosen or f"none: {self.refusal}"
        return "\n".join([*(str(v) for v in self.verdicts), f"chosen: {chosen}"])


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
    except BackendRefusedError as error:
        # Its first line; the others list the verdicts.
        refusal = str(error).splitlines()[0].rstrip(":")
        return Explanation(request, decide(request, facts, named), None, refusal)


def warn_fallback(explanation: Explanation) -> None:
    """Once per reason and process: the automatic choice is not the fused backend, or not fused in both directions and
    slow for it."""
    message = f"mega_moe uses the backend {explanation.reason}"
    slow = explanation.chosen != "fused" or (
        explanation.verdict("fused").note is not None and explanation.request.backward_precision != "bf16"
    )
    if slow and message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)


def build_kernels(
    explanation: Explanation,
    everyone: Sequence[RankFacts],
    device: torch.device,
    control: Control,
    group: Any,
    progress_timeout: float,
) -> tuple[KernelRank | None, str | None]:
    """Collective. The memory of the kernels where all ranks can run them, else the reason why they cannot."""
    request = explanation.request
    reasons = why_no_kernel_router(request, everyone)
    if reasons:
        return None, "; ".join(reasons)
    num_sms = (everyone[control.rank].num_sms or 0) - request.num_reserved_sms
    fused = explanation.chosen == "fused"
    # A note says that something else serves the backward.
    backward = fused and explanation.verdict("fused").note is None
    return build_kernel_rank(
        request, fused, backward, num_sms, device, control, group, progress_timeout
    ), None


def build_router(request: Request, control: Control, kernels: KernelRank | None) -> Router:
    """The routing kernel where there is memory for it, else plain operators."""
    return TorchRouter(request, control) if kernels is None else KernelRouter(kernels)


def build_executor(
    explanation: Explanation,
    facts: RankFacts,
    device: torch.device,
    control: Control,
    group: Any,
    kernels: KernelRank | None,
) -> LayerExecutor:
    """The executor of the chosen backend on this rank."""
    request = explanation.request
    makers: dict[str | None, Callable[[], Arithmetic]] = {
        "fused": _stand_in(request),
        "deep_gemm": lambda: DeepGemmArithmetic(deep_gemm_library.require()),
        "grouped": GroupedArithmetic,
        "reference": lambda: _reference(request),
    }
    fused = explanation.chosen == "fused"
    if explanation.chosen not in makers or (fused and kernels is None):
        raise MegaMoEError(f"the backend {explanation.chosen!r} was chosen, but this process cannot run it")
    transport: Transport = LocalTransport() if group is None else GroupTransport(group)
    # The fused backend's backward keeps off the staging area, from which a forward on another stream may be reading.
    plain_stager = TorchStager(request.num_experts, request.power_of_two)
    memory = None if kernels is None else kernels.staging
    stager = plain_stager if fused else _stager(request, facts, device, memory, plain_stager)
    plain = PlainExecutor(request, makers[explanation.chosen](), stager, control, transport)
    return FusedExecutor(kernels, plain) if fused and kernels is not None else plain


def saved_rows(kernels: KernelRank | None, share: float) -> SavedRows:
    """Room for gate and up between the fused kernels of both directions; none where those do not serve the calls, or
    make gate and up in fp8."""
    if kernels is None or kernels.shape.mode.backward != "bf16":
        return SavedRows(0, 0, 0, 0, 0)
    return SavedRows.of(kernels.shape, share)


def _stand_in(request: Request) -> Callable[[], Arithmetic]:
    """Of the fused backend's backward, where the wheel holds no kernel for it."""
    if request.backward_precision == "bf16":
        return GroupedArithmetic
    return lambda: _reference(request)


def _reference(request: Request) -> ReferenceArithmetic:
    return ReferenceArithmetic(request.precision, request.dw_precision, power_of_two=request.power_of_two)


def buffer_nbytes(request: Request, backend: str | None = None, training: bool = True) -> int:
    """Bytes that a buffer holds on a GPU that runs the kernels; ``backend``: the user's wish.

    ``training``: with what the backward kernel needs, where the wheel holds one.

    Raises BackendRefusedError where the fused backend is wished for and no device could serve the request.
    """
    held = variants()
    reasons = why_no_fused_shape(request, held) if backend in (None, "fused") else ["not wished for"]
    if backend == "fused" and reasons:
        raise BackendRefusedError(f"backend 'fused' cannot serve this request: {'; '.join(reasons)}")
    backward = training and holds_backward(request, held)
    copies = 0 if reasons else _copies_nbytes(request, backward)
    return kernel_nbytes(request, not reasons, backward) + copies


def _copies_nbytes(request: Request, backward: bool) -> int:
    """Bytes of the e4m3 weights that one call of the fused kernels makes: the larger of both directions."""
    experts, hidden, inner = request.num_local_experts, request.hidden, request.intermediate

    def both_weights(of_gate_up: int, of_down: int) -> int:
        return copies_nbytes(experts, 2 * inner, hidden, copies=of_gate_up) + copies_nbytes(
            experts, hidden, inner, copies=of_down
        )

    forward = both_weights(1, 1) if request.forward_precision == "fp8" else 0
    # Gate and up again, the gradient of x, and that of h.
    return max(forward, both_weights(2, 1)) if backward and request.backward_precision == "fp8" else forward


def _staging_nbytes(request: Request) -> int:
    """Bytes of the staging area: the larger of the forms of x that the precision needs."""
    size = request.max_tokens_per_rank, request.top_k, request.hidden
    return max(KernelStager.nbytes(*size, form == "fp8") for form in _staged_forms(request))


def _staged_forms(request: Request) -> tuple[str, ...]:
    # The backward of fp8 stages x in bf16: the weight gradients read it so.
    return ("bf16", "fp8") if request.precision == "fp8" else ("bf16",)


def _stager(
    request: Request, facts: RankFacts, device: torch.device, memory: Tensor | None, plain: TorchStager
) -> Stager:
    """The staging kernel where the wheel holds it in every form that is needed, else ``plain``."""
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
