"""check_targets compiles with CUDA 12.9 and for aarch64, and refuses what only the toolkit here would take."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import check_targets
import find_cuda
import nvrtc
import pytest

GOOD_KERNEL = "__global__ void planted(int* out) { out[threadIdx.x] = 1; }"
# An array that a register cannot hold, since its index is not known: it lies on the stack.
SPILLING_KERNEL = (
    "__global__ void planted(int* out) { int kept[64]; for (int i = 0; i < 64; ++i) kept[(i * out[i]) & 63] = i; "
    "out[0] = kept[out[1] & 63]; }"
)
CALLED = (
    "__cudaLaunchKernel", "__cudaPopCallConfiguration", "__cudaRegisterFatBinary", "__cudaRegisterFatBinaryEnd",
    "__cudaRegisterFunction", "__cudaUnregisterFatBinary", "__cudaGetKernel", "cudaLaunchKernel", "__cudaInitModule",
)  # fmt: skip
GOOD_HOST = "#include <cuda_runtime_api.h>\nint version() { return CUDART_VERSION; }\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured build of one kernel and one host file, with the headers of the toolkit that is here."""
    found, _ = find_cuda.find()
    if found is None:
        pytest.skip("needs a CUDA toolkit")
    include = next(
        (
            path
            for path in (Path("/usr/local/cuda/include"), found.resolve().parents[1] / "include")
            if path.is_dir()
        ),
        None,
    )
    if include is None or not (include / "cuda_runtime_api.h").is_file():
        pytest.skip(f"{found} has no include folder alongside it")
    kernels, build = tmp_path / "kernels", tmp_path / "build"
    for folder in (kernels / "device/kernel", kernels / "host", kernels / "binding", build / "generated/90a"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(check_targets, "KERNELS", kernels)
    (kernels / "binding/exports.map").write_text("{ local: *; };\n")
    (kernels / "variants.toml").write_text('[[variant]]\nname = "planted"\nspill_bytes = 0\n')
    instance = build / "generated/90a/planted.cu"
    instance.write_text(
        '#include "device/kernel/planted.cuh"\nnamespace mega_moe {\nlayout::KernelFacts facts_planted() {\n'
        "    return {reinterpret_cast<const void*>(&device::planted), 32};\n}\n}\n"
    )
    host = kernels / "host/planted.cpp"
    device = "--generate-code=arch=compute_90a,code=[sm_90a]"
    entries = [
        {
            "file": str(instance),
            "directory": str(build),
            "command": f"{found} -Xcompiler=-fPIC -I{kernels} {device} -o x.o -c {instance}",
        },
        {
            "file": str(host),
            "directory": str(build),
            "command": f"g++ -std=c++17 -Wall -Werror -fPIC -isystem {include} -o x.o -c {host}",
        },
    ]
    (build / "compile_commands.json").write_text(json.dumps(entries))
    return tmp_path


def judged(tree: Path, target: str, kernel: str = GOOD_KERNEL, host: str = GOOD_HOST) -> list[str]:
    header = f"#pragma once\n#include <cstdint>\nnamespace mega_moe::device {{ {kernel} }}\n"
    (tree / "kernels/device/kernel/planted.cuh").write_text(header)
    (tree / "kernels/host/planted.cpp").write_text(host)
    if target == "cu129":
        return check_targets.check_cu129(tree / "build")[0]
    return check_targets.check_aarch64(tree / "build", runtime(tree))[0]


def runtime(tree: Path) -> Path:
    """A package with a static library of what a kernel's host part calls, or of nothing without a cross compiler."""
    path, compiler = tree / "runtime.whl", shutil.which("aarch64-linux-gnu-gcc")
    library = tree / "libcudart_static.a"
    library.write_bytes(b"!<arch>\n")
    if compiler is not None:
        source = tree / "runtime.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in CALLED))
        subprocess.run([compiler, "-w", "-fPIC", "-c", source, "-o", tree / "runtime.o"], check=True)
        library.unlink()
        subprocess.run(["aarch64-linux-gnu-ar", "rc", library, tree / "runtime.o"], check=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(library, "nvidia/cu13/lib/libcudart_static.a")
    return path


@pytest.fixture
def needs_cuda_12() -> None:
    try:
        nvrtc.library()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_cuda_12")
def test_cuda_12_9(tree: Path) -> None:
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
    # What only the driver's library has must not be wanted, on this machine as on any.
    driver = (
        'extern "C" int cuInit(unsigned);\n__attribute__((constructor)) static void use() { cuInit(0); }\n'
    )
    (fault, *_) = judged(tree, "aarch64", host=driver)
    assert fault == "the library wants symbol cuInit, which is not of torch's stable ABI"


def test_says_what_is_missing(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_targets.shutil, "which", lambda name: None)
    assert check_targets.main(["aarch64", str(tree / "build"), str(runtime(tree))]) == 2
    assert "Debian's package is g++-aarch64-linux-gnu" in capsys.readouterr().err
    monkeypatch.setattr(check_targets.shutil, "which", lambda name: name)
    assert check_targets.main(["aarch64", str(tree / "build"), str(tree / "gone.whl")]) == 2
    assert "no package of the CUDA runtime for aarch64" in capsys.readouterr().err
    monkeypatch.setattr(nvrtc, "packages", lambda: tree)
    assert check_targets.main(["cu129", str(tree / "build")]) == 2
    assert "dependency group targets" in capsys.readouterr().err
    assert check_targets.main(["riscv", str(tree / "build")]) == 2


def test_no_file_is_no_pass(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "build/compile_commands.json").write_text("[]")
    package = runtime(tree)  # before a cross compiler is pretended
    monkeypatch.setattr(check_targets.shutil, "which", lambda name: name)
    assert check_targets.check_aarch64(tree / "build", package)[0] == ["got no files, want some"]
