"""One run of `mega-moe bench step` as a table."""

from __future__ import annotations

from typing import Any

import staleness
from cells import heading, line, place, short

COLUMNS = (
    "backend",
    "precision",
    "step s",
    "tokens/s per GPU",
    "MFU",
    "MoE s",
    "MoE forwards",
    "peak GiB",
    "load max/mean",
)


def section(result: Any, kernels: Any) -> str:
    """Where it ran, its table, what was refused."""
    where = result.environment
    shown = result.rows[0]
    head = (
        f"**Training step, {place(where)}**, {where.date[:10]}, torch {where.torch}, kernels "
        f"{short(where.kernels_sha256)}, wheel {short(where.wheel_sha256)}. {shown.model}: {shown.layers} of "
        f"{shown.model_layers} layers, sequence {shown.sequence} a GPU, EP {shown.ep_size}, full activation "
        "checkpointing, FSDP2, AdamW; mean of the steps after the first ones."
    )
    lines = [head, "", *heading(*COLUMNS)]
    changed: list[str] = []
    for row in result.rows:
        if row.status == "measured":
            old = staleness.changed(row, where, kernels)
            changed += old
            lines.append(
                line(
                    f"{row.backend} (stale)" if old else row.backend,
                    row.precision,
                    f"{row.seconds:.3f}",
                    f"{row.tokens_per_s:.0f}",
                    "-" if row.mfu is None else f"{row.mfu:.1%}",
                    f"{row.moe_seconds:.3f}",
                    str(row.moe_forwards),
                    "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
                    f"{row.load_max_over_mean:.2f}",
                )
            )
    lines += staleness.footnote(changed, where, kernels)
    missing = [
        f"- {row.status}: {row.backend}: {'; '.join(row.reasons)}"
        for row in result.rows
        if row.status != "measured"
    ]
    # An empty line ends the table, which would swallow the list as further rows.
    return "\n".join([*lines, *([""] if missing else []), *missing])
