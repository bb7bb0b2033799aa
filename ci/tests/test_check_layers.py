"""check_layers passes the sources as they are and refuses each kind of forbidden include planted in a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_layers
import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KERNELS, tmp_path / "kernels"))


def plant(kernels: Path, file: str, line: str) -> list[str]:
    path = kernels / file
    path.write_text(f"{line}\n{path.read_text() if path.exists() else ''}")
    return check_layers.check(kernels)


def test_the_sources_pass() -> None:
    assert check_layers.check(KERNELS) == []


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("host/select.cpp", "#include <torch/csrc/stable/tensor.h>", "only ['binding'] may see it"),
        ("include/mega_moe/layer.h", "#include <torch/csrc/stable/tensor.h>", "only ['binding'] may see it"),
        ("binding/check.cpp", "#include <ATen/ATen.h>", "only nobody may see it"),
        ("binding/check.cpp", "#include <Python.h>", "only nobody may see it"),
        ("binding/route.cpp", '#include "device/kernel/sm90_route.cuh"', "binding may include"),
        ("binding/route.cpp", '#include "host/select.h"', "binding may include"),
        ("binding/route.cpp", '#include "layout/parts.h"', "binding may include"),
        ("binding/route.cpp", "#include <cuda_runtime_api.h>", "may see it"),
        ("device/dispatch/source.cuh", '#include "mega_moe/status.h"', "device may include"),
        ("device/dispatch/source.cuh", '#include "host/variant.h"', "device may include"),
        (
            "device/dispatch/source.cuh",
            '#include "device/kernel/sm90_route.cuh"',
            "may not know device/kernel",
        ),
        ("device/dispatch/source.cuh", '#include "device/sm90/smem.cuh"', "may not know device/sm90"),
        (
            "device/dispatch/source.cuh",
            '#include "device/combine/combine.cuh"',
            "may not know device/combine",
        ),
        (
            "device/combine/sum_rows.cuh",
            '#include "device/dispatch/pull.cuh"',
            "may not know device/dispatch",
        ),
        (
            "device/schedule/record.cuh",
            '#include "device/quantize/weights.cuh"',
            "may not know device/quantize",
        ),
        (
            "device/quantize/weights.cuh",
            '#include "device/dispatch/source.cuh"',
            "may not know device/dispatch",
        ),
        ("device/route/ids.cuh", '#include "device/schedule/record.cuh"', "may not know device/schedule"),
        ("device/comm/wait.cuh", '#include "device/route/ids.cuh"', "may not know device/route"),
        ("device/common/macros.cuh", '#include "device/comm/wait.cuh"', "may not know device/comm"),
        ("device/ptx/e4m3.cuh", '#include "device/common/macros.cuh"', "may not know device/common"),
        ("device/schedule/record.cuh", '#include "device/ptx/wgmma.cuh"', "the tensor core of sm90"),
        ("device/sm100/new.cuh", '#include "device/ptx/wgmma.cuh"', "the tensor core of sm90"),
        ("device/sm100/new.cuh", '#include "device/sm90/smem.cuh"', "may not know device/sm90"),
        ("device/extra/new.cuh", '#include "device/ptx/e4m3.cuh"', "without a place in the order"),
        ("layout/parts.h", '#include "device/common/macros.cuh"', "layout may include"),
        ("layout/parts.h", '#include "mega_moe/layer.h"', "layout may include"),
        ("host/select.cpp", '#include "device/common/macros.cuh"', "host may include"),
        ("include/mega_moe/layer.h", '#include "layout/parts.h"', "include may include"),
        ("host/select.cpp", '#include "../device/common/macros.cuh"', "no such file"),
        ("host/select.cpp", '  #  include "gone.h"', "no such file"),
        ("host/select.cpp", "#include <cutlass/cutlass.h>", "not a header of the project"),
        ("layout/parts.h", '#include "layout/parts.h"', "cycle: layout/parts.h -> layout/parts.h"),
        ("device/ptx/e4m3.cuh", '#include "host/variant_table.inc"', "only host may see it"),
    ],
)
def test_refuses(copy: Path, file: str, line: str, reason: str) -> None:
    (copy / file).parent.mkdir(exist_ok=True)
    faults = plant(copy, file, line)
    assert any(file in fault and reason in fault for fault in faults), faults


@pytest.mark.parametrize("file", ["layout/parts.h", "device/ptx/e4m3.cuh", "host/select.cpp"])
@pytest.mark.parametrize("name", sorted(check_layers.WORDS))
def test_every_layer_may_know_the_words_of_a_call(copy: Path, file: str, name: str) -> None:
    assert plant(copy, file, f'#include "{name}"') == []


def test_refuses_a_longer_cycle(copy: Path) -> None:
    (copy / "layout" / "a.h").write_text('#include "layout/b.h"\n')
    faults = plant(copy, "layout/b.h", '#include "layout/a.h"')
    assert faults == ["cycle: layout/a.h -> layout/b.h -> layout/a.h"]


def test_refuses_an_empty_folder(tmp_path: Path) -> None:
    assert check_layers.check(tmp_path) != []
