"""The timing of the fused kernels alone: what it asks for and what it refuses. Its figures need a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mega_moe._backends.choice import facts
from mega_moe.bench import kernels
from mega_moe.bench.kernel_ranks import Options, why_not
from mega_moe.bench.schema import Timing
from mega_moe.bench.shapes import SHAPES

from ._facts import gpu


def cases(*words: str) -> list[tuple[Options, int]]:
    return list(kernels.cases(kernels.parser().parse_args([*words])))


def test_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--shape", "tiny"]) == 2
    assert capsys.readouterr().out == "refused: there is no CUDA device\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "12", "--ranks", "1,8"], "tokens: got 12, wanted a multiple of 8 ranks"),
        (["--shape", "small"], "shape: got 'small', wanted one of"),
        (["--direction", "up"], "direction: got 'up', wanted one of forward, backward"),
        (["--parts", "dx,dy"], "parts: got 'dy', wanted one of all, dx, dw"),
        (["--dw", "fp16"], "dw: got 'fp16', wanted one of bf16, fp32, fp8"),
        (
            ["--dw", "fp8"],
            "dw_precision: got 'fp8' with precision 'bf16', want it with precision fp8 or fp8_bwd",
        ),
        (["--precision", "fp16"], "precision: got 'fp16', wanted one of bf16, fp8, fp8_bwd"),
    ],
)
def test_words_that_are_not_known_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.main(words) == 2
    assert message in capsys.readouterr().out


def test_a_forward_has_no_parts_and_dx_no_dtype_of_weights() -> None:
    made = cases(
        "--shape", "tiny", "--tokens", "16", "--ranks", "2", "--dw", "bf16,fp32", "--parts", "all,dx,dw"
    )
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [(o.direction, o.parts, o.dw_dtype) for o, _ in made] == [
        ("forward", "all", bf16),
        ("backward", "all", bf16),
        ("backward", "all", fp32),
        ("backward", "dx", bf16),
        ("backward", "dw", bf16),
        ("backward", "dw", fp32),
    ]
    assert {(o.shape.name, o.tokens, o.num_ranks) for o, _ in made} == {("tiny", 8, 2)}


def test_dw_in_fp8_is_a_form_of_the_kernel() -> None:
    made = cases(
        "--direction", "backward", "--shape", "tiny", "--precision", "fp8,fp8_bwd", "--dw", "fp8,bf16"
    )
    assert [(o.precision, o.dw_precision, o.dw_dtype) for o, _ in made] == [
        (precision, dw, torch.bfloat16) for precision in ("fp8", "fp8_bwd") for dw in ("fp8", "bf16")
    ]
    assert [o.request().mode(backward=True).wgrad for o, _ in made[:2]] == ["fp8", "bf16"]


def test_what_is_kept_and_how_uneven_experts_are_reach_the_options() -> None:
    made = cases("--shape", "tiny", "--tokens", "16", "--saved", "0,1.5", "--hot", "4")
    assert [(o.direction, o.saved, o.hot) for o, _ in made] == [
        (direction, saved, 4.0) for saved in (0.0, 1.5) for direction in ("forward", "backward")
    ]
    with pytest.raises(ValueError, match=r"save_gate_up: got -1.0, want a number >= 0"):
        cases("--saved", "-1")


def test_every_combination_is_asked_for_once() -> None:
    made = cases(
        "--shape",
        "tiny,30B",
        "--precision",
        "bf16,fp8",
        "--tokens",
        "16,32",
        "--ranks",
        "1,2",
        "--reserved",
        "0,16",
    )
    assert len(made) == len(set(made)) == 2**5 * 2  # both directions


@pytest.mark.parametrize(
    ("direction", "parts", "units"),
    [("forward", "all", 6), ("backward", "all", 16), ("backward", "dx", 10), ("backward", "dw", 12)],
)
def test_flops_are_those_of_the_products_that_are_asked_for(direction: str, parts: str, units: int) -> None:
    options = Options(SHAPES["30B"], 2048, 8, direction, parts=parts)
    assert kernels.flops(options) == units * 16384 * 8 * 2048 * 768


def test_a_row_says_what_was_timed() -> None:
    timing = Timing("burst", "cuda", 0.002, (0.002,), 5, 1, 0.25, 1700.0, None)
    row = kernels.KernelRow(
        "backward", "30B", "bf16", 16384, 1, 0, 132, "fp32", "dw", 0.0, 0, None, 3 << 29, 500.0, timing
    )
    assert str(row) == (
        "30B bf16 backward of dw alone, dW in fp32, T=16384 in all, 1 ranks of 132 SMs, 0 SMs reserved, burst: "
        "2.000 ms, 500 TF/s, 1700 MHz, 1.50 GiB a rank"
    )
    forward = replace(row, direction="forward", dw=None, parts=None)
    assert str(forward).startswith("30B bf16 forward, T=16384 in all")
    kept = replace(row, saved=1.1, saved_nbytes=1 << 29, hot=4.0)
    assert str(kept).endswith("1.50 GiB a rank, 0.50 GiB of gate and up kept, expert 0 has 4 times its share")


@pytest.mark.parametrize(("direction", "refused"), [("forward", False), ("backward", True)])
def test_a_wheel_without_a_backward_times_none(
    direction: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_alone = tuple(v for v in gpu().variants if v.op != "backward")
    monkeypatch.setattr(facts, "collect", lambda *_: gpu(variants=forward_alone))
    reasons = why_not(Options(SHAPES["30B"], 128, 1, direction), torch.device("cuda", 0))
    assert any("holds no fused backward kernel" in reason for reason in reasons) is refused
    monkeypatch.setattr(facts, "collect", lambda *_: gpu())
    assert why_not(Options(SHAPES["30B"], 128, 1, direction), torch.device("cuda", 0)) == []


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_bwd"])
def test_gate_and_up_can_be_kept(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(facts, "collect", lambda *_: gpu())
    options = Options(SHAPES["30B"], 128, 1, saved=1.0, precision=precision)
    assert why_not(options, torch.device("cuda", 0)) == []
