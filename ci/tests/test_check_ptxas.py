"""check_ptxas refuses spills over budget, slow forms and logs that say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import check_ptxas
import pytest

GOOD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 46 registers, used 0 barriers
"""


def log(stack: int = 0, stores: int = 0, loads: int = 0) -> str:
    return GOOD.format(stack=stack, stores=stores, loads=loads)


def run(folder: Path, text: str | None, budget: int = 0) -> int:
    variants = folder / "variants.toml"
    variants.write_text(f'[[variant]]\nname = "k"\nspill_bytes = {budget}\n')
    if text is not None:
        (folder / "k.log").write_text(text)
    return check_ptxas.main(variants, folder, folder / "kernels.json")


def test_passes_within_budget(tmp_path: Path) -> None:
    assert run(tmp_path, log()) == 0
    assert run(tmp_path, log(16, 16, 16), budget=16) == 0
    assert json.loads((tmp_path / "kernels.json").read_text()) == {"k": ["_Z1kv"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (log(stores=8), "spill stores of _Z1kv is 8 bytes, budget 0"),
        (log(loads=4), "spill loads of _Z1kv is 4 bytes, budget 0"),
        (log(stack=32), "stack frame of _Z1kv is 32 bytes, budget 0"),
        (log() + log(loads=4), "spill loads"),  # the second kernel of a file
        (
            log()
            + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n",
            "C7510",
        ),
        ("", "reports no kernel"),
        (None, "reports no kernel"),
    ],
)
def test_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str) -> None:
    assert run(tmp_path, text) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "kernels.json").exists()
