"""Hashes of the kernel sources, which say whether a wheel or a measured figure still belongs to this code.

Of everything: sha256 over every source file below this folder, in the order of the relative POSIX paths: length of
the path, the path, length of the content, the content. Lengths are hashed so that no two trees can run together.
Tests, benchmarks and build products do not change what runs and are left out.

Of each variant of variants.toml, in the same way: what `variant_sources` says decides it, as tokens, so that neither
comments nor layout count, its values of variants.toml, and the flags of the compilers.

    python kernels/hash_kernels.py              prints the hex digest of everything
    python kernels/hash_kernels.py --list       prints the files that enter it
    python kernels/hash_kernels.py --variants   prints the hex digests of the variants by name, as JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from cpp_tokens import cmake_words
from variant_sources import Sources

SKIPPED_FOLDERS = frozenset({"__pycache__", "bench", "build", "tests"})
SKIPPED_SUFFIXES = frozenset({".a", ".cubin", ".fatbin", ".o", ".ptx", ".pyc", ".so", ".whl"})
FLAGS = "cmake/flags.cmake"
# What ptxas may report before the build fails; the code is the same.
NOT_CODE = frozenset({"spill_bytes"})


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
    return _digest((relative.as_posix(), (root / relative).read_bytes()) for relative in sources)


def hash_variants(root: Path) -> dict[str, str]:
    """Hex sha256 of the code of each variant of root/variants.toml, by name, sorted."""
    sources = Sources(root)
    flags = (FLAGS, _joined(cmake_words((root / FLAGS).read_text(encoding="utf-8"))))
    found = {}
    for variant in sorted(sources.variants, key=lambda variant: str(variant["name"])):
        values = {key: value for key, value in variant.items() if key not in NOT_CODE}
        names = sources.of_kernel(variant) | sources.of_launch(variant["op"])
        found[variant["name"]] = _digest(
            [
                ("variants.toml", json.dumps(values, sort_keys=True).encode()),
                ("generated", _joined(sources.instance(variant))),
                flags,
                *((name, _joined(sources.tokens(name))) for name in sorted(names)),
            ]
        )
    return found


def _joined(words: Iterable[str]) -> bytes:
    return "\0".join(words).encode()


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in parts:
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    root = Path(__file__).resolve().parent
    if argv == ["--list"]:
        print("\n".join(path.as_posix() for path in kernel_sources(root)))
        return 0
    if argv == ["--variants"]:
        print(json.dumps(hash_variants(root)))
        return 0
    if argv:
        print(f"arguments: got {argv}, wanted none, --list or --variants", file=sys.stderr)
        return 2
    print(hash_kernels(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
