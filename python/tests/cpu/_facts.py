"""Made-up facts of ranks and requests, for whatever judges them."""

from __future__ import annotations

from typing import Any

from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe._backends.choice.request import Request

ROUTE = Variant("route", "90a", "none")
QUANTIZE_WEIGHTS = Variant("quantize_weights", "90a", "fp8")
FULL = (
    *(Variant("forward", "90a", precision, 256, 128) for precision in ("bf16", "fp8")),
    *(Variant("backward", "90a", precision, 256, 128, "bf16") for precision in ("bf16", "fp8")),
    Variant("backward", "90a", "fp8", 256, 128, "fp8"),
    ROUTE,
    QUANTIZE_WEIGHTS,
)
PROBE_ONLY = (Variant("clock_probe", "90a", "none"),)


def kernels(*pairs: str) -> tuple[Variant, ...]:
    """Variants given as "op precision", alongside the routing kernel and that which quantizes weights."""
    return (ROUTE, QUANTIZE_WEIGHTS, *(v for v in FULL if f"{v.op} {v.precision}" in pairs))


def request(**changes: Any) -> Request:
    sizes = {"num_experts": 8, "max_tokens_per_rank": 64, "top_k": 2, "hidden": 512, "intermediate": 256}
    return Request(**{**sizes, **changes})


def cpu(**changes: Any) -> RankFacts:
    """A machine without a GPU, and a package without a library."""
    return RankFacts(**{"library_reason": "no file", **changes})


def gpu(rank: int = 0, ranks: int = 1, **changes: Any) -> RankFacts:
    """One H200 of a machine on which every pair of GPUs has peer access, with a wheel that holds every kernel."""
    known: dict[str, Any] = {
        "host": "node0",
        "machine": "boot0",
        "device": f"cuda:{rank}",
        "device_name": "H200",
        "device_uuid": f"gpu{rank}",
        "compute_capability": (9, 0),
        "num_sms": 132,
        "peer_access": tuple((f"gpu{r}", True) for r in range(ranks) if r != rank),
        "group_backend": "nccl" if ranks > 1 else None,
        "driver_cuda": (13, 0),
        "library_loaded": True,
        "library_cuda": "13.0",
        "library_architectures": ("90a",),
        "variants": FULL,
    }
    return RankFacts(**{**known, **changes})


def pair(**changes: Any) -> list[RankFacts]:
    """Two ranks on two GPUs; ``changes`` apply to rank 1."""
    return [gpu(0, 2), gpu(1, 2, **changes)]
