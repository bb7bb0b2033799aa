"""Prints the path of an nvcc that can build this project, for the environment variable CUDACXX.

    CUDACXX=$(python ci/find_cuda.py)

Looks at CUDACXX, at PATH, at CUDA_HOME, at the usual places, and at the compiler packages that pip may have installed
alongside this Python. Those lack two links that linkers and CMake look for; they are made here. Ends with status 1 and
the list of packages to install, which `--packages` prints alone, when there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MINIMUM = (12, 9)  # the first that knows every target we build for
PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)


def candidates() -> Iterator[Path]:
    yield from (Path(path) for path in (os.environ.get("CUDACXX"), shutil.which("nvcc")) if path)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "bin" / "nvcc"
    yield from sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True)
    yield packaged_toolkit() / "bin" / "nvcc"


def packaged_toolkit() -> Path:
    return Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"


def version(nvcc: Path) -> tuple[int, int] | None:
    """Its release, or None where it does not run."""
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", run.stdout)
    return (int(match[1]), int(match[2])) if match else None


def complete(toolkit: Path) -> None:
    """The links without which `-lcudart_static` and CMake's search for the toolkit fail."""
    links = ((toolkit / "lib64", "lib"), (toolkit / "lib" / "libcudart.so", "libcudart.so.13"))
    for link, target in links:
        if (link.parent / target).exists() and not link.exists():
            link.symlink_to(target)


def find() -> tuple[Path | None, list[str]]:
    """The first usable compiler, and why each one before it was passed over."""
    refused: list[str] = []
    for nvcc in candidates():
        if not nvcc.is_file():
            refused.append(f"{nvcc}: no such file")
            continue
        if packaged_toolkit() in nvcc.parents:
            complete(packaged_toolkit())
        found = version(nvcc)
        if found is None:
            refused.append(f"{nvcc}: does not run")
        elif found < MINIMUM:
            refused.append(f"{nvcc}: release {found[0]}.{found[1]}, want {MINIMUM[0]}.{MINIMUM[1]} or later")
        else:
            return nvcc, refused
    return None, refused


def main(arguments: list[str]) -> int:
    if arguments == ["--packages"]:
        print(*PACKAGES)
        return 0
    nvcc, refused = find()
    if nvcc is None:
        print("find_cuda: no CUDA compiler:", *refused, sep="\n  ", file=sys.stderr)
        print(f"find_cuda: pip install {' '.join(PACKAGES)}", file=sys.stderr)
        return 1
    print(nvcc)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
