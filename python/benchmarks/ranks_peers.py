"""What the scripts of other implementations print, as rows. The scripts are run as they are."""

from __future__ import annotations

import re
from pathlib import Path

from report import ROOT, load, schema

shapes = load(ROOT / "python/mega_moe/bench/shapes.py")

PROTOCOL = "its own"
BASELINE_NAME, FP8_NAME = "torch grouped + all-to-all", "deep_gemm fp8_mega_moe"

_BASELINE = re.compile(
    r"^(?P<shape>\S+) EP \d+ baseline fwd ms (?P<forward>[\d.]+) .* -> bwd (?P<backward>[\d.]+)", re.MULTILINE
)
_FP8 = re.compile(
    r"^(?P<shape>\S+) EP \d+ sgl fp8 mega fwd ms (?P<forward>[\d.]+) .* finite (?P<finite>\w+)", re.MULTILINE
)
_FAILED = re.compile(r"^(?P<shape>\S+) FAIL (?P<reason>.*)$", re.MULTILINE)


def baseline_rows(text: str, tokens: int, num_ranks: int) -> list:
    """The grouped baseline: forward, and backward as the difference to both."""
    rows = []
    for found in _BASELINE.finditer(text):
        for direction in ("forward", "backward"):
            seconds = float(found[direction]) * 1e-3
            rows.append(row(BASELINE_NAME, found["shape"], tokens, num_ranks, "bf16", direction, seconds))
    return rows


def fp8_rows(text: str, tokens: int, num_ranks: int) -> list:
    """The FP8 peer: forward alone; a shape that failed is a failed row."""
    rows = []
    for found in _FP8.finditer(text):
        name, shape = FP8_NAME, found["shape"]
        if found["finite"] == "True":
            seconds = float(found["forward"]) * 1e-3
            rows.append(row(name, shape, tokens, num_ranks, "fp8", "forward", seconds))
        else:
            rows.append(
                absent(name, shape, tokens, num_ranks, "fp8", "failed", "its result holds NaN or Inf")
            )
    for found in _FAILED.finditer(text):
        reason = found["reason"][:300]
        rows.append(absent(FP8_NAME, found["shape"], tokens, num_ranks, "fp8", "failed", reason))
    return rows


SCRIPTS = {"baseline_grouped.py": baseline_rows, "peer_deep_gemm_fp8.py": fp8_rows}


def read(folder: Path, tokens: int, num_ranks: int) -> list:
    """Rows of the logs that ranks.py left of these scripts."""
    rows = []
    for script, rows_of in SCRIPTS.items():
        log = folder / f"peer-{script}-{tokens}.log"
        if log.is_file():
            rows += rows_of(log.read_text(errors="replace"), tokens, num_ranks)
    return rows


def row(peer: str, shape: str, tokens: int, num_ranks: int, precision: str, direction: str, seconds: float):
    """A figure that the script printed: a median, of calls that it alone counts."""
    work = shapes.layer_work(
        shapes.find_shape(shape), tokens, direction, precision=precision, dtype="bfloat16", recompute=False
    )
    timing = schema.Timing(
        PROTOCOL, "CUDA events", seconds, (seconds,), 1, 1, 0.0, None, "the script reads no clock"
    )
    return schema.PeerRow(
        kind="peer",
        peer=peer,
        shape=shape,
        tokens=tokens,
        num_ranks=num_ranks,
        precision=precision,
        direction=direction,
        flop_rule=work.rule,
        tflops=work.total / seconds * 1e-12,
        outcome=schema.Outcome("measured", (), timing),
    )


def absent(peer: str, shape: str, tokens: int, num_ranks: int, precision: str, status: str, reason: str):
    return schema.PeerRow(
        kind="peer",
        peer=peer,
        shape=shape,
        tokens=tokens,
        num_ranks=num_ranks,
        precision=precision,
        direction="all",
        flop_rule=None,
        tflops=None,
        outcome=schema.Outcome(status, (reason,), None),
    )
