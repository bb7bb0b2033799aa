"""Compiles a kernel to machine code with NVRTC, the compiler that CUDA 12 has in packages where its nvcc has none.

The front end, the optimiser and ptxas are those of the toolkit of the same version, so what is refused here would be
refused by its nvcc, and what ptxas says of registers and spills is what it would say there.
"""

from __future__ import annotations

import ctypes
import re
import sysconfig
from functools import cache
from pathlib import Path

# Headers of the standard library that device code may include. NVRTC brings none; those of CUDA's own library are for
# devices and stand in another namespace.
STANDARD = ("array", "bit", "cmath", "cstddef", "cstdint", "limits", "tuple", "type_traits", "utility")
SHIMS = {
    name: f"#pragma once\n#include <cuda/std/cstddef>\n#include <cuda/std/{name}>\n"
    "namespace std { using namespace cuda::std; }\n"
    for name in STANDARD
} | {"cstring": "#pragma once\n"}  # its functions are built in


def packages() -> Path:
    """Where the packages of CUDA 12 lie."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


@cache
def library() -> ctypes.CDLL:
    """NVRTC of CUDA 12; FileNotFoundError names the packages."""
    path = packages() / "cuda_nvrtc/lib/libnvrtc.so.12"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; it comes with the dependency group targets")
    return ctypes.CDLL(str(path))


def compile_kernel(source: str, options: list[str]) -> tuple[bool, str]:
    """Whether the kernels of `source` become machine code; and what the compilers said."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    headers, names, words = (
        (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        for texts in (SHIMS.values(), SHIMS, options)
    )
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(SHIMS), headers, names)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # ptxas as a library continues its lines in a way that ptxas as a program does not.
    told = re.sub(r"^ptxas +\. ", "", log.value.decode(errors="replace"), flags=re.MULTILINE)
    return not failed and size.value > 0, told
