"""The buffer that a caller fills before each call, and the number of SMs of this face."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_moe._base.errors import MegaMoEError
from mega_moe._base.types import SCALE_BLOCK, positive_int
from mega_moe.buffer import MoEBuffer

if TYPE_CHECKING:
    import torch.distributed as dist

# mma_type of DeepGEMM: precision of this library.
MMA_TYPES = {"bf16xbf16": "bf16", "fp8xfp8": "fp8"}
_ALIGNMENT = 256

_num_sms: int | None = None


def set_num_sms(num_sms: int) -> None:
    """SMs for the calls of buffers made afterwards, in this process and through this face only.

    ``set_num_sms(total - reserved)`` leaves the reserved ones to NCCL.
    """
    global _num_sms  # noqa: PLW0603 -- DeepGEMM's setting is one of the process
    positive_int("num_sms", num_sms, _total_sms())
    _num_sms = num_sms


def get_num_sms() -> int:
    """What `set_num_sms` was given, else all SMs of the current GPU; MegaMoEError where there is none."""
    total = _num_sms or _total_sms()
    if total is None:
        raise MegaMoEError(
            "get_num_sms: this machine has no GPU that torch sees, and set_num_sms was not called"
        )
    return total


def _total_sms() -> int | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class SymmBuffer:
    """What `get_symm_buffer_for_mega_moe` returns. Built collectively; one serves all layers that run in order.

    Attributes:
        x: ``[max_tokens, H]`` bf16, or e4m3 with mma_type fp8xfp8; the caller fills the first T rows before each
            forward, on the stream of the call.
        x_sf: ``[max_tokens, H / 128]`` fp32 scales with fp8xfp8, else empty; filled as x is.
        topk_idx: ``[max_tokens, K]`` int64, global expert ids, -1 masks a slot.
        topk_weights: ``[max_tokens, K]`` fp32.
        buffer: the bytes that these are views of; None after `destroy`. x and x_sf of fp8xfp8 are views of those that
            the other ranks' kernels read, where the fused backend serves the buffer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        mma_type: str,
    ) -> None:
        total = _total_sms()
        self.moe = MoEBuffer(
            group,
            num_experts=num_experts,
            max_tokens_per_rank=num_max_tokens_per_rank,
            top_k=num_topk,
            hidden=hidden,
            intermediate=intermediate_hidden,
            precision=MMA_TYPES[mma_type],
            num_reserved_sms=0 if _num_sms is None or total is None else total - _num_sms,
        )
        self.group = group
        self.mma_type = mma_type
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        quantized = mma_type == "fp8xfp8"
        given = self.moe._live().prequantized
        self.x: Tensor | None = None
        self.x_sf: Tensor | None = None
        self.topk_idx: Tensor | None = None
        self.topk_weights: Tensor | None = None
        parts = {"topk_idx": (torch.int64, num_topk), "topk_weights": (torch.float32, num_topk)}
        if given is None:
            parts["x"] = (torch.float8_e4m3fn if quantized else torch.bfloat16, hidden)
            parts["x_sf"] = (torch.float32, hidden // SCALE_BLOCK if quantized else 0)
        else:
            self.x, self.x_sf = given.x, given.x_scales
        sizes = [num_max_tokens_per_rank * width * dtype.itemsize for dtype, width in parts.values()]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.buffer: Tensor | None = torch.zeros(sum(rooms), dtype=torch.uint8, device=self.moe.device)
        for (name, (dtype, width)), size, room in zip(parts.items(), sizes, self.buffer.split(rooms)):
            setattr(self, name, room[:size].view(dtype).view(num_max_tokens_per_rank, width))

    def staged(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids and weights of the first rows; MegaMoEError after `destroy`."""
        if self.x is None or self.topk_idx is None or self.topk_weights is None:
            raise MegaMoEError("sym_buffer: was destroyed; get a new one")
        return self.x[:num_tokens], self.topk_idx[:num_tokens], self.topk_weights[:num_tokens]

    def destroy(self) -> None:
        """Give the memory back. Later use raises, a second call does nothing."""
        self.moe.destroy()
        self.buffer = self.x = self.x_sf = self.topk_idx = self.topk_weights = None
        self.group = None


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """A buffer for calls on the current GPU, or on the CPU where there is none. Collective over ``group``.

    Raises:
        ValueError: an argument that this library does not serve, with the reason.
        BackendRefusedError: no backend can serve ``mma_type`` on these ranks, with every reason.
    """
    if mma_type not in MMA_TYPES:
        why = ""
        if "fp4" in str(mma_type):
            why = "; fp4 weights need Blackwell kernels, which do not exist yet; fp8_mega_moe wants 'fp8xfp8'"
        raise ValueError(f"mma_type: got {mma_type!r}, want one of {', '.join(MMA_TYPES)}{why}")
    if num_shared_experts != 0:
        raise ValueError(
            f"num_shared_experts: got {num_shared_experts}, want 0: shared experts are no part of this layer, "
            "compute them alongside it"
        )
    if use_fp8_dispatch is not None and use_fp8_dispatch != (mma_type == "fp8xfp8"):
        raise ValueError(
            f"use_fp8_dispatch: got {use_fp8_dispatch}, mma_type={mma_type!r} sends x as it is staged"
        )
    check_activation(activation)
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, mma_type
    )


def check_activation(activation: str) -> None:
    if activation != "swiglu":
        raise ValueError(f"activation: got {activation!r}, want 'swiglu'")
