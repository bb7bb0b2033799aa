"""The lines by layer of docs/benchmarks.md, from planted results whose every figure is known."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_moe.bench.schema import LayerRow, Outcome, PeerRow, Result

from ._results import layer_row, measured, sample

ROOT = Path(__file__).resolve().parents[3]
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward_backward"
HEAD = "| layer | forward ms | backward ms | forward+backward ms | of ceiling |"
CODE = {"sm90_bf16_forward": "f", "sm90_bf16_backward": "b"}
KERNELS = {
    ("forward", "bf16"): ("sm90_bf16_forward",),
    ("backward", "bf16"): ("sm90_bf16_backward",),
}


@pytest.fixture(scope="module")
def report() -> Any:
    sys.path.insert(0, str(ROOT / "python/benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    return report


def rows(backend: str, way: str, *milliseconds: float, **changes: Any) -> list[LayerRow]:
    """Burst, and sustained where a second figure is given."""
    changes |= {"dw_dtype": None if way == FORWARD else "bfloat16"}
    changes = {"percent_of_ceiling": 50.0, **changes}
    return [
        layer_row(measured(protocol, ms * 1e-3), backend=backend, direction=way, **changes)
        for protocol, ms in zip(("burst", "sustained"), milliseconds)
    ]


def peer(name: str, way: str, ms: float, precision: str = "bf16") -> PeerRow:
    return PeerRow(
        "peer", name, "30B", 16384, 1, precision, way, "rule", 150.0, measured("its own", ms * 1e-3)
    )


def result(*groups: Any, **environment: Any) -> Result:
    flat = tuple(row for group in groups for row in (group if isinstance(group, list) else [group]))
    return dataclasses.replace(sample(**environment), rows=flat)


def lines(report: Any, *results: Result, changed: tuple[str, ...] = ()) -> list[str]:
    """The lines by layer, where the code of some kernels is another than that which was measured."""
    code = {name: ("e" if name in changed else digest) * 64 for name, digest in CODE.items()}
    kernels = report.staleness.Kernels("b" * 64, code, KERNELS, "13.0.88")
    return "\n\n".join(report.layer_report(list(results), kernels)).splitlines()


def with_code() -> dict[str, Any]:
    return {"code": {name: digest * 64 for name, digest in CODE.items()}, "compiler": "13.0.88"}


def test_a_line_holds_both_protocols_the_limit_and_every_other_backend(report: Any) -> None:
    told = lines(
        report,
        result(
            rows("reference", BOTH, 99, 99),
            rows("grouped", FORWARD, 6, 5),
            rows("grouped", BACKWARD, 13, 14),
            rows("grouped", BOTH, 20, 18),
            rows("deep_gemm", FORWARD, 3, 4),
            rows("fused", FORWARD, 2, 2.5, reserved_sms=0, percent_of_ceiling=70.4),
            rows("fused", BACKWARD, 6, 7, reserved_sms=0),
            rows("fused", BOTH, 8, 9, reserved_sms=0, percent_of_ceiling=74.6),
        ),
    )
    assert f"{HEAD} vs grouped | vs deep_gemm |" in told
    line = "| 30B, T 16384, bf16 | 2 / 2.5 | 6 / 7 | 8 / 9 | 75 % / 75 % |"
    assert f"{line} 2.50x / 2.00x | 1.50x / 1.60x forward |" in told
    assert not [line for line in told if "reference" in line]


def test_directions_measured_apart_are_added_up(report: Any) -> None:
    told = lines(
        report,
        result(
            rows("grouped", FORWARD, 6, 6),
            rows("grouped", BACKWARD, 14, 14),
            rows("fused", FORWARD, 2, 2, percent_of_ceiling=80.0),
            rows("fused", BACKWARD, 6, 6, percent_of_ceiling=60.0),
            # Not on both sides, so not what is compared.
            rows("fused", BOTH, 1, 1, percent_of_ceiling=None),
        ),
    )
    # (80 x 2 + 60 x 6) / 8 and (6 + 14) / (2 + 6)
    assert "| 30B, T 16384, bf16 | 2 / 2 | 6 / 6 | 1 / 1 | 65 % / 65 % | 2.50x / 2.50x |" in told


def test_a_comparison_stays_within_one_run(report: Any) -> None:
    told = lines(
        report,
        result(rows("fused", FORWARD, 2, 2, num_ranks=2), num_ranks=2),
        result(rows("grouped", FORWARD, 6, 6)),
        result(rows("grouped", FORWARD, 6, 6), rows("fused", FORWARD, 2, 2), device="NVIDIA H100"),
    )
    assert "**NVIDIA H200 x 2**, 2026-11-29, torch 2.11.0+cu130" in told
    assert [line for line in told if line.startswith("| 30B")] == [
        "| 30B, T 16384, bf16 | 2 / 2 | - | - | 50 % / 50 % forward |",
        "| 30B, T 16384, bf16, grouped | 6 / 6 | - | - | 50 % / 50 % forward |",
        "| 30B, T 16384, bf16 | 2 / 2 | - | - | 50 % / 50 % forward | 3.00x / 3.00x forward |",
    ]


def test_neither_tokens_nor_protocol_is_mixed(report: Any) -> None:
    told = lines(
        report,
        result(
            rows("fused", FORWARD, 2, 2, num_ranks=4),
            rows("grouped", FORWARD, 6, num_ranks=4, tokens=8192),
            rows("fused", FORWARD, 2, 3, num_ranks=4, shape="235B"),
            rows("grouped", FORWARD, 6, num_ranks=4, shape="235B"),
            num_ranks=4,
        ),
    )
    assert [line for line in told if line.startswith(("| 30B", "| 235B"))] == [
        "| 30B, T 16384, bf16 | 2 / 2 | - | - | 50 % / 50 % forward | - |",
        "| 235B, T 16384, bf16 | 2 / 3 | - | - | 50 % / 50 % forward | 3.00x (burst) forward |",
        "| 30B, T 8192, bf16, grouped | 6 (burst) | - | - | 50 % (burst) forward |",
    ]
    assert "<details><summary>NVIDIA H200 x 4: fewer tokens</summary>" in told


def test_what_matters_most_is_open_and_the_rest_is_folded_away(report: Any) -> None:
    """Reserved SMs have a line at the most tokens alone."""
    made = [
        rows("fused", FORWARD, ms, ms, tokens=tokens, reserved_sms=reserved, precision=precision)
        for precision in ("fp8", "bf16")
        for tokens, ms in ((1024, 0.5), (16384, 2), (8192, 1))
        for reserved in (0, 16)
    ]
    told = [line.split(" | ")[0] for line in lines(report, result(*made))]
    fold = "<details><summary>NVIDIA H200: fewer tokens, SMs reserved for other work</summary>"
    wanted = {fold, "</details>"}
    assert [line for line in told if line.startswith("| 30B") or line in wanted] == [
        "| 30B, T 16384, bf16",
        "| 30B, T 16384, fp8",
        fold,
        "| 30B, T 16384, bf16, 16 SMs reserved",
        "| 30B, T 8192, bf16",
        "| 30B, T 1024, bf16",
        "| 30B, T 16384, fp8, 16 SMs reserved",
        "| 30B, T 8192, fp8",
        "| 30B, T 1024, fp8",
        "</details>",
    ]
    # GitHub takes a table within an element for text unless an empty line stands around it.
    whole = lines(report, result(*made))
    assert not whole[whole.index(fold) + 1]
    assert not whole[whole.index("</details>") - 1]
    assert "<details>" not in "".join(lines(report, result(made[2])))


def test_peers_and_other_precisions_are_named(report: Any) -> None:
    told = lines(
        report,
        result(
            rows("fused", FORWARD, 2, 4),
            rows("fused", BACKWARD, 4, 4),
            rows("fused", FORWARD, 1, 2, precision="fp8"),
            rows("grouped", FORWARD, 6, 6),
            peer("other", FORWARD, 8),
            peer("other", BACKWARD, 16),
            peer("other in fp8", FORWARD, 4, "fp8"),
        ),
    )
    assert f"{HEAD} vs grouped | vs other | vs other in fp8 |" in told
    assert [line.split(" forward | ", 1)[-1] for line in told if line.startswith("| 30B, T 16384, fp8")] == [
        "6.00x / 3.00x forward (bf16) | 8.00x / 4.00x forward (bf16) | 4.00x / 2.00x forward |"
    ]
    (line,) = (line for line in told if line.startswith("| 30B, T 16384, bf16"))
    assert line.endswith("| 3.00x / 1.50x forward | 4.00x / 3.00x | 2.00x / 1.00x forward (fp8) |")


def test_refusals_and_ceilings_make_no_line(report: Any) -> None:
    assert lines(report, result(*sample().rows[:4])) == []
    refused = rows("fused", FORWARD, 2)[0]
    nothing = dict.fromkeys(("tflops", "flops", "flop_rule", "percent_of_ceiling"))
    refused = dataclasses.replace(refused, outcome=Outcome("refused", ("why",), None), **nothing)
    told = lines(report, result(refused, rows("grouped", FORWARD, 6)))
    assert [line for line in told if line.startswith("| 30B")] == [
        "| 30B, T 16384, bf16, grouped | 6 (burst) | - | - | 50 % (burst) forward |"
    ]


def test_one_figure_measured_twice_is_refused(report: Any) -> None:
    with pytest.raises(ValueError, match=r"30B, T 16384, bf16, fused, forward: got one twice, wanted"):
        lines(report, result(rows("fused", FORWARD, 2), rows("fused", FORWARD, 3)))


def test_what_is_stale_is_marked_and_nothing_else(report: Any) -> None:
    measured_so = result(
        rows("fused", FORWARD, 2), rows("fused", BACKWARD, 6), rows("grouped", FORWARD, 6), **with_code()
    )
    burst, fresh = "(burst)", "| 30B, T 16384, bf16 | 2 (burst) | 6 (burst) | - |"
    (line,) = (line for line in lines(report, measured_so) if line.startswith("| 30B"))
    assert line == f"{fresh} 50 % {burst} | 3.00x {burst} forward |"

    told = lines(report, measured_so, changed=("sm90_bf16_forward", "sm90_bf16_backward"))
    assert f"{fresh.replace('bf16 |', 'bf16 (stale) |')} 50 % {burst} | 3.00x {burst} forward |" in told
    assert (
        "stale: `sm90_bf16_backward`, `sm90_bf16_forward` have changed since the rows so marked were measured."
        in told
    )

    told = lines(report, measured_so, changed=("sm90_bf16_backward",))
    stale = fresh.replace("6 (burst)", "6 (burst) (stale)")
    assert f"{stale} 50 % {burst} (stale) | 3.00x {burst} forward |" in told
    assert "stale: `sm90_bf16_backward` has changed since the rows so marked were measured." in told
