"""The generator of the instances refuses a variants.toml that is wrong, and writes nothing that is already right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
GOOD = (KERNELS / "variants.toml").read_text()


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(KERNELS)
        return importlib.import_module("generate")


def test_one_source_per_variant(
    generate: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate.main(KERNELS / "variants.toml", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    names = [variant["name"] for variant in generate.load_variants(KERNELS / "variants.toml")]
    assert lines == [f"90a;{tmp_path / '90a' / name}.cu" for name in names]
    table = (tmp_path / "table" / "host" / "variant_table.inc").read_text()
    listed = json.loads((tmp_path / "variants.json").read_text())["variants"]
    assert [variant["name"] for variant in listed] == names
    assert all(f"&facts_{name}}}" in table for name in names)


def test_keeps_what_did_not_change(generate: ModuleType, tmp_path: Path) -> None:
    generate.main(KERNELS / "variants.toml", tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    generate.main(KERNELS / "variants.toml", tmp_path)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"sm90_fp8_forward"',
            '"sm90_bf16_forward"',
            "name 'sm90_bf16_forward' occurs 2 times, must be unique",
        ),
        ('op = "clock_probe"', 'op = "probe"', "op is 'probe', must be one of"),
        ('architecture = "90a"', 'architecture = "100f"', "architecture is '100f', must be like '90a'"),
        ('precision = "fp8"', 'precision = "fp4"', "precision is 'fp4', must be one of"),
        ('wgrad = "fp8"', 'wgrad = "none"', "wgrad is 'none', must be one of"),
        ('saved = "gate_up"', 'saved = "x"', "saved is 'x', must be one of"),
        ("trace = true", 'trace = "true"', "trace is 'true', must be of type bool"),
        ("block_n = 256\n", "", "keys are"),
        ("spill_bytes = 0\n", "", "keys are"),
        ("spill_bytes = 0\n", "spill_bytes = 0\nstages = 4\n", "keys are"),
        ("threads = 256", 'threads = "256"', "threads is '256', must be of type int"),
    ],
)
def test_refuses(generate: ModuleType, tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = tmp_path / "variants.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"variants\.toml: ") as error:
        generate.load_variants(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("op", "precision", "block_n", "want"),
    [
        ("forward", "bf16", 256, (256, 128)),
        ("forward", "bf16", 128, (256, 128)),
        ("forward", "fp8", 256, (512, 128)),
        ("backward", "bf16", 256, (256, 128)),
        ("backward", "fp8", 256, (256, 128)),
    ],
)
def test_multiples_follow_from_the_tile(
    generate: ModuleType, op: str, precision: str, block_n: int, want: tuple[int, int]
) -> None:
    assert generate.multiples({"op": op, "precision": precision, "block_n": block_n}) == want
