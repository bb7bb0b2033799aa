"""The trainer's switch: what it takes, and that every error names its key and what it may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_moe.integrations import DispatchConfig, load_config

SWITCH = """
[trainer.model.moe.dispatch]
type = "mega_moe"
precision = "fp8_bwd"
max_tokens_per_rank = 32768
num_reserved_sms = 0
backend = "reference"
strict = false
layers = [3, 1, 1]
save_gate_up = 1
dw_precision = "fp8"
scale_format = "power_of_two"
"""


def read(text: str, tmp_path: Path, **options: Any) -> DispatchConfig:
    path = tmp_path / "trainer.toml"
    path.write_text(text)
    return load_config(path, **options)


def test_every_key_is_read(tmp_path: Path) -> None:
    want = DispatchConfig("fp8_bwd", 32768, 0, "reference", False, (3, 1), 1, "fp8", "power_of_two")
    assert read(SWITCH, tmp_path) == want
    assert read(SWITCH.replace("trainer.model.moe.dispatch", "moe"), tmp_path, table="moe") == want


def test_the_defaults_are_those_of_a_trainer(tmp_path: Path) -> None:
    got = read('[trainer.model.moe.dispatch]\ntype = "mega_moe"\n', tmp_path)
    assert got == DispatchConfig("bf16", None, 16, "auto", None, "all", 0.0, "bf16", "fp32")


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ('type = "deepep"', ValueError, ("type: got 'deepep'", "'mega_moe'")),
        ("", ValueError, ("type: got None", "'mega_moe'")),
        ('precision = "fp16"', ValueError, ("precision: got 'fp16'", "bf16, fp8, fp8_bwd, mxfp8")),
        ('presision = "bf16"', ValueError, ("presision: no such key", "precision, max_tokens_per_rank")),
        ("max_tokens_per_rank = 0", ValueError, ("max_tokens_per_rank: got 0", "[1, 1048575]")),
        ("max_tokens_per_rank = 1048576", ValueError, ("max_tokens_per_rank: got 1048576", "[1, 1048575]")),
        ('max_tokens_per_rank = "8k"', TypeError, ("max_tokens_per_rank: got '8k'", "an int")),
        ("num_reserved_sms = -1", ValueError, ("num_reserved_sms: got -1", "at least 0")),
        ('backend = "fast"', ValueError, ("backend: got 'fast'", "auto, fused")),
        ("strict = 1", TypeError, ("strict: got 1", "true or false")),
        ("save_gate_up = -0.5", ValueError, ("save_gate_up: got -0.5", "a number >= 0")),
        ('save_gate_up = "all"', TypeError, ("save_gate_up: got str", "a number >= 0")),
        ('dw_precision = "e4m3"', ValueError, ("dw_precision: got 'e4m3'", "bf16, fp8")),
        (
            'dw_precision = "fp8"',
            ValueError,
            ("dw_precision: got 'fp8' with precision 'bf16'", "fp8 or fp8_bwd"),
        ),
        ('scale_format = "ue8m0"', ValueError, ("scale_format: got 'ue8m0'", "fp32, power_of_two")),
        (
            'scale_format = "power_of_two"',
            ValueError,
            ("scale_format: got 'power_of_two' with precision 'bf16'", "fp8 or fp8_bwd"),
        ),
        ('layers = "most"', ValueError, ("layers: got 'most'", '"all"', '"50%"', "a list of numbers")),
        ('layers = "0%"', ValueError, ("layers: got '0%'",)),
        ('layers = "101%"', ValueError, ("layers: got '101%'",)),
        ("layers = []", ValueError, ("layers: got an empty list",)),
        ("layers = [-1]", ValueError, ("layers: got -1", "at least 0")),
        ("layers = [1.5]", TypeError, ("layers: got 1.5", "an int")),
    ],
)
def test_an_error_names_the_key_and_what_it_may_hold(
    changed: str, error: type[Exception], told: tuple[str, ...], tmp_path: Path
) -> None:
    kind = "" if changed.startswith("type") or not changed else 'type = "mega_moe"\n'
    with pytest.raises(error) as caught:
        read(f"[trainer.model.moe.dispatch]\n{kind}{changed}\n", tmp_path)
    for part in told:
        assert part in str(caught.value)
    assert str(caught.value).startswith("trainer.model.moe.dispatch.")


@pytest.mark.parametrize(
    "text",
    ["", "[trainer]\nmodel = 1\n", "[trainer.model.moe]\nx = 1\n"],
    ids=["empty", "no table", "above it"],
)
def test_a_file_without_the_table_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no table \[trainer.*want \[trainer\.model\.moe\.dispatch\]"):
        read(text, tmp_path)


@pytest.mark.parametrize(
    ("layers", "count", "want"),
    [
        ("all", 3, (0, 1, 2)),
        ("50%", 6, (1, 3, 5)),
        ("25%", 8, (3, 7)),
        ("1%", 8, (7,)),
        ("100%", 5, (0, 1, 2, 3, 4)),
        ((4, 0), 5, (0, 4)),
    ],
)
def test_selection(layers: Any, count: int, want: tuple[int, ...]) -> None:
    assert DispatchConfig(layers=layers).select(count) == want


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers: got \[7, 9\], want 0 to 6"):
        DispatchConfig(layers=(7, 1, 9)).select(7)
