"""A row is stale exactly when the code of a kernel that its calls launch is not what was measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mega_moe._backends.choice import decide
from mega_moe._backends.choice.request import Request
from mega_moe._base.types import PRECISIONS
from mega_moe.bench import schema

ROOT = Path(__file__).resolve().parents[3]
PLAIN = ("grouped", "deep_gemm", "reference")


@pytest.fixture(scope="module")
def staleness() -> ModuleType:
    sys.path.insert(0, str(ROOT / "python/benchmarks"))
    try:
        import staleness
    finally:
        sys.path.pop(0)
    return staleness


@dataclass
class Row:
    """What is looked at of a row of any kind."""

    kind: str
    backend: str = "fused"
    precision: str = "bf16"
    direction: str = "forward"
    dtype: str = "bfloat16"
    dw_precision: str | None = None


@dataclass
class Where:
    """What is looked at of an environment."""

    code: dict[str, str] | None
    kernels_sha256: str | None = "old"
    compiler: str | None = "13.0.88"
    num_sms: int | None = 132


NAMES = {
    ("forward", "bf16"): ("forward_bf16",),
    ("forward", "fp8"): ("forward_fp8",),
    ("backward", "bf16"): ("backward_bf16",),
    ("backward", "fp8"): ("backward_fp8",),
    ("backward_fp8_wgrad", "fp8"): ("gradients_fp8",),
    ("quantize_weights", "fp8"): ("quantize_weights",),
    ("route", "none"): ("route",),
}
MEASURED = {name: f"{name} as it was" for names in NAMES.values() for name in names}


def stale_after(staleness: ModuleType, row: Row, *edited: str, **where: Any) -> tuple[str, ...]:
    """What makes the row stale after an edit of some variants."""
    code = MEASURED | {name: f"{name} as it is" for name in edited}
    present = staleness.Kernels("b" * 64, code, NAMES, "13.0.88")
    return tuple(staleness.changed(row, Where(**({"code": MEASURED} | where)), present))


CASES = [
    (Row("ceiling"), ()),
    (Row("peer"), ()),
    (Row("layer"), ("forward_bf16",)),
    (Row("layer", direction="backward"), ("backward_bf16",)),
    (Row("layer", direction="forward_backward"), ("forward_bf16", "backward_bf16")),
    (Row("layer", precision="fp8_bwd"), ("forward_bf16",)),
    (
        Row("layer", precision="fp8_bwd", direction="forward_backward"),
        ("forward_bf16", "backward_fp8", "quantize_weights"),
    ),
    (Row("layer", precision="fp8"), ("forward_fp8", "quantize_weights")),
    (
        Row("layer", precision="fp8", direction="backward", dw_precision="fp8"),
        ("gradients_fp8", "quantize_weights"),
    ),
    (Row("layer", precision="fp8", dw_precision="fp8"), ("forward_fp8", "quantize_weights")),
    (Row("step"), ("forward_bf16", "backward_bf16")),
    *((Row("layer", name), ()) for name in PLAIN),
    *((Row("layer", name, "fp8", "forward_backward"), ()) for name in PLAIN),
    *((Row("step", name), ()) for name in PLAIN),
]


@pytest.mark.parametrize(("row", "uses"), CASES)
def test_a_row_is_stale_by_the_kernels_that_it_launches_and_no_others(
    staleness: ModuleType, row: Row, uses: tuple[str, ...]
) -> None:
    assert stale_after(staleness, row) == ()
    for name in MEASURED:
        assert stale_after(staleness, row, name) == ((name,) if name in uses else ())
    assert stale_after(staleness, row, *MEASURED) == uses
    for compiler in ("12.9.86", None):
        assert stale_after(staleness, row, *MEASURED, compiler=compiler) == ()


@pytest.mark.parametrize(("row", "uses"), CASES)
def test_without_code_any_change_counts_for_the_rows_that_launch_kernels(
    staleness: ModuleType, row: Row, uses: tuple[str, ...]
) -> None:
    assert stale_after(staleness, row, code=None) == ((staleness.ANY,) if uses else ())
    assert stale_after(staleness, row, code=None, kernels_sha256="b" * 64) == ()
    assert stale_after(staleness, row, code=None, kernels_sha256=None) == ((staleness.ANY,) if uses else ())
    assert stale_after(staleness, row, code=None, num_sms=None) == ()


@pytest.mark.parametrize(
    ("row", "lost", "told"),
    [
        # The wheel had no kernel for it, so something else was measured.
        (Row("layer", direction="backward"), {"backward_bf16"}, ("backward_bf16",)),
        (Row("step"), {"backward_bf16"}, ("backward_bf16",)),
        (Row("layer"), {"backward_bf16"}, ()),
    ],
)
def test_a_kernel_that_the_measured_wheel_lacked(
    staleness: ModuleType, row: Row, lost: set[str], told: tuple[str, ...]
) -> None:
    code = {name: digest for name, digest in MEASURED.items() if name not in lost}
    assert stale_after(staleness, row, code=code) == told


def test_kernels_of_another_architecture_and_those_that_are_gone(staleness: ModuleType) -> None:
    both = NAMES | {("forward", "bf16"): ("forward_bf16", "forward_of_another")}
    more = staleness.Kernels("b", MEASURED | {"forward_of_another": "x"}, both, "13.0.88")
    assert staleness.changed(Row("layer"), Where(MEASURED), more) == ()
    gone = staleness.Kernels("b", MEASURED, NAMES, "13.0.88")
    renamed = {name: digest for name, digest in MEASURED.items() if name != "forward_bf16"} | {"fwd": "x"}
    assert staleness.changed(Row("layer"), Where(renamed), gone) == ("fwd",)
    assert staleness.changed(Row("layer", "grouped"), Where(renamed), gone) == ()


def test_footnotes_name_what_changed(staleness: ModuleType) -> None:
    kernels = staleness.Kernels("b" * 64, {}, {}, "13.0.88")

    def told(*names: str, **where: Any) -> str:
        return "\n".join(staleness.footnote(names, Where(**({"code": MEASURED} | where)), kernels))

    assert told("b", "a", "b").startswith("\nstale: `a`, `b` have changed since the rows")
    assert told("a").startswith("\nstale: `a` has changed since the rows")
    assert told(staleness.ANY, code=None).startswith("\nstale: the present `kernels/` is `bbbbbbbbbbbb`")
    assert told() == told(code=None, compiler=None) == told(code={}, compiler="12.9.86") == ""
    assert told(compiler="12.9.86") == (
        "\nNot judged whether stale: measured with code of nvcc 12.9.86, the wheel here is of 13.0.88."
    )


def test_every_op_is_of_a_row_or_of_none(staleness: ModuleType) -> None:
    """A new op must be told to what rows it belongs."""
    every = {"kind": "layer", "dtype": "bfloat16", "direction": "forward_backward"}
    rows = [
        Row(backend=name, precision=form, **every) for name in decide.BACKENDS for form in ("bf16", "fp8")
    ]
    rows.append(Row(precision="fp8", dw_precision="fp8", **every))
    of_rows = {op for row in rows for op, _ in staleness.launched(row, True)}
    assert of_rows & staleness.UNMEASURED == set()
    ops = {op for op, _ in staleness.variants(ROOT / "kernels")} - {"stage"}
    assert ops == of_rows | staleness.UNMEASURED
    for precision in PRECISIONS:
        request = Request(8, 128, 2, 256, 128, precision)
        pair = staleness.PRECISIONS.get(precision, (precision, precision))
        assert pair == (request.forward_precision, request.backward_precision)


def test_rows_of_the_results_that_lie_here(staleness: ModuleType) -> None:
    """Other code of the backward's kernels is seen by the rows that launch it, and by no others."""
    names = staleness.variants(ROOT / "kernels")
    results = sorted((ROOT / "python/benchmarks/results").glob("*.json"))
    assert results
    seen = set()
    for path in results:
        result = schema.read(path)
        where = result.environment
        assert where.code is not None
        code = {name: "0" * 64 if "_backward" in name else digest for name, digest in where.code.items()}
        now = staleness.Kernels("b" * 64, code, names, where.compiler)
        for row in result.rows:
            if row.outcome.status == "measured":
                stale = staleness.changed(row, where, now)
                runs_backward = (
                    isinstance(row, schema.LayerRow)
                    and row.backend == "fused"
                    and row.direction in {"backward", "forward_backward"}
                )
                form = "bf16" if getattr(row, "precision", "bf16") == "bf16" else "fp8"
                own = "_gradients" if getattr(row, "dw_precision", None) == "fp8" else ""
                assert stale == ((f"sm90_{form}_backward{own}",) if runs_backward else ())
                seen.add(runs_backward)
    assert seen == {True, False}
