"""Hash of the kernel sources, which says whether a wheel or a measured figure still belongs to them.

sha256 over every source file below this folder, in the order of the relative POSIX paths: length of the path, the
path, length of the content, the content. Lengths are hashed so that no two trees can run together. Tests, benchmarks
and build products do not change what runs and are left out.

    python kernels/hash_kernels.py          prints the hex digest
    python kernels/hash_kernels.py --list   prints the files that enter it
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"__pycache__", "bench", "build", "tests"})
SKIPPED_SUFFIXES = frozenset({".a", ".cubin", ".fatbin", ".o", ".ptx", ".pyc", ".so", ".whl"})


def kernel_sources(root: Path) -> list[Path]:
    """Paths relative to root, sorted as POSIX strings; hidden files and folders are not sources."""
    found = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if not path.is_file() or path.suffix in SKIPPED_SUFFIXES:
            continue
        if any(part.startswith(".") for part in relative.parts):
            continue
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        found.append(relative)
    return sorted(found, key=lambda relative: relative.as_posix())


def hash_kernels(root: Path) -> str:
    """Hex sha256 of the sources below root. Raises FileNotFoundError when there are none."""
    sources = kernel_sources(root)
    if not sources:
        raise FileNotFoundError(f"{root}: got no kernel sources, wanted at least one")
    digest = hashlib.sha256()
    for relative in sources:
        for part in (relative.as_posix().encode(), (root / relative).read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    root = Path(__file__).resolve().parent
    if argv == ["--list"]:
        print("\n".join(path.as_posix() for path in kernel_sources(root)))
        return 0
    if argv:
        print(f"arguments: got {argv}, wanted none or --list", file=sys.stderr)
        return 2
    print(hash_kernels(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
