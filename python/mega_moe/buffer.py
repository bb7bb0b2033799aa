"""The buffer: the fixed part of a mixture-of-experts layer, built once and shared by all layers that run in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from mega_moe._backends import plan
from mega_moe._backends.agreement import agree, confirm
from mega_moe._backends.control import Control, GroupControl, LocalControl, as_group, check_timeout
from mega_moe._backends.decide import check_name
from mega_moe._backends.executor import LayerExecutor
from mega_moe._backends.facts import RankFacts, as_device, collect, default_device
from mega_moe._backends.request import Request
from mega_moe._backends.saved import check_share
from mega_moe._backends.summary import Routing
from mega_moe._base import env
from mega_moe._base.activation import SWIGLU, Activation, as_activation
from mega_moe._base.errors import MegaMoEError
from mega_moe._ops import registry

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from mega_moe._backends.given_codes import GivenCodes


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
        dw_precision: "bf16" or, with the precisions "fp8" and "fp8_bwd", "fp8": of the operands of the experts' weight
            gradients, to whose error that adds 3 to 4 %; it gains time on large layers.
        scale_format: of the fp8 precisions: "fp32", amax / 448 as it is, or "power_of_two", which rounds every scale up
            to one: scaling then changes no mantissa, and codes lose up to one bit of range.
        activation: of every call that names none; the kind is that of all calls. Default: SwiGLU.
        backend: "auto" takes the first that fits of fused, deep_gemm, grouped, reference and warns once when it is not
            fused; a name raises BackendRefusedError with all reasons where it does not fit. ``reason`` tells what was
            taken.
        dtype: of x and the weights, as far as it decides the choice of the backend.
        device: where x lives; default: the current GPU if the group can serve it, else the CPU.
        num_reserved_sms: SMs that the fused kernels leave to others: NCCL's blocks, where it runs on another stream.
        save_gate_up: 0 (default): the fused backward computes gate and up again. Above 0 each forward that autograd
            records keeps them for its backward, ``saved_nbytes(T)`` bytes a call, for so many times the T K rows of a
            balanced routing; of rows beyond that they are computed again. No bit of a result depends on it. At 1
            (True) that is every row of a balanced routing, and of any where there is one rank. Other backends keep
            what they always do.
        arrival_timeout: seconds to wait for a rank that has not come to a call; default: the group's time-out.
        progress_timeout: seconds that a kernel waits for anything else, once all ranks have come to the call.
        strict: True forbids falling back from the fused backend; default: MEGA_MOE_STRICT.

    Raises:
        ValueError, TypeError: a bad argument, or arguments that differ between ranks (on all ranks, with the values).
        BackendRefusedError: no backend fits, with every reason.
        PeerError: another rank refused its own arguments.
        RankTimeoutError: a rank did not come, with its number.
    """

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
        arrival_timeout: float | None = None,
        progress_timeout: float = 60.0,
        strict: bool | None = None,
    ) -> None:
        settings = {
            "num_experts": num_experts,
            "max_tokens_per_rank": max_tokens_per_rank,
            "top_k": top_k,
            "hidden": hidden,
            "intermediate": intermediate,
            "precision": precision,
            "dw_precision": dw_precision,
            "scale_format": scale_format,
            "activation": "swiglu",
            "dtype": str(dtype).removeprefix("torch."),
            "num_reserved_sms": num_reserved_sms,
        }
        share = 0.0
        facts: RankFacts | None = None
        error: Exception | None = None
        limit: float | None = None
        self._activation = SWIGLU
        try:
            limit = check_timeout(arrival_timeout)
            share = check_share(save_gate_up)
            self._activation = as_activation(activation)
            settings["activation"] = self._activation.kind
            if check_timeout(progress_timeout, "progress_timeout") is None:
                raise TypeError("progress_timeout: got None, want seconds")
        except (ValueError, TypeError) as failed:
            error = failed
        group = as_group(group)
        self._control: Control = LocalControl() if group is None else GroupControl(group, limit)
        try:
            try:
                request = Request(num_ranks=self._control.size, **settings)  # type: ignore[arg-type]
                named = plan.wanted(backend)
                settings["backend"] = named or "auto"
                settings["strict"] = plan.wanted_strict(strict)
                settings["arrival_timeout"] = self._control.timeout
                settings["progress_timeout"] = progress_timeout
                settings["save_gate_up"] = share
                settings["activation_clamp"] = self._activation.clamp
                # It puts canaries into the memory that the ranks share, which moves every part of it.
                settings["MEGA_MOE_DEBUG"] = env.debug()
                group_backend = None if group is None else _group_backend(group)
                where = default_device(group_backend) if device is None else as_device(device)
                facts = collect(where, group_backend)
            # RuntimeError and OSError: what torch, a driver or a file says. The other ranks wait for this one's word.
            except (ValueError, TypeError, RuntimeError, OSError) as failed:
                error = error or failed
            everyone = agree(self._control, settings, facts, error)
            assert facts is not None
            self._explanation = plan.explain(request, everyone, named, bool(settings["strict"]))
            if named is None:
                plan.warn_fallback(self._explanation)
            self._device = torch.device(facts.device)
            try:
                ranks = self._device, self._control, group
                kernels, self._router_reason = plan.build_kernels(
                    self._explanation, everyone, *ranks, progress_timeout
                )
                self._router = plan.build_router(request, self._control, kernels)
                self._executor = plan.build_executor(self._explanation, facts, *ranks, kernels)
                self._saved_rows = plan.saved_rows(kernels, share)
            # The memory may not fit on one rank alone.
            except RuntimeError as failed:
                error = failed
            confirm(self._control, error)
        except BaseException:
            self._control.close()
            raise
        self._handle: int | None = registry.register(self._executor)

    @property
    def backend(self) -> str:
        """Name of the backend that serves every call."""
        return self._explanation.chosen or ""

    @property
    def reason(self) -> str:
        """One line: the backend, and why it is not the fused one where it is not."""
        return self._explanation.reason

    @property
    def explanation(self) -> plan.Explanation:
        """Every backend with its reasons."""
        return self._explanation

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def num_ranks(self) -> int:
        return self._control.size

    @property
    def num_experts(self) -> int:
        return self._explanation.request.num_experts

    @property
    def num_local_experts(self) -> int:
        return self._explanation.request.num_local_experts

    @property
    def max_tokens_per_rank(self) -> int:
        return self._explanation.request.max_tokens_per_rank

    @property
    def top_k(self) -> int:
        return self._explanation.request.top_k

    @property
    def hidden(self) -> int:
        return self._explanation.request.hidden

    @property
    def intermediate(self) -> int:
        return self._explanation.request.intermediate

    @property
    def precision(self) -> str:
        return self._explanation.request.precision

    @property
    def dw_precision(self) -> str:
        return self._explanation.request.dw_precision

    @property
    def scale_format(self) -> str:
        return self._explanation.request.scale_format

    @property
    def activation(self) -> Activation:
        """Of calls that name none."""
        return self._activation

    @property
    def save_gate_up(self) -> float:
        """As asked for, in 1024ths; 0 where another backend serves the calls, or the backward."""
        return self._saved_rows.share

    def saved_rows(self, num_tokens: int) -> int:
        """Rows, of 2I bf16 numbers, that a forward of ``num_tokens`` keeps of gate and up for its backward."""
        return self._saved_rows.slots(num_tokens)

    def saved_nbytes(self, num_tokens: int) -> int:
        """Bytes of gate and up that a forward of ``num_tokens`` keeps for its backward, besides its inputs."""
        return 4 * self.intermediate * self.saved_rows(num_tokens)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def handle(self) -> int:
        """What the operators take instead of this object; MegaMoEError after destroy()."""
        if self._handle is None:
            raise MegaMoEError("this MoEBuffer was destroyed; build a new one")
        return self._handle

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of x and weights that the backend takes."""
        return self._live().dtypes

    @property
    def stager(self) -> str:
        """'kernel' where a kernel stages each call's inputs, alone or in the fused one; 'torch' for plain operators."""
        return self._live().stages_by

    @property
    def router(self) -> str:
        """'kernel' where ``mega_moe.route`` is one launch, 'torch' where plain operators serve it."""
        self._live()
        return self._router.name

    @property
    def router_reason(self) -> str | None:
        """Why ``router`` is not 'kernel'; None where it is."""
        return self._router_reason

    # Not traced: after a graph break at the refused call the compiler would go through the exchange line by line.
    # torch's own lazy form of compiler.disable, which would import the whole compiler with this module.
    @_disable_dynamo
    def refuse(self, error: Exception, num_tokens: int = 0) -> None:
        """Let the other ranks raise PeerError for the call of ``num_tokens`` that this rank answers with ``error``."""
        self._live().refuse(error, num_tokens)

    def route(self, topk_idx: Tensor, topk_weights: Tensor | None) -> Routing:
        """``mega_moe.route`` on checked arguments."""
        self._live()
        return self._router.route(topk_idx, topk_weights)

    def refuse_routing(self, error: Exception, num_tokens: int) -> None:
        """Let the other ranks' call of ``mega_moe.route`` end in PeerError, as this rank raises ``error`` instead."""
        self._live()
        self._router.refuse(error, num_tokens)

    @contextlib.contextmanager
    def reuse_weight_copies(self) -> Iterator[None]:
        """Within it the fp8 kernels keep their e4m3 copies of the weights from call to call, while they are good.

        Outside, each call of a kernel that reads e4m3 weights quantizes them anew, which is always right. Within, the
        copy of an ``nn.Parameter`` is kept until torch knows of a change of it (an operation in place,
        ``load_state_dict``, another tensor, ``.data`` assigned), its memory was given back, any ``torch.optim``
        optimizer of this process has stepped, `weights_changed` is called, or the outermost of these blocks ends.

        What nobody can see has to be told by `weights_changed`: writes through ``.data``, an alias or the storage, by
        kernels outside an optimizer's ``step``, by a replayed CUDA graph, or into the shards of FSDP other than by an
        optimizer or ``load_state_dict``. Tensors that are no parameters, such as those of a cast or of a compiled
        graph, and calls in the capture of a CUDA graph always get new copies.

        A weight's copy takes half its bytes in bf16, or all of them where a backward kernel reads it transposed too.
        """
        copies = self._live().weight_copies
        with contextlib.nullcontext() if copies is None else copies.reused():
            yield

    def weights_changed(self) -> None:
        """Use no copy of a weight that was made before now; see `reuse_weight_copies`."""
        copies = self._live().weight_copies
        if copies is not None:
            copies.changed()

    @property
    def given_codes(self) -> GivenCodes | None:
        """The layer on operands that are e4m3 already, for `mega_moe.deep_gemm`; None where the backend has no such."""
        return self._live().given_codes

    def check(self) -> None:
        """Wait for the device and raise what a past call could not report at once: a bad expert id, a lost rank.

        The plain backends report everything in the call itself, the kernels of `mega_moe.route` and of the fused
        backend nothing.
        """
        self._live()
        self._router.check()

    def destroy(self) -> None:
        """Give back the memory and the control group. Later use raises, a second call does nothing."""
        if self._handle is not None:
            registry.unregister(self._handle)
            self._handle = None
            self._control.close()
            self._router.close()
            del self._executor, self._router

    def _live(self) -> LayerExecutor:
        _ = self.handle
        return self._executor

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
        request = self._explanation.request
        return f"MoEBuffer(rank {self.rank} of {self.num_ranks}, {self.backend}, {self._device}, {request})"

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
        backend's memory. Plain backends on a CPU, or on a GPU whose architecture the wheel does not hold, keep nothing.
        ``training`` counts what the fused backward needs besides, which a buffer holds wherever it can run it. Where
        kernels read e4m3 weights, the copies that a call makes of its weights and gives back are counted too. What
        autograd keeps of each call is not the buffer's: its inputs, and ``saved_nbytes(T)`` of gate and up.

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
        return plan.buffer_nbytes(request, check_name("backend", backend), training)


def _group_backend(group: dist.ProcessGroup) -> str:
    import torch.distributed as dist

    return str(dist.get_backend(group))
