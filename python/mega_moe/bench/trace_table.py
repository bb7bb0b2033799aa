"""The summary of a trace as text, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mega_moe.bench.trace_kinds import TRAFFIC, State
from mega_moe.bench.trace_summary import Products, Summary


def render(summary: Summary) -> str:
    ranks = "1 rank" if summary.num_ranks == 1 else f"{summary.num_ranks} ranks"
    lines = [
        f"kernel {summary.kernel_us:.1f} us, {ranks}, {summary.num_ctas} CTAs, {summary.num_events} events",
        f"dropped events: {_dropped(summary.num_full_lanes)}; malformed rows: {summary.malformed}",
        "",
    ]
    if not summary.num_events:
        return "\n".join([*lines[:2], "no events: nothing to sum up"]) + "\n"
    states = list(State)
    lines += columns(
        [
            ("role", *(f"{state.value} %" for state in states), "untold %"),
            *(
                (role.role, *(f"{role.percent[state]:.1f}" for state in states), f"{role.untold:.1f}")
                for role in summary.roles
            ),
        ]
    )
    lines += ["", *_product_lines(summary.products), ""]
    if summary.overlaps:
        lines += columns(
            [
                ("while busy with", "busy us", "products on device %", "in same CTA %", "CTAs in products %"),
                *(
                    (o.part, f"{o.busy_us:.1f}", f"{o.device:.1f}", f"{o.same_cta:.1f}", f"{o.ctas:.1f}")
                    for o in summary.overlaps
                ),
            ]
        )
    else:
        lines.append(f"no {', '.join(TRAFFIC)} was recorded: no overlap to tell")
    lines.append("")
    lines += columns(
        [
            ("event", "count", "mean us", "median us", "longest us"),
            *(
                (t.kind.label, str(t.count), f"{t.mean:.2f}", f"{t.median:.2f}", f"{t.longest:.2f}")
                for t in summary.kinds
            ),
        ]
    )
    return "\n".join(lines) + "\n"


def _product_lines(products: Products | None) -> list[str]:
    if products is None:
        return ["no products were recorded"]
    ends = f"head {products.head:.1f} us, tail {products.tail:.1f} us"
    tenths = " ".join(f"{share:.0f}" for share in products.deciles)
    return [
        f"products from {products.first_start:.1f} us to {products.last_end:.1f} us: {ends}",
        f"tensor cores busy {products.busy_percent:.1f} % of the kernel's time; by tenths: {tenths}",
    ]


def _dropped(full: int) -> str:
    # A lane only stops writing when it is full; how much it had left to say is not recorded.
    return "none" if not full else f"unknown number in {full} full lanes, so the sums below are too small"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with the first column to the left and numbers to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]
