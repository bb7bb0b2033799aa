"""Lays out the files of a release: wheels, those without a label for the package index, the source package, metadata,
checksums.

    python ci/release_files.py FOLDER OUT

FOLDER holds the labelled wheels and the source package as the builds left them. What lies in OUT is removed first.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import finish_wheel
import make_index
import matrix


def lay_out(source: Path, out: Path) -> list[Path]:
    """Paths of the files in `out`; ValueError where there is no wheel, or one that has no label."""
    wheels = [make_index.describe(path) for path in sorted(source.glob("*.whl"))]
    if not wheels:
        raise ValueError(f"{source}: got no wheels, want those of the whole matrix")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    default = matrix.load().default
    for wheel in wheels:
        shutil.copyfile(wheel.path, out / wheel.path.name)
        # The index links the wheels of the release, and looks for their metadata alongside them.
        (out / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
        if wheel.label == default:
            finish_wheel.strip_label(wheel.path, out)
    for archive in source.glob("*.tar.gz"):
        shutil.copy(archive, out)
    files = sorted(out.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums)
    return [*files, out / "SHA256SUMS"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        files = lay_out(Path(arguments[0]), Path(arguments[1]))
    except ValueError as error:
        print(f"release_files: {error}", file=sys.stderr)
        return 1
    print(f"release_files: {len(files)} files in {arguments[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
