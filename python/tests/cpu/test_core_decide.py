"""Every refusal of every backend, with made-up facts: the table must reach each `yield` of decide.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any, NamedTuple

import pytest

from mega_moe._backends.choice import decide as module
from mega_moe._backends.choice.decide import BACKENDS, Verdict, decide, why_no_kernel_router
from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe._backends.choice.request import Request

from ._deep_gemm_rows import ROWS
from ._dispatched_rows import ROWS as DISPATCHED
from ._facts import FULL, PROBE_ONLY, cpu, gpu, kernels, pair, request


class Row(NamedTuple):
    """``reasons`` are all that ``backend`` gives, in order; none: it accepts."""

    backend: str
    reasons: tuple[str, ...]
    request: Request
    facts: Sequence[RankFacts]
    named: str | None = None


MXFP8 = "precision mxfp8 needs Blackwell kernels, which do not exist yet"
NO_LIBRARY = "the compiled library is not loaded: no file"
NO_GPU = "needs an NVIDIA GPU, the device is cpu"
NO_ROUTE = "this wheel holds no routing kernel for sm_90"


def other(name: str, number: int, *, cuda: str = "90a", ranks: str = "") -> str:
    reason = f"the device is sm_{number} ({name}), this wheel holds sm_{cuda}"
    return f"{ranks}{reason}: `mega-moe doctor` says what to install"


def missing(op: str, precision: str, arch: str = "90a") -> str:
    return f"this wheel holds no fused {op} kernel in {precision} for sm_{arch}"


def slow(precision: str) -> str:
    return f"emulates precision {precision} slowly: name it (backend='reference') to use it"


def inputs_only(precision: str) -> str:
    return f"computes in the inputs' dtype only, precision {precision} is not emulated"


HOSTS = (
    "the group spans 2 hosts (node0: ranks [0, 2], node1: ranks [1]); "
    "expert parallelism must stay inside one NVLink domain"
)

TABLE = {
    # fused: accepted
    "h200": Row("fused", (), request(), [gpu()]),
    "h200-fp8": Row("fused", (), request(precision="fp8"), [gpu()]),
    "h200-fp8_bwd": Row("fused", (), request(precision="fp8_bwd"), [gpu()]),
    "h200-dw-fp8": Row("fused", (), request(precision="fp8", dw_precision="fp8"), [gpu()]),
    "h200-pair": Row("fused", (), request(num_ranks=2), pair()),
    "h200-pair-of-containers": Row("fused", (), request(num_ranks=2), pair(host="container1")),
    "h200-peer-unknown": Row(
        "fused", (), request(num_ranks=2), [gpu(0, 2, peer_access=()), gpu(1, 2, peer_access=())]
    ),
    "h200-uuid-unknown": Row("fused", (), request(num_ranks=2), pair(device_uuid=None)),
    "two-sms-left": Row("fused", (), request(num_reserved_sms=130), [gpu()]),
    "driver-newer": Row("fused", (), request(), [gpu(driver_cuda=(14, 1))]),
    "driver-same-major": Row("fused", (), request(), [gpu(library_cuda="13.2")]),
    "driver-unknown": Row("fused", (), request(), [gpu(driver_cuda=None)]),
    "blackwell-wheel": Row(
        "fused",
        (),
        request(),
        [
            gpu(
                compute_capability=(10, 0),
                library_architectures=("90a", "100a"),
                variants=tuple(dataclasses.replace(v, architecture="100a") for v in FULL),
            )
        ],
    ),
    # fused: the request
    "fused-mxfp8": Row(
        "fused",
        (MXFP8, missing("forward", "mxfp8"), missing("backward", "mxfp8")),
        request(precision="mxfp8"),
        [gpu()],
    ),
    "fused-float32": Row("fused", ("takes bfloat16 inputs, got float32",), request(dtype="float32"), [gpu()]),
    "fused-float64": Row("fused", ("takes bfloat16 inputs, got float64",), request(dtype="float64"), [gpu()]),
    "fused-hidden": Row("fused", ("hidden is 384, must be a multiple of 256",), request(hidden=384), [gpu()]),
    "fused-intermediate": Row(
        "fused", ("intermediate is 192, must be a multiple of 128",), request(intermediate=192), [gpu()]
    ),
    "fused-both-multiples": Row(
        "fused",
        ("hidden is 384, must be a multiple of 256", "intermediate is 192, must be a multiple of 128"),
        request(hidden=384, intermediate=192),
        [gpu()],
    ),
    "fused-smaller-tile": Row(
        "fused",
        (),
        request(hidden=384, intermediate=192),
        [gpu(variants=(*FULL, Variant("forward", "90a", "bf16", 128, 64)))],
    ),
    "fused-the-kernel-that-lacks-least": Row(
        "fused",
        ("hidden is 384, must be a multiple of 256",),
        request(hidden=384, intermediate=192),
        [gpu(variants=(*FULL, Variant("forward", "90a", "bf16", 256, 64)))],
    ),
    "fused-reserved": Row(
        "fused",
        ("num_reserved_sms=131 leaves 1 of 132 SMs, needs 2",),
        request(num_reserved_sms=131),
        [gpu()],
    ),
    "fused-small-gpu": Row(
        "fused",
        ("num_reserved_sms=100 leaves -22 of 78 SMs, needs 2",),
        request(num_reserved_sms=100),
        [gpu(num_sms=78)],
    ),
    # fused: the machine
    "fused-cpu": Row("fused", (NO_LIBRARY, NO_GPU), request(), [cpu()]),
    "fused-cpu-with-library": Row("fused", (NO_GPU,), request(), [cpu(library_loaded=True)]),
    "fused-mps": Row(
        "fused", (NO_LIBRARY, "needs an NVIDIA GPU, the device is mps"), request(), [cpu(device="mps")]
    ),
    "fused-no-library": Row(
        "fused", (NO_LIBRARY,), request(), [gpu(library_loaded=False, library_reason="no file")]
    ),
    "sm_89": Row(
        "fused", (other("L40", 89),), request(), [gpu(compute_capability=(8, 9), device_name="L40")]
    ),
    "sm_100": Row(
        "fused", (other("B200", 100),), request(), [gpu(compute_capability=(10, 0), device_name="B200")]
    ),
    "sm_103": Row(
        "fused", (other("B300", 103),), request(), [gpu(compute_capability=(10, 3), device_name="B300")]
    ),
    "sm_103-in-a-100a-wheel": Row(
        "fused",
        (other("B300", 103, cuda="100a"),),
        request(),
        [gpu(compute_capability=(10, 3), device_name="B300", library_architectures=("100a",))],
    ),
    "sm_120": Row(
        "fused",
        (other("RTX 5090", 120),),
        request(),
        [gpu(compute_capability=(12, 0), device_name="RTX 5090")],
    ),
    "sm_unknown": Row("fused", (other("H200", "00"),), request(), [gpu(compute_capability=None)]),
    "wheel-without-architectures": Row(
        "fused",
        ("the device is sm_90 (H200), this wheel holds none: `mega-moe doctor` says what to install",),
        request(),
        [gpu(library_architectures=())],
    ),
    "no-kernels": Row(
        "fused",
        (NO_ROUTE, missing("forward", "bf16")),
        request(),
        [gpu(variants=PROBE_ONLY)],
    ),
    # Plain operators stand in for the backward kernel.
    "no-backward": Row("fused", (), request(), [gpu(variants=kernels("forward bf16"))]),
    "no-backward-fp8": Row("fused", (), request(precision="fp8"), [gpu(variants=kernels("forward fp8"))]),
    "no-copies-of-weights": Row(
        "fused",
        ("this wheel holds no weight-quantizing kernel in fp8 for sm_90a",),
        request(precision="fp8"),
        [gpu(variants=tuple(v for v in FULL if v.op != "quantize_weights"))],
    ),
    "no-backward-and-gloo": Row(
        "fused",
        ("the process group is gloo, cuda tensors need nccl",),
        request(num_ranks=2),
        [gpu(r, 2, group_backend="gloo", variants=kernels("forward bf16")) for r in range(2)],
    ),
    "full-and-gloo": Row(
        "fused", (), request(num_ranks=2), [gpu(r, 2, group_backend="gloo") for r in range(2)]
    ),
    "no-forward": Row(
        "fused",
        (missing("forward", "bf16"),),
        request(),
        [gpu(variants=kernels("backward bf16"))],
    ),
    "no-route": Row(
        "fused", (NO_ROUTE,), request(), [gpu(variants=tuple(v for v in FULL if v.op != "route"))]
    ),
    "kernels-of-another-architecture": Row(
        "fused",
        (NO_ROUTE, missing("forward", "bf16")),
        request(),
        [gpu(variants=tuple(dataclasses.replace(v, architecture="100a") for v in FULL))],
    ),
    "fp8-without-fp8-kernels": Row(
        "fused",
        (missing("forward", "fp8"),),
        request(precision="fp8"),
        [gpu(variants=kernels("forward bf16", "backward bf16"))],
    ),
    "fp8_bwd-without-fp8-backward": Row(
        "fused",
        (),
        request(precision="fp8_bwd"),
        [gpu(variants=kernels("forward bf16", "backward bf16"))],
    ),
    "fp8_bwd-without-bf16-forward": Row(
        "fused",
        (missing("forward", "bf16"),),
        request(precision="fp8_bwd"),
        [gpu(variants=kernels("forward fp8", "backward fp8"))],
    ),
    "driver-too-old": Row(
        "fused",
        (
            "the driver serves CUDA 12.9, this wheel is built with CUDA 13.0: `mega-moe doctor` says what to install",
        ),
        request(),
        [gpu(driver_cuda=(12, 9))],
    ),
    # fused: the group
    "rank-1-has-another-gpu": Row(
        "fused",
        (other("A100", 80, ranks="rank 1: "),),
        request(num_ranks=2),
        pair(compute_capability=(8, 0), device_name="A100"),
    ),
    "rank-1-has-no-gpu": Row(
        "fused",
        (f"rank 1: {NO_LIBRARY}", f"rank 1: {NO_GPU}"),
        request(num_ranks=2),
        [gpu(0, 2), cpu(host="node0", machine="boot0", group_backend="gloo")],
    ),
    "two-hosts": Row(
        "fused",
        (HOSTS,),
        request(num_experts=6, num_ranks=3),
        [gpu(0, 3), gpu(1, 3, host="node1", machine="boot1"), gpu(2, 3)],
    ),
    "two-hosts-without-boot-id": Row(
        "fused",
        (HOSTS,),
        request(num_experts=6, num_ranks=3),
        [gpu(0, 3, machine=""), gpu(1, 3, host="node1", machine=""), gpu(2, 3, machine="")],
    ),
    "same-gpu-twice": Row(
        "fused",
        ("ranks 0 and 1 share the GPU gpu0; each rank needs a GPU of its own",),
        request(num_ranks=2),
        pair(device_uuid="gpu0"),
    ),
    "no-peer-access": Row(
        "fused",
        ("ranks 0 and 1: no peer access between cuda:0 and cuda:1",),
        request(num_ranks=2),
        [gpu(0, 2, peer_access=(("gpu1", False),)), gpu(1, 2)],
    ),
    # Rank 0 sees its own GPU only (CUDA_VISIBLE_DEVICES), so only rank 1 can tell.
    "no-peer-access-backwards": Row(
        "fused",
        ("ranks 0 and 1: no peer access between cuda:0 and cuda:1",),
        request(num_ranks=2),
        [gpu(0, 2, peer_access=()), gpu(1, 2, peer_access=(("gpu0", False),))],
    ),
    "fused-many-ranks": Row(
        "fused",
        ("the group has 33 ranks, one kernel spans at most 32",),
        request(num_ranks=33, num_experts=66),
        [gpu(r, 33) for r in range(33)],
    ),
    # grouped
    "grouped": Row("grouped", (), request(), [cpu()]),
    "grouped-float32": Row("grouped", (), request(dtype="float32"), [cpu()]),
    "grouped-gpu": Row("grouped", (), request(), [gpu()]),
    "grouped-old-gpu": Row("grouped", (), request(), [gpu(compute_capability=(8, 0), library_loaded=False)]),
    "grouped-two-hosts": Row("grouped", (), request(num_ranks=2), pair(host="node1", machine="boot1")),
    "grouped-any-shape-on-cpu": Row("grouped", (), request(hidden=5, intermediate=3), [cpu()]),
    "grouped-any-shape-in-float32": Row(
        "grouped", (), request(hidden=5, intermediate=3, dtype="float32"), [gpu()]
    ),
    "grouped-group": Row("grouped", (), request(num_ranks=2), [cpu(group_backend="cpu:gloo,cuda:nccl")] * 2),
    "grouped-fp8": Row("grouped", (inputs_only("fp8"),), request(precision="fp8"), [cpu()]),
    "grouped-fp8_bwd": Row("grouped", (inputs_only("fp8_bwd"),), request(precision="fp8_bwd"), [gpu()]),
    "grouped-mxfp8": Row("grouped", (inputs_only("mxfp8"),), request(precision="mxfp8"), [cpu()]),
    "grouped-float64": Row(
        "grouped", ("takes bfloat16 and float32 inputs, got float64",), request(dtype="float64"), [cpu()]
    ),
    "grouped-shape": Row(
        "grouped",
        (
            "hidden is 516, must be a multiple of 8 on a GPU",
            "intermediate is 4, must be a multiple of 8 on a GPU",
        ),
        request(hidden=516, intermediate=4),
        [gpu()],
    ),
    "grouped-mps": Row(
        "grouped", ("runs on cpu and cuda, the device is mps",), request(), [cpu(device="mps")]
    ),
    "grouped-gloo-for-cuda": Row(
        "grouped",
        ("the process group is gloo, cuda tensors need nccl",),
        request(num_ranks=2),
        [gpu(r, 2, group_backend="gloo") for r in range(2)],
    ),
    "grouped-nccl-for-cpu": Row(
        "grouped",
        ("the process group is nccl, cpu tensors need gloo",),
        request(num_ranks=2),
        [cpu(group_backend="nccl")] * 2,
    ),
    # reference
    "reference": Row("reference", (), request(), [cpu()]),
    "reference-float64": Row("reference", (), request(dtype="float64", hidden=3), [gpu()]),
    "reference-fp8": Row("reference", (), request(precision="fp8"), [cpu()], "reference"),
    "reference-fp8_bwd": Row("reference", (), request(precision="fp8_bwd"), [gpu()], "reference"),
    "reference-dw-fp8": Row(
        "reference", (), request(precision="fp8_bwd", dw_precision="fp8"), [cpu()], "reference"
    ),
    "reference-fp8-not-named": Row("reference", (slow("fp8"),), request(precision="fp8"), [cpu()]),
    "reference-fp8_bwd-not-named": Row(
        "reference", (slow("fp8_bwd"),), request(precision="fp8_bwd"), [gpu()], "fused"
    ),
    "reference-fp8-shape": Row(
        "reference",
        (
            "hidden is 64, must be a multiple of the scale block 128",
            "intermediate is 192, must be a multiple of the scale block 128",
        ),
        request(precision="fp8", hidden=64, intermediate=192),
        [cpu()],
        "reference",
    ),
    "reference-mxfp8": Row("reference", (MXFP8,), request(precision="mxfp8"), [cpu()], "reference"),
    "reference-mps": Row(
        "reference", ("runs on cpu and cuda, the device is mps",), request(), [cpu(device="mps")]
    ),
    "reference-gloo-for-cuda": Row(
        "reference",
        ("the process group is gloo, cuda tensors need nccl",),
        request(num_ranks=2),
        [gpu(r, 2, group_backend="gloo") for r in range(2)],
    ),
}
TABLE |= {f"deep_gemm-{name}": Row("deep_gemm", *row) for name, row in ROWS.items()}
TABLE |= {f"dispatched-{name}": Row("dispatched", *row) for name, row in DISPATCHED.items()}


def verdict(row: Row) -> Verdict:
    (found,) = (v for v in decide(row.request, row.facts, row.named) if v.backend == row.backend)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_row(name: str) -> None:
    row = TABLE[name]
    got = verdict(row)
    assert got.reasons == row.reasons
    assert got.accepted == (not row.reasons)


def lines_run(row: Row) -> set[int]:
    """Lines of decide.py that judging ``row`` runs."""
    seen: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        decide(row.request, row.facts, row.named)
        why_no_kernel_router(row.request, row.facts)
    finally:
        sys.settrace(before)
    return seen


def refusals() -> list[set[int]]:
    """Lines of each `yield` of a reason in decide.py."""
    tree = ast.parse(inspect.getsource(module))
    yields = [node for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    return [set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) for node in yields]


def never_hit(seen: Iterable[set[int]]) -> list[int]:
    """First lines of the refusals that no row reached; ``seen``: `lines_run` of each row."""
    every: set[int] = set().union(*seen)
    return [min(lines) for lines in refusals() if not every & lines]


def test_the_table_reaches_every_refusal() -> None:
    """And for each refusal: without the rows that give it, the check names its line."""
    seen = [lines_run(row) for row in TABLE.values()]
    assert len(refusals()) >= 18
    assert not never_hit(seen)
    for lines in refusals():
        rest = [one for one in seen if not one & lines]
        assert len(rest) < len(seen)
        assert min(lines) in never_hit(rest)


def test_all_reasons_of_a_backend_come_at_once() -> None:
    wrong = request(precision="fp8", dtype="float32", hidden=100, intermediate=100, num_reserved_sms=200)
    reasons = decide(wrong, [gpu(driver_cuda=(12, 4), compute_capability=(8, 9))])[0].reasons
    assert len(reasons) == 6
    words = ("float32", "hidden", "intermediate", "sm_89", "driver", "num_reserved_sms")
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def test_a_reason_of_many_ranks_is_given_once() -> None:
    facts = [cpu(device="mps")] * 4
    assert len(verdict(Row("grouped", (), request(num_ranks=4), facts)).reasons) == 1


def test_every_backend_is_judged_in_order_of_preference() -> None:
    verdicts = decide(request(), [gpu()])
    assert (
        tuple(v.backend for v in verdicts)
        == BACKENDS
        == (*("fused", "dispatched", "deep_gemm", "grouped", "reference"),)
    )


def test_decide_changes_nothing() -> None:
    facts = pair()
    before = [asdict(fact) for fact in facts]
    assert decide(request(num_ranks=2), facts) == decide(request(num_ranks=2), tuple(facts))
    assert before == [asdict(fact) for fact in facts]
