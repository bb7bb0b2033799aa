"""Writes the static index from which pip and uv install: one index per CUDA version, of the wheels that are given.

    python ci/make_index.py WHEELS_FOLDER OUT [--files-at ADDRESS]

OUT/<label>/mega-moe/index.html (PEP 503) links each wheel with its sha256, the Pythons it wants and the sha256 of its
metadata, which lies alongside it (PEP 658). Wheels are copied there, or linked under ADDRESS where they are files of a
release ({version} in it is the wheel's). Hashes are of the files themselves: make the index from what was uploaded.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import shutil
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import wheel_file

PROJECT = "mega-moe"


@dataclass(frozen=True)
class Wheel:
    path: Path
    version: str
    metadata: bytes

    @property
    def label(self) -> str:
        return self.version.partition("+")[2]

    def link(self, files_at: str | None) -> str:
        address = quote(self.path.name)  # a plus sign in an address may be read as a space
        if files_at:
            plain = self.version.partition("+")[0]
            address = f"{files_at.rstrip('/').replace('{version}', plain)}/{address}"
        sha256, metadata = (
            f"sha256={hashlib.sha256(data).hexdigest()}" for data in (self.path.read_bytes(), self.metadata)
        )
        python = escape(str(email.message_from_bytes(self.metadata)["Requires-Python"] or ""))
        return (
            f'<a href="{escape(address)}#{sha256}" data-requires-python="{python}"'
            f' data-core-metadata="{metadata}" data-dist-info-metadata="{metadata}">{escape(self.path.name)}</a>'
        )


def described(folder: Path) -> list[Wheel]:
    """The wheels in `folder`; ValueError when there is none, one has no label, or its name and metadata differ."""
    found = []
    for path in sorted(folder.glob("*.whl")):
        files = wheel_file.read(path)
        metadata = files[f"{wheel_file.info_folder(files)}/METADATA"]
        wheel = Wheel(path, str(email.message_from_bytes(metadata)["Version"]), metadata)
        if path.name.split("-")[1] != wheel.version:
            raise ValueError(f"{path.name}: its metadata is of version {wheel.version}")
        if not wheel.label:
            raise ValueError(f"{path.name}: version has no label such as +cu130, so no index to stand in")
        found.append(wheel)
    if not found:
        raise ValueError(f"{folder}: got no wheels, want one at least")
    return found


def write_page(folder: Path, links: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = f'<!DOCTYPE html>\n<meta name="pypi:repository-version" content="1.1">\n<title>{folder.name}</title>\n'
    (folder / "index.html").write_text(head + "<br>\n".join(links) + "\n")


def make(source: Path, out: Path, files_at: str | None = None) -> list[Wheel]:
    """Write the index of the wheels in `source` anew; ValueError as `described`."""
    wheels = described(source)
    shutil.rmtree(out, ignore_errors=True)
    labels = sorted({wheel.label for wheel in wheels})
    write_page(out, [f'<a href="{label}/">{label}</a>' for label in labels])
    for label in labels:
        write_page(out / label, [f'<a href="{PROJECT}/">{PROJECT}</a>'])
        own = [wheel for wheel in wheels if wheel.label == label]
        write_page(out / label / PROJECT, [wheel.link(files_at) for wheel in own])
        for wheel in own if files_at is None else ():
            shutil.copy(wheel.path, out / label / PROJECT)
            (out / label / PROJECT / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
    return wheels


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make_index", description="Write a static index of wheels.")
    parser.add_argument("source", type=Path, help="folder with the wheels")
    parser.add_argument("out", type=Path, help="where the index goes; what lies there is removed")
    parser.add_argument("--files-at", help="where the wheels are, such as a release's folder of files")
    given = parser.parse_args(arguments)
    print(f"make_index: {len(make(given.source, given.out, given.files_at))} wheels in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
