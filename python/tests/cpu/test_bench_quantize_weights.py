"""The timing of the kernel that copies weights: its bytes, and what it refuses. Its figures need a GPU."""

from __future__ import annotations

import pytest
import torch

from mega_moe.bench import quantize_weights
from mega_moe.bench.shapes import SHAPES

from ._fake_kernels import FakeKernels, fake_kernels

_ = fake_kernels  # a fixture


def test_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantize_weights.main([]) == 2
    assert capsys.readouterr().out == "refused: there is no CUDA device\n"


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    rows = quantize_weights.time_quantize(SHAPES["tiny"], 3, {}, torch.device("cpu"), True)
    with pytest.raises(ValueError, match="ep: got 3, wanted a divisor of 8 experts"):
        next(rows)


def test_bytes() -> None:
    elements = 16 * 3072 * 4096
    scales = 16 * 24 * 32 * 4
    assert quantize_weights.quantize_bytes(16, 3072, 4096, "both") == 4 * elements + scales
    assert quantize_weights.quantize_bytes(16, 3072, 4096, "codes") == 3 * elements + scales


@pytest.mark.parametrize("copies", quantize_weights.COPIES)
def test_copies_are_checked(fake_kernels: FakeKernels, copies: str) -> None:
    made = quantize_weights._Weight(2, 128, 256, copies, torch.device("cpu"))
    made.call()
    made.check()
    made.poison()
    with pytest.raises(RuntimeError, match="got relative L2 nan"):
        made.check()
