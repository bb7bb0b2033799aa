"""The buffer: the fixed part of a mixture-of-experts layer, built once and shared by all layers that run in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from mega_moe._backends.build import Session, build
from mega_moe._backends.choice import explanation as choice
from mega_moe._backends.choice.decide import check_name
from mega_moe._backends.choice.facts import RankFacts, as_device, collect, default_device
from mega_moe._backends.choice.request import Request
from mega_moe._backends.dispatched.protocol import Dispatcher, dispatcher_name
from mega_moe._backends.fused.rows import check_share
from mega_moe._backends.group import Control, GroupControl, agree, as_group, check_timeout, confirm
from mega_moe._backends.nbytes import buffer_nbytes
from mega_moe._base import env
from mega_moe._base.activation import Activation, as_activation
from mega_moe._base.errors import MegaMoEError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_OF_REQUEST = (
    *("num_experts", "num_local_experts", "max_tokens_per_rank", "top_k", "hidden", "intermediate"),
    *("precision", "dw_precision", "scale_format"),
)


class MoEBuffer:
    """Memory, backend and rank facts of a mixture-of-experts layer. Construction is collective over ``group``.

    One buffer serves all layers of a model that run in order. Every rank of the group makes every call: a rank without
    work calls with T = 0. Each rank feeds its own batch; the experts are spread over the ranks (rank r holds experts
    r * E / R to (r + 1) * E / R - 1).

    Args:
        group: a torch.distributed process group, or a DeviceMesh of one dimension; None means one rank and no
            torch.distributed at all.
        num_experts: E, global; a multiple of the number of ranks; at most 2048.
        max_tokens_per_rank: largest T of any call on any rank; below 2^20.
        top_k: K, slots per token; at most 16 and at most E.
        hidden: H, elements of a token.
        intermediate: I, elements of an expert's hidden layer.
        precision: "bf16" (the inputs' own dtype), "fp8" (blockwise e4m3), "fp8_bwd" (bf16 forward, fp8 backward) or
            "mxfp8" (refused until its kernels exist).
        dw_precision: of the operands of the wgrad GEMMs: "bf16" or, with the precisions "fp8" and "fp8_bwd", "fp8",
            which adds 3-4 % relative error to dW; it gains time on large layers.
        scale_format: scale factors of the fp8 precisions: "fp32", amax / 448 unrounded, or "power_of_two", rounded up:
            scaling then changes no mantissa, and codes lose up to one bit of range.
        activation: of every call that names none; all calls have its kind. Default: SwiGLU.
        backend: "auto" takes the first that fits of fused, dispatched, deep_gemm, grouped, reference and warns once
            when it is not fused; a name raises BackendRefusedError with all reasons where it does not fit. ``reason``
            says what was taken.
        dtype: of x and the weights, for the choice of the backend.
        device: where x lives; default: the current GPU if the group can serve it, else the CPU.
        num_reserved_sms: SMs that the fused kernels leave to others: NCCL's blocks, where it runs on another stream.
        save_gate_up: 0 (default): the fused backward recomputes gate and up. Above 0 each forward that autograd
            records saves them, ``saved_nbytes(T)`` bytes a call, for so many times the T K rows of a balanced routing,
            and the backward recomputes the rows beyond that. No bit of a result depends on it, except in "fp8_bwd",
            whose saved rows are the forward's bf16 and whose other rows are recomputed in fp8. 1 (True) covers every
            row of a balanced routing, and with EP=1 of any. Other backends are not affected.
        dispatcher: what moves tokens where the backend is "dispatched": "nccl" (all-to-all of torch.distributed, gloo
            on CPUs), "deep_ep" or "nccl_ep" where such a package is installed, or an object with the methods of
            `mega_moe.Dispatcher`. Other backends are not affected.
        arrival_timeout: seconds to wait for a rank that has not reached a call; default: the group's time-out.
        progress_timeout: seconds that a kernel waits for anything else, once all ranks have reached the call.
        strict: True forbids falling back from the fused backend; default: MEGA_MOE_STRICT.

    Raises:
        ValueError, TypeError: a bad argument, or arguments that differ between ranks (on all ranks, with the values).
        BackendRefusedError: no backend fits, with every reason.
        PeerError: another rank refused its own arguments.
        RankTimeoutError: a rank did not come, with its number.
    """

    explanation: choice.Explanation
    """Every backend with its reasons."""
    activation: Activation
    """Activation of calls that name none."""
    device: torch.device
    """Where x lives."""
    rank: int
    num_ranks: int
    num_experts: int
    num_local_experts: int
    max_tokens_per_rank: int
    top_k: int
    hidden: int
    intermediate: int
    precision: str
    dw_precision: str
    scale_format: str

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        max_tokens_per_rank: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        precision: str = "bf16",
        dw_precision: str = "bf16",
        scale_format: str = "fp32",
        activation: Activation | None = None,
        backend: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        num_reserved_sms: int = 0,
        save_gate_up: float = 0.0,
        dispatcher: str | Dispatcher = "nccl",
        arrival_timeout: float | None = None,
        progress_timeout: float = 60.0,
        strict: bool | None = None,
    ) -> None:
        facts: RankFacts | None = None
        error: Exception | None = None
        limit: float | None = None
        settings: dict[str, Any] = {}
        try:
            limit = check_timeout(arrival_timeout)
        except (ValueError, TypeError) as failed:
            error = failed
        group = as_group(group)
        self._control = Control() if group is None else GroupControl(group, limit)
        self._session: Session | None = None
        try:
            try:
                share = check_share(save_gate_up)
                engine = dispatcher_name(dispatcher)
                self.activation = as_activation(activation)
                if check_timeout(progress_timeout, "progress_timeout") is None:
                    raise TypeError("progress_timeout: got None, want seconds")
                request = Request(
                    num_experts,
                    max_tokens_per_rank,
                    top_k,
                    hidden,
                    intermediate,
                    precision,
                    str(dtype).removeprefix("torch."),
                    self._control.size,
                    num_reserved_sms,
                    dw_precision,
                    scale_format,
                    self.activation.kind,
                    engine,
                )
                named = choice.wanted(backend)
                settings = asdict(request) | {
                    "backend": named or "auto",
                    "strict": choice.wanted_strict(strict),
                    "arrival_timeout": self._control.timeout,
                    "progress_timeout": progress_timeout,
                    "save_gate_up": share,
                    "activation_clamp": self.activation.clamp,
                    # It puts canaries into the memory that the ranks share, which moves every part of it.
                    "MEGA_MOE_DEBUG": env.debug(),
                }
                group_backend = None if group is None else str(dist.get_backend(group))
                where = default_device(group_backend) if device is None else as_device(device)
                facts = collect(where, group_backend, engine)
            # RuntimeError and OSError: what torch, a driver or a file says. The other ranks wait for this one's word.
            except (ValueError, TypeError, RuntimeError, OSError) as failed:
                error = error or failed
            everyone = agree(self._control, settings, facts, error)
            assert facts is not None
            self.explanation = choice.explain(request, everyone, named, settings["strict"])
            if named is None:
                choice.warn_fallback(self.explanation)
            self.device = torch.device(facts.device)
            try:
                ranks = self.device, self._control, group
                own = None if isinstance(dispatcher, str) else dispatcher
                self._session = build(self.explanation, everyone, *ranks, progress_timeout, share, own)
            # The memory may not fit on one rank alone.
            except RuntimeError as failed:
                error = failed
            confirm(self._control, error)
        except BaseException:
            self._control.close()
            raise
        self.rank, self.num_ranks = self._control.rank, self._control.size
        for name in _OF_REQUEST:
            setattr(self, name, getattr(request, name))

    @property
    def backend(self) -> str:
        """Name of the backend that serves every call."""
        return self.explanation.chosen or ""

    @property
    def reason(self) -> str:
        """One line: the backend, and why it is not the fused one where it is not."""
        return self.explanation.reason

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of x and weights that the backend takes."""
        return self._live().executor.dtypes

    @property
    def router(self) -> str:
        """'kernel' where ``mega_moe.route`` is one launch, 'torch' where plain operators serve it."""
        return self._live().router.name

    @property
    def router_reason(self) -> str | None:
        """Why ``router`` is not 'kernel'; None where it is."""
        return self._live().router_reason

    @property
    def save_gate_up(self) -> float:
        """The share in use, in steps of 1/1024; 0 where the fused kernels do not serve both directions."""
        return self._live().saved_rows.share

    def saved_nbytes(self, num_tokens: int) -> int:
        """Bytes of gate and up that a forward of ``num_tokens`` keeps for its backward, besides its inputs."""
        return 4 * self.intermediate * self._live().saved_rows.slots(num_tokens)

    @contextlib.contextmanager
    def reuse_weight_copies(self) -> Iterator[None]:
        """Within it the fp8 kernels reuse their e4m3 copies of the weights across calls, while these are valid.

        Outside, each call of a kernel that reads e4m3 weights quantizes them first, which is always right. Within, the
        copy of an ``nn.Parameter`` is kept until torch sees a change of it (an operation in place,
        ``load_state_dict``, another tensor, ``.data`` assigned), its memory is freed, any ``torch.optim`` optimizer of
        this process steps, `weights_changed` is called, or the outermost of these blocks ends.

        Call `weights_changed` after what torch cannot see: writes through ``.data``, an alias or the storage, by
        kernels outside an optimizer's ``step``, by a replayed CUDA graph, or into FSDP's shards other than by an
        optimizer or ``load_state_dict``. Tensors that are not parameters, such as those of a cast or of a compiled
        graph, and calls in the capture of a CUDA graph always get new copies.

        A copy takes half the bytes of the bf16 weight, or all of them where a backward kernel reads it transposed too.
        """
        copies = self._live().weight_copies
        with contextlib.nullcontext() if copies is None else copies.reused():
            yield

    def weights_changed(self) -> None:
        """Use no copy of a weight that was made before now; see `reuse_weight_copies`."""
        copies = self._live().weight_copies
        if copies is not None:
            copies.changed()

    def check(self) -> None:
        """Wait for the device and raise what a past call could not report at once: a bad expert id, a lost rank.

        The plain backends report everything in the call itself, the kernels of `mega_moe.route` and of the fused
        backend nothing.
        """
        self._live().check()

    def destroy(self) -> None:
        """Give back the memory and the control group. Later use raises, a second call does nothing."""
        if self._session is not None:
            self._control.close()
            self._session.close()
            self._session = None

    def _live(self) -> Session:
        if self._session is None:
            raise MegaMoEError("this MoEBuffer was destroyed; build a new one")
        return self._session

    # Not traced: after a graph break at the refused call the compiler would go through the exchange line by line.
    # torch's own lazy form of compiler.disable, which would import the whole compiler with this module.
    @_disable_dynamo
    def _refuse(self, error: Exception, num_tokens: int = 0) -> None:
        """Let the other ranks raise PeerError for the call of ``num_tokens`` that this rank answers with ``error``."""
        self._live().executor.refuse(error, num_tokens)

    def __deepcopy__(self, memo: dict[int, object]) -> MoEBuffer:
        # A copied model (an average of weights, say) shares the buffer, as the layers of one model do.
        return self

    def __reduce__(self) -> NoReturn:
        # A handle means another buffer, or none, in the process that would read the pickle.
        raise TypeError("MoEBuffer: cannot be pickled or copied; save the model's state_dict() instead")

    def __enter__(self) -> MoEBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        request = self.explanation.request
        return f"MoEBuffer(rank {self.rank} of {self.num_ranks}, {self.backend}, {self.device}, {request})"

    @staticmethod
    def nbytes(
        *,
        num_experts: int,
        max_tokens_per_rank: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        precision: str = "bf16",
        dw_precision: str = "bf16",
        num_ranks: int = 1,
        training: bool = True,
        backend: str = "auto",
    ) -> int:
        """Bytes of GPU memory that a buffer of this size holds on each rank, whatever the routing of its calls.

        Needs the compiled library, no GPU; depends on its arguments and, for the canaries, on MEGA_MOE_DEBUG. "auto"
        counts the pools of the fused backend where the wheel holds a kernel for the request, a name counts that
        backend's memory; "dispatched" the pools of its fused experts, not what an engine holds. Plain backends on a
        CPU, or on a GPU whose architecture the wheel does not hold, keep nothing.
        ``training`` adds what the fused backward needs, which a buffer holds wherever it can run it. Where kernels read
        e4m3 weights, the temporary copies of a call are counted too. What autograd keeps of each call, its inputs and
        ``saved_nbytes(T)`` of gate and up, is not the buffer's.

        Raises:
            BackendRefusedError: "fused" is named, and no kernel of the wheel serves the request.
        """
        request = Request(
            num_experts,
            max_tokens_per_rank,
            top_k,
            hidden,
            intermediate,
            precision,
            num_ranks=num_ranks,
            dw_precision=dw_precision,
        )
        return buffer_nbytes(request, check_name("backend", backend), training)
