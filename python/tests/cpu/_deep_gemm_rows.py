"""Refusals of the backend deep_gemm, with made-up facts: ``(reasons, request, facts)`` by name."""

from __future__ import annotations

from collections.abc import Sequence

from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.choice.request import Request

from ._facts import cpu, gpu, request

HAS: dict[str, str | None] = {"deep_gemm_version": "2.1", "deep_gemm_reason": None}
ABSENT = "deep_gemm is not installed"
LACKS: dict[str, str | None] = {"deep_gemm_version": None, "deep_gemm_reason": ABSENT}

ROWS: dict[str, tuple[tuple[str, ...], Request, Sequence[RankFacts]]] = {
    "h200": ((), request(), [gpu(**HAS)]),
    "b200": ((), request(), [gpu(**HAS, compute_capability=(10, 0))]),
    "pair": ((), request(num_ranks=2), [gpu(0, 2, **HAS), gpu(1, 2, **HAS)]),
    "two hosts": ((), request(num_ranks=2), [gpu(0, 2, **HAS), gpu(1, 2, **HAS, host="b", machine="c")]),
    "absent": ((ABSENT,), request(), [gpu(**LACKS)]),
    "cpu": (("needs an NVIDIA GPU, the device is cpu",), request(), [cpu()]),
    "h100 alongside rtx": (
        (
            "rank 1: DeepGEMM serves sm_90 and sm_100, the device is sm_120",
            f"rank 1: {ABSENT}",
            "the ranks have different versions of DeepGEMM (rank 0: 2.1, rank 1: None)",
        ),
        request(num_ranks=2),
        [gpu(0, 2, **HAS), gpu(1, 2, **LACKS, compute_capability=(12, 0))],
    ),
    "versions": (
        ("the ranks have different versions of DeepGEMM (rank 0: 2.1, rank 1: 2.2)",),
        request(num_ranks=2),
        [gpu(0, 2, **HAS), gpu(1, 2, deep_gemm_version="2.2")],
    ),
    "shape and dtype": (
        (
            "computes in bf16 only, precision fp8 is not emulated",
            "takes bfloat16 inputs, got float32",
            "hidden is 96, must be a multiple of 64",
            "intermediate is 32, must be a multiple of 64",
        ),
        request(precision="fp8", dtype="float32", hidden=96, intermediate=32),
        [gpu(**HAS)],
    ),
    "gloo": (
        ("the process group is gloo, cuda tensors need nccl",),
        request(num_ranks=2),
        [gpu(rank, 2, **HAS, group_backend="gloo") for rank in range(2)],
    ),
}
