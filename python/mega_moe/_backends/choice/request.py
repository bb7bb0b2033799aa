"""What a buffer is asked for: plain data, checked once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from mega_moe._base.activation import Activation
from mega_moe._base.mode import Mode
from mega_moe._base.types import (
    MAX_EXPERTS,
    MAX_TOKENS_PER_RANK,
    MAX_TOP_K,
    PRECISIONS,
    check_dw_precision,
    check_scale_format,
    positive_int,
)

DTYPES = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Request:
    """The static part of a layer. ``dtype``: of x and the weights; ``dw_precision``: of the wgrad GEMMs;
    ``scale_format``: of the fp8 precisions; ``activation``: the kind of every call; ``dispatcher``: the engine of the
    backend `dispatched`, or what the caller's own is called."""

    num_experts: int
    max_tokens_per_rank: int
    top_k: int
    hidden: int
    intermediate: int
    precision: str = "bf16"
    dtype: str = "bfloat16"
    num_ranks: int = 1
    num_reserved_sms: int = 0
    dw_precision: str = "bf16"
    scale_format: str = "fp32"
    activation: str = "swiglu"
    dispatcher: str = "nccl"

    def __post_init__(self) -> None:
        positive_int("num_experts", self.num_experts, MAX_EXPERTS)
        positive_int("max_tokens_per_rank", self.max_tokens_per_rank, MAX_TOKENS_PER_RANK)
        positive_int("top_k", self.top_k, MAX_TOP_K)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: got {self.top_k}, want at most the {self.num_experts} experts")
        positive_int("hidden", self.hidden)
        positive_int("intermediate", self.intermediate)
        positive_int("num_ranks", self.num_ranks)
        positive_int("num_reserved_sms", self.num_reserved_sms, zero=True)
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: got {self.precision!r}, want one of {', '.join(PRECISIONS)}")
        check_dw_precision(self.dw_precision, self.precision)
        check_scale_format(self.scale_format, self.precision)
        Activation(self.activation)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype}, want one of {', '.join(DTYPES)}")
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts: got {self.num_experts}, want a multiple of the {self.num_ranks} ranks of the group"
            )

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def forward_precision(self) -> str:
        """Precision of the forward GEMMs: ``fp8_bwd`` is fp8 in the backward alone."""
        return "bf16" if self.precision == "fp8_bwd" else self.precision

    @property
    def backward_precision(self) -> str:
        return "fp8" if self.precision == "fp8_bwd" else self.precision

    def mode(self, *, backward: bool) -> Mode:
        """The mode of the fused kernels' memory; ``backward``: of both directions."""
        if not backward:
            return Mode(self.forward_precision, scale_format=self.scale_format)
        return Mode(self.forward_precision, self.backward_precision, self.dw_precision, self.scale_format)

    @property
    def power_of_two(self) -> bool:
        """Whether scale factors are rounded up to powers of two."""
        return self.scale_format == "power_of_two"
