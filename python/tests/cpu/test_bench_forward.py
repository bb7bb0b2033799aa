"""The timing of the fused forward's kernel alone: what it refuses. Its figures need a GPU."""

from __future__ import annotations

import pytest
import torch

from mega_moe.bench import forward
from mega_moe.bench.shapes import SHAPES


def test_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert forward.main(["--shape", "tiny"]) == 2
    assert capsys.readouterr().out == "refused: there is no CUDA device\n"


def test_tokens_that_ranks_cannot_share_are_refused() -> None:
    rows = forward.time_forward(SHAPES["tiny"], 12, 8, 0, torch.device("cpu"), True)
    with pytest.raises(ValueError, match="tokens: got 12, wanted a multiple of 8 ranks"):
        next(rows)


def test_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match="shape: got 'small'"):
        forward.find_shape("small")
