"""Results of the benchmarks as a run could have written them."""

from __future__ import annotations

import dataclasses
from typing import Any

from mega_moe.bench import schema
from mega_moe.bench.schema import (
    CeilingRow,
    Environment,
    LayerRow,
    Outcome,
    PeerRow,
    Result,
    Timing,
)


def measured(protocol: str, seconds: float) -> Outcome:
    timing = Timing(protocol, "CUDA events", seconds, (seconds, seconds), 3, 3, 0.25, 1512.5, None)
    return Outcome("measured", (), timing)


def layer_row(outcome: Outcome, **changes: Any) -> LayerRow:
    row = {
        "kind": "layer",
        "shape": "30B",
        "hidden": 2048,
        "intermediate": 768,
        "num_experts": 128,
        "top_k": 8,
        "tokens": 16384,
        "num_ranks": 1,
        "backend": "grouped",
        "precision": "bf16",
        "dtype": "bfloat16",
        "direction": "backward",
        "dw_dtype": "bfloat16",
        "reserved_sms": None,
        "flops": 3.3e12,
        "flop_rule": "16*T*K*H*I, gate and up recomputed",
        "tflops": 330.0,
        "percent_of_ceiling": 42.9,
        "peak_bytes": 3 << 30,
        "relative_error": 3.1e-3,
        "outcome": outcome,
    }
    return LayerRow(**{**row, **changes})


def sample(**environment: Any) -> Result:
    refused = Outcome("refused", ("no fused kernel in this wheel", "T is odd"), None)
    nothing: dict[str, Any] = dict.fromkeys(
        ("dw_dtype", "flops", "flop_rule", "tflops", "percent_of_ceiling", "peak_bytes", "relative_error")
    )
    nothing |= {"backend": "fused", "direction": "all"}
    where = Environment(
        date="2026-11-29T10:00:00Z",
        device="NVIDIA H200",
        num_sms=132,
        num_ranks=1,
        driver="580.95.05",
        cuda="13.0",
        torch="2.11.0+cu130",
        python="3.12.3",
        platform="Linux",
        mega_moe="0.1.0",
        wheel_sha256="a" * 64,
        wheel_reason=None,
        kernels_sha256="b" * 64,
        kernels_reason=None,
    )
    rows = (
        CeilingRow(
            "ceiling", "product bfloat16", "8192^3", "TF/s", 1.1e12, 770.0, measured("burst", 1.43e-3)
        ),
        CeilingRow(
            "ceiling", "product bfloat16", "8192^3", "TF/s", 1.1e12, 680.0, measured("sustained", 1.6e-3)
        ),
        CeilingRow(
            "ceiling", "peer pull", "256 MiB", "GB/s", 2.7e8, None, Outcome("refused", ("no peer",), None)
        ),
        CeilingRow("ceiling", "device copy", "512 MiB", "GB/s", 1.1e9, 4200.0, measured("burst", 2.6e-4)),
        layer_row(measured("burst", 0.010)),
        layer_row(measured("sustained", 0.012), tflops=275.0, percent_of_ceiling=40.4),
        layer_row(refused, **nothing),
        layer_row(refused, shape="235B", **nothing),
    )
    return Result(schema.SCHEMA_VERSION, dataclasses.replace(where, **environment), ("--quick",), rows)


def with_peer() -> Result:
    """Eight ranks: a layer and another implementation's two rows."""
    peer = {
        "kind": "peer",
        "peer": "other",
        "shape": "30B",
        "tokens": 16384,
        "num_ranks": 8,
        "precision": "bf16",
    }
    rows = (
        layer_row(measured("burst", 0.010), num_ranks=8),
        PeerRow(
            **peer,
            direction="forward",
            flop_rule="6*T*K*H*I",
            tflops=150.0,
            outcome=measured("its own", 0.008),
        ),
        PeerRow(
            **peer,
            direction="all",
            flop_rule=None,
            tflops=None,
            outcome=Outcome("failed", ("no figure",), None),
        ),
    )
    return dataclasses.replace(sample(num_ranks=8), rows=rows)
