"""check_targets compiles with CUDA 12.9 and for aarch64, and refuses what only the toolkit here would take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import check_targets
import find_cuda
import pytest

GOOD_KERNEL = "__global__ void planted(int* out) { out[threadIdx.x] = 1; }"
# An array that a register cannot hold, since its index is not known: it lies on the stack.
SPILLING_KERNEL = (
    "__global__ void planted(int* out) { int kept[64]; for (int i = 0; i < 64; ++i) kept[(i * out[i]) & 63] = i; "
    "out[0] = kept[out[1] & 63]; }"
)
GOOD_HOST = "#include <cuda_runtime_api.h>\nint version() { return CUDART_VERSION; }\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured build of one kernel and one host file, with the headers of the toolkit that is here."""
    found, _ = find_cuda.find()
    toolkits = [Path("/usr/local/cuda"), *(found.resolve().parents[1:2] if found else [])]
    includes = [path / "include" for path in toolkits if (path / "include/cuda_runtime_api.h").is_file()]
    if found is None or not includes:
        pytest.skip("needs a CUDA toolkit")
    kernels, build = tmp_path / "kernels", tmp_path / "build"
    instance, host = build / "generated/90a/planted.cu", kernels / "host/planted.cpp"
    for folder in (kernels / "device/kernel", host.parent, instance.parent):
        folder.mkdir(parents=True)
    monkeypatch.setattr(check_targets, "KERNELS", kernels)
    (kernels / "variants.toml").write_text('[[variant]]\nname = "planted"\nspill_bytes = 0\n')
    instance.write_text(
        '#include "device/kernel/planted.cuh"\nnamespace mega_moe {\nlayout::KernelFacts facts_planted() {\n'
        "    return {reinterpret_cast<const void*>(&device::planted), 32};\n}\n}\n"
    )
    device = "--generate-code=arch=compute_90a,code=[sm_90a]"
    commands = {
        instance: f"{found} -Xcompiler=-fPIC -I{kernels} {device} -o x.o -c {instance}",
        host: f"g++ -std=c++17 -Wall -Werror -fPIC -isystem {includes[0]} -o x.o -c {host}",
    }
    entries = [{"file": str(f), "directory": str(build), "command": text} for f, text in commands.items()]
    (build / "compile_commands.json").write_text(json.dumps(entries))
    return tmp_path


def judged(tree: Path, target: str, kernel: str = GOOD_KERNEL, host: str = GOOD_HOST) -> list[str]:
    header = f"#pragma once\n#include <cstdint>\nnamespace mega_moe::device {{ {kernel} }}\n"
    (tree / "kernels/device/kernel/planted.cuh").write_text(header)
    (tree / "kernels/host/planted.cpp").write_text(host)
    check = {"cu129": check_targets.check_cu129, "aarch64": check_targets.check_aarch64}[target]
    return list(check(tree / "build"))


def test_cuda_12_9(tree: Path) -> None:
    try:
        check_targets.nvrtc_library()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert judged(tree, "cu129") == []
    (fault, *_) = judged(tree, "cu129", kernel='__global__ void planted(int*) { asm("wgmma.dance;"); }')
    assert fault.startswith("planted.cu: ")
    found = judged(tree, "cu129", kernel=SPILLING_KERNEL)
    assert any("stack frame" in line and "budget 0" in line for line in found), found
    newer = GOOD_HOST + 'static_assert(CUDART_VERSION >= 13000, "of CUDA 13");\n'
    (fault, *_) = judged(tree, "cu129", host=newer)
    assert fault.startswith("planted.cpp: ")
    assert "of CUDA 13" in fault


def test_aarch64(tree: Path) -> None:
    if shutil.which(check_targets.CROSS_COMPILER) is None:
        pytest.skip(f"needs {check_targets.CROSS_COMPILER}")
    assert judged(tree, "aarch64") == []
    (fault, *_) = judged(tree, "aarch64", host="#include <immintrin.h>\n")
    assert "immintrin.h" in fault
    (fault, *_) = judged(tree, "aarch64", kernel=f"{GOOD_KERNEL}\n#include <immintrin.h>")
    assert "immintrin.h" in fault


def test_no_file_and_no_compiler_are_no_pass(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_targets, "cuda_12", lambda: tree)
    check_targets.nvrtc_library.cache_clear()
    with pytest.raises(FileNotFoundError, match="dependency group targets"):
        judged(tree, "cu129")
    check_targets.nvrtc_library.cache_clear()
    (tree / "build/compile_commands.json").write_text("[]")
    with pytest.raises(ValueError, match="the build lists 0 files, want kernels and host files"):
        judged(tree, "aarch64")
