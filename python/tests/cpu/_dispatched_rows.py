"""Verdicts on the backend dispatched, with made-up facts: ``(reasons, request, facts, named)`` by name."""

from __future__ import annotations

from collections.abc import Sequence

from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.choice.request import Request

from ._facts import cpu, gpu, pair, request

INSIDE = "is for ranks outside one NVLink domain: name it (backend='dispatched') to use it inside"
ONLY_NAMED = "no grouped experts: they serve where dispatched is named"
NO_GPU = (
    "no fused experts at EP=1: the compiled library is not loaded: no file; needs an NVIDIA GPU, "
    "the device is cpu"
)
LACKING = (
    "no fused experts at EP=1: hidden is 384, must be a multiple of 256; rank 1: the device is sm_80 (H200), "
    "this wheel holds sm_90a: `mega-moe doctor` says what to install"
)
HOSTS = [gpu(0, 2), gpu(1, 2, host="node1", machine="boot1")]
MANY = request(num_ranks=64, num_experts=64)
TWO = request(num_ranks=2)
BY_DEEP_EP = request(num_ranks=2, dispatcher="deep_ep")


def with_engine(*versions: str | None) -> list[RankFacts]:
    """Two hosts on which DeepEP has these versions."""
    known = [{"engine_version": v, "engine_reason": v or "deep_ep is not installed"} for v in versions]
    return [gpu(0, 2, **known[0]), gpu(1, 2, host="node1", machine="boot1", **known[1])]


Case = tuple[tuple[str, ...], Request, Sequence[RankFacts], str | None]

ROWS: dict[str, Case] = {
    "two hosts": ((), TWO, HOSTS, None),
    "two hosts fp8": ((), request(num_ranks=2, precision="fp8", dw_precision="fp8"), HOSTS, None),
    "more slots than a rank has experts": ((), request(num_ranks=2, top_k=8), HOSTS, None),
    "no peer access": (
        (),
        TWO,
        [gpu(0, 2, peer_access=(("gpu1", False),)), gpu(1, 2, peer_access=())],
        None,
    ),
    "more ranks than a kernel spans": ((), MANY, [gpu(r, 64) for r in range(64)], None),
    "one host": ((INSIDE,), TWO, pair(), None),
    "one host, named": ((), TWO, pair(), "dispatched"),
    "one rank": ((INSIDE,), request(), [gpu()], None),
    "cpu": ((NO_GPU, ONLY_NAMED, INSIDE), request(), [cpu()], None),
    "cpu, another named": ((NO_GPU, ONLY_NAMED, INSIDE), request(), [cpu()], "grouped"),
    "cpu, named": ((), request(dtype="float32", hidden=5), [cpu()], "dispatched"),
    "two hosts without the kernels": (
        (
            LACKING,
            ONLY_NAMED,
        ),
        request(num_ranks=2, hidden=384),
        [gpu(0, 2), gpu(1, 2, host="node1", machine="boot1", compute_capability=(8, 0))],
        None,
    ),
    "cpu fp8, named": (
        (NO_GPU, "no grouped experts: computes in the inputs' dtype only, precision fp8 is not emulated"),
        request(precision="fp8"),
        [cpu()],
        "dispatched",
    ),
    "engine": ((), BY_DEEP_EP, with_engine("2.0", "2.0"), None),
    "engine versions": (
        ("dispatcher deep_ep: the ranks have different versions (rank 0: 2.0, rank 1: 2.1)",),
        BY_DEEP_EP,
        with_engine("2.0", "2.1"),
        None,
    ),
    "engine absent": (
        (
            "dispatcher deep_ep: rank 1: deep_ep is not installed",
            "dispatcher deep_ep: the ranks have different versions (rank 0: 2.0, rank 1: None)",
        ),
        BY_DEEP_EP,
        with_engine("2.0", None),
        "dispatched",
    ),
    "engine on a cpu": (
        (
            "dispatcher nccl_ep moves bfloat16, got float32",
            "dispatcher nccl_ep: needs a process group of several ranks",
            "dispatcher nccl_ep: needs an NVIDIA GPU, the device is cpu",
        ),
        request(dtype="float32", dispatcher="nccl_ep"),
        [cpu()],
        "dispatched",
    ),
    "gloo": (
        ("the process group is gloo, cuda tensors need nccl",),
        TWO,
        [gpu(0, 2, group_backend="gloo"), gpu(1, 2, group_backend="gloo", host="node1", machine="boot1")],
        None,
    ),
}
