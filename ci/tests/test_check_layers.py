"""check_layers passes the sources as they are and refuses each kind of forbidden include planted in a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_layers
import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# File, header planted in it, and what the gate says. A name in <> is a header from outside.
PLANTED = """
host/select.cpp                 <torch/csrc/stable/tensor.h>    host may not see it
include/mega_moe/stage.h        <torch/csrc/stable/tensor.h>    include may not see it
binding/check.cpp               <ATen/ATen.h>                   binding may not see it
binding/check.cpp               <Python.h>                      binding may not see it
binding/stage.cpp               <cuda_runtime_api.h>            binding may not see it
host/select.cpp                 <cutlass/cutlass.h>             host may not see it
binding/stage.cpp               device/kernel/sm90_stage.cuh    binding may include
binding/stage.cpp               host/select.h                   binding may include
binding/stage.cpp               layout/staging.h                binding may include
device/dispatch/stage_copy.cuh  mega_moe/status.h               device may include
device/dispatch/stage_copy.cuh  host/variant.h                  device may include
device/dispatch/stage_copy.cuh  device/kernel/sm90_stage.cuh    may not know device/kernel
device/dispatch/source.cuh      device/sm90/smem.cuh            may not know device/sm90
device/dispatch/source.cuh      device/combine/combine.cuh      may not know device/combine
device/combine/sum_rows.cuh     device/dispatch/pull.cuh        may not know device/dispatch
device/schedule/record.cuh      device/quantize/weights.cuh     may not know device/quantize
device/quantize/weights.cuh     device/dispatch/source.cuh      may not know device/dispatch
device/route/ids.cuh            device/schedule/record.cuh      may not know device/schedule
device/comm/wait.cuh            device/route/ids.cuh            may not know device/route
device/common/macros.cuh        device/comm/wait.cuh            may not know device/comm
device/ptx/e4m3.cuh             device/common/macros.cuh        may not know device/common
device/schedule/record.cuh      device/ptx/wgmma.cuh            the tensor core of sm90
device/sm100/new.cuh            device/ptx/wgmma.cuh            the tensor core of sm90
device/sm100/new.cuh            device/sm90/smem.cuh            may not know device/sm90
device/extra/new.cuh            device/ptx/e4m3.cuh             has no place in the order
device/ptx/e4m3.cuh             host/variant_table.inc          only host may see it
layout/staging.h                device/common/macros.cuh        layout may include
layout/staging.h                mega_moe/stage.h                layout may include
host/select.cpp                 device/common/macros.cuh        host may include
include/mega_moe/stage.h        layout/staging.h                include may include
host/select.cpp                 ../device/common/macros.cuh     no such file
layout/staging.h                layout/staging.h                layout/staging.h -> layout/staging.h
layout/rows.h                   layout/staging.h                -> layout/rows.h
"""
ROWS = [line.split(maxsplit=2) for line in PLANTED.strip().splitlines()]


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KERNELS, tmp_path / "kernels"))


def plant(kernels: Path, file: str, header: str) -> list[str]:
    path = kernels / file
    path.parent.mkdir(exist_ok=True)
    name = header if header.startswith("<") else f'"{header}"'
    path.write_text(f"  #  include {name}\n{path.read_text() if path.exists() else ''}")
    return check_layers.check(kernels)


def test_the_sources_pass() -> None:
    assert check_layers.check(KERNELS) == []


@pytest.mark.parametrize(("file", "header", "reason"), ROWS)
def test_refuses(kernels: Path, file: str, header: str, reason: str) -> None:
    if reason == "-> layout/rows.h":
        plant(kernels, header, file)  # the other half of a cycle of two
    faults = plant(kernels, file, header)
    assert any(reason in fault for fault in faults), faults


@pytest.mark.parametrize("file", ["layout/staging.h", "device/ptx/e4m3.cuh", "host/select.cpp"])
def test_every_layer_may_know_the_words_of_a_call(kernels: Path, file: str) -> None:
    for name in check_layers.WORDS:
        assert plant(kernels, file, name) == []


def test_refuses_an_empty_folder(tmp_path: Path) -> None:
    assert check_layers.check(tmp_path) == [f"{tmp_path}: no sources"]
