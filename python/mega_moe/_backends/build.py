"""From the choice to what serves a buffer's calls on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from mega_moe._backends.choice.decide import stand_in, why_no_fused_experts, why_no_kernel_router
from mega_moe._backends.choice.explanation import Explanation
from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.choice.request import Request
from mega_moe._backends.deep_gemm import library as deep_gemm_library
from mega_moe._backends.deep_gemm.arithmetic import DeepGemmArithmetic
from mega_moe._backends.dispatched import packages
from mega_moe._backends.dispatched.collectives import CollectiveDispatcher
from mega_moe._backends.dispatched.deep_ep import DeepEpDispatcher
from mega_moe._backends.dispatched.executor import DispatchedExecutor
from mega_moe._backends.dispatched.nccl_ep import NcclEpDispatcher
from mega_moe._backends.dispatched.protocol import Dispatcher
from mega_moe._backends.fused.executor import FusedExecutor
from mega_moe._backends.fused.launch import KernelRank
from mega_moe._backends.fused.memory import of_group, of_virtual_ranks, symmetric_layout
from mega_moe._backends.fused.prequantized import PrequantizedLayer
from mega_moe._backends.fused.rows import SavedRows
from mega_moe._backends.fused.weight_copies import WeightCopies
from mega_moe._backends.group import Control
from mega_moe._backends.nbytes import expert_shape, expert_tokens, kernel_shape
from mega_moe._backends.plain.arithmetic import Arithmetic
from mega_moe._backends.plain.executor import PlainExecutor
from mega_moe._backends.plain.grouped import GroupedArithmetic
from mega_moe._backends.plain.reference import ReferenceArithmetic
from mega_moe._backends.plain.router import TorchRouter
from mega_moe._base.errors import MegaMoEError
from mega_moe._ops import registry


@dataclass
class Session:
    """What serves a buffer's calls on this rank. The kernels, where all ranks can run them, route for any backend."""

    executor: registry.Executor
    router: KernelRank | TorchRouter
    router_reason: str | None  # why plain operators route
    saved_rows: SavedRows
    weight_copies: WeightCopies | None  # None where no kernel reads e4m3 weights
    prequantized: (
        PrequantizedLayer | None
    )  # None where no kernel takes operands that the caller has quantized
    experts: KernelRank | None = None  # of the fused kernels behind a dispatcher

    def __post_init__(self) -> None:
        self.handle = registry.register(self.executor)

    def refuse_routing(self, error: Exception, num_tokens: int) -> None:
        """Let the other ranks' call of ``mega_moe.route`` end in PeerError, as this rank raises ``error`` instead."""
        if isinstance(self.router, KernelRank):
            self.router.refuse(num_tokens)
        else:
            self.router.refuse(error)

    def check(self) -> None:
        """Wait for the device and raise what past launches reported."""
        self.router.check()
        if self.experts is not None:
            self.experts.check()

    def close(self) -> None:
        registry.unregister(self.handle)
        for kernels in (self.router, self.experts):
            if isinstance(kernels, KernelRank):
                kernels.close()


def build(
    explanation: Explanation,
    everyone: Sequence[RankFacts],
    device: torch.device,
    control: Control,
    group: Any,
    progress_timeout: float,
    saved_share: float,
    dispatcher: Dispatcher | None = None,
) -> Session:
    """Collective over ``group``. ``dispatcher``: the caller's own."""
    request = explanation.request
    kernels, reason = build_kernels(explanation, everyone, device, control, group, progress_timeout)
    router = TorchRouter(request, control) if kernels is None else kernels
    if explanation.chosen == "dispatched":
        engine = dispatcher or build_dispatcher(request, control, group)
        served = build_dispatched(request, everyone, device, control, engine, progress_timeout)
        copies = served.experts.weight_copies if isinstance(served.experts, FusedExecutor) else None
        return Session(served, router, reason, SavedRows(), copies, None, served.kernels)
    executor = build_executor(explanation, control, group, kernels)
    saved, copies, prequantized = SavedRows(), None, None
    if isinstance(executor, FusedExecutor) and kernels is not None:
        mode, copies = kernels.shape.mode, executor.weight_copies
        saved = SavedRows.of(kernels.shape, saved_share) if mode.has_backward else saved
        prequantized = PrequantizedLayer(kernels) if mode.forward == mode.backward == "fp8" else None
    return Session(executor, router, reason, saved, copies, prequantized)


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
    shape = kernel_shape(request, explanation.chosen == "fused", explanation.has_fused_backward)
    nbytes = symmetric_layout(shape).total
    if group is None:
        (memory,) = of_virtual_ranks(nbytes, device, 1)
    else:
        memory = of_group(nbytes, device, group, control)
    kernels = KernelRank(
        shape,
        control.rank,
        memory,
        num_sms=(everyone[control.rank].num_sms or 0) - request.num_reserved_sms,
        arrival_timeout=progress_timeout if control.timeout is None else control.timeout,
        progress_timeout=progress_timeout,
    )
    return kernels, None


def build_dispatcher(request: Request, control: Control, group: Any) -> Dispatcher:
    """Collective. The engine that ``request`` names."""
    name, rank = request.dispatcher, control.rank
    try:
        if name == "deep_ep":
            return DeepEpDispatcher(packages.require(name), group, rank, request)
        if name == "nccl_ep":
            comm = import_module("nccl.ep.interop.torch").get_nccl_comm_from_group(group)
            return NcclEpDispatcher(packages.require(name), comm, rank, request)
    except Exception as error:
        # Whatever a package raises; the other ranks are told of this error alone.
        raise MegaMoEError(f"dispatcher {name}: {type(error).__name__}: {error}") from error
    return CollectiveDispatcher(rank, request.num_local_experts, group)


def build_dispatched(
    request: Request,
    everyone: Sequence[RankFacts],
    device: torch.device,
    control: Control,
    dispatcher: Dispatcher,
    progress_timeout: float,
) -> DispatchedExecutor:
    """This rank's experts behind ``dispatcher``: fused at EP=1 where all ranks have the kernels, else grouped."""
    fused, capacity = not why_no_fused_experts(request, everyone), expert_tokens(request)
    # One rank with the local experts; of its slots no executor asks for the number.
    local = request.num_local_experts
    alone = replace(
        request,
        num_experts=local,
        num_ranks=1,
        max_tokens_per_rank=capacity,
        top_k=min(request.top_k, local),
    )
    arithmetic = _stand_in(request) if fused else GroupedArithmetic()
    plain = PlainExecutor(alone, arithmetic, Control())
    if not fused:
        return DispatchedExecutor(request, control, dispatcher, plain, capacity)
    shape = expert_shape(request, stand_in(request, everyone) is None)
    (memory,) = of_virtual_ranks(symmetric_layout(shape).total, device, 1)
    kernels = KernelRank(
        shape,
        0,
        memory,
        num_sms=(everyone[control.rank].num_sms or 0) - request.num_reserved_sms,
        arrival_timeout=progress_timeout,
        progress_timeout=progress_timeout,
    )
    return DispatchedExecutor(request, control, dispatcher, FusedExecutor(kernels, plain), capacity, kernels)


def build_executor(
    explanation: Explanation, control: Control, group: Any, kernels: KernelRank | None
) -> FusedExecutor | PlainExecutor:
    """The executor of the chosen backend on this rank."""
    request = explanation.request
    makers: dict[str | None, Callable[[], Arithmetic]] = {
        "fused": lambda: _stand_in(request),
        "deep_gemm": lambda: DeepGemmArithmetic(deep_gemm_library.require()),
        "grouped": GroupedArithmetic,
        "reference": lambda: _reference(request),
    }
    fused = explanation.chosen == "fused"
    if explanation.chosen not in makers or (fused and kernels is None):
        raise MegaMoEError(f"the backend {explanation.chosen!r} was chosen, but this process cannot run it")
    plain = PlainExecutor(request, makers[explanation.chosen](), control, group)
    return FusedExecutor(kernels, plain) if fused and kernels is not None else plain


def _stand_in(request: Request) -> Arithmetic:
    """What serves the fused backend's backward where the wheel holds no kernel for it."""
    return GroupedArithmetic() if request.backward_precision == "bf16" else _reference(request)


def _reference(request: Request) -> ReferenceArithmetic:
    return ReferenceArithmetic(request.precision, request.dw_precision, power_of_two=request.power_of_two)
