"""Writes the static index from which pip and uv install: one index per CUDA version, of the wheels that are given.

    python ci/make_index.py WHEELS_FOLDER OUT [--files-at ADDRESS]

OUT/<label>/mega-moe/index.html (PEP 503) and index.json (PEP 691, for servers that negotiate) link each wheel with its
sha256, the Pythons it wants and the sha256 of its metadata, which lies alongside it (PEP 658). Wheels are copied into
OUT/<label>/mega-moe/, or linked under ADDRESS where they are published as files of a release ({version} in it is the
wheel's); their metadata is then written into WHEELS_FOLDER, to be published alongside them.
OUT/SHA256SUMS lists all of them. Hashes are of the files themselves, so the index is made last, from what was uploaded.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import html
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import wheel_file

PROJECT = "mega-moe"


@dataclass(frozen=True)
class Wheel:
    path: Path
    label: str
    version: str
    sha256: str
    metadata: bytes
    requires_python: str

    def address(self, files_at: str | None) -> str:
        # A plus sign in an address may be read as a space.
        name = quote(self.path.name)
        plain = self.version.partition("+")[0]
        return f"{files_at.rstrip('/').replace('{version}', plain)}/{name}" if files_at else name


def describe(path: Path) -> Wheel:
    """What the index says of one wheel; ValueError where it has no label or its name and metadata differ."""
    files = wheel_file.read(path)
    metadata = files[f"{wheel_file.info_folder(files)}/METADATA"]
    message = email.message_from_bytes(metadata)
    version = str(message["Version"])
    if path.name.split("-")[1] != version:
        raise ValueError(f"{path.name}: its metadata is of version {version}")
    label = version.partition("+")[2]
    if not label:
        raise ValueError(f"{path.name}: version has no label such as +cu130, so no index to stand in")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(path, label, version, digest, metadata, str(message["Requires-Python"] or ""))


def page(title: str, links: list[str]) -> str:
    lines = ["<!DOCTYPE html>", "<html><head>", '<meta name="pypi:repository-version" content="1.1">']
    lines += [f"<title>{html.escape(title)}</title>", "</head><body>", *links, "</body></html>", ""]
    return "\n".join(lines)


def link(wheel: Wheel, files_at: str | None) -> str:
    metadata = f"sha256={hashlib.sha256(wheel.metadata).hexdigest()}"
    return (
        f'<a href="{html.escape(wheel.address(files_at))}#sha256={wheel.sha256}"'
        f' data-requires-python="{html.escape(wheel.requires_python)}"'
        f' data-core-metadata="{metadata}" data-dist-info-metadata="{metadata}">{html.escape(wheel.path.name)}</a><br>'
    )


def entry(wheel: Wheel, files_at: str | None) -> dict[str, object]:
    return {
        "filename": wheel.path.name,
        "url": wheel.address(files_at),
        "hashes": {"sha256": wheel.sha256},
        "requires-python": wheel.requires_python,
        "core-metadata": {"sha256": hashlib.sha256(wheel.metadata).hexdigest()},
        "size": wheel.path.stat().st_size,
    }


def write_label(folder: Path, wheels: list[Wheel], files_at: str | None) -> None:
    """The index of one label; its wheels and their metadata lie alongside the page, unless they are at ADDRESS."""
    own = folder / PROJECT
    own.mkdir(parents=True)
    (folder / "index.html").write_text(page(folder.name, [f'<a href="{PROJECT}/">{PROJECT}</a><br>']))
    meta = {"api-version": "1.1"}
    (folder / "index.json").write_text(json.dumps({"meta": meta, "projects": [{"name": PROJECT}]}))
    (own / "index.html").write_text(page(PROJECT, [link(wheel, files_at) for wheel in wheels]))
    listing = {
        "meta": meta,
        "name": PROJECT,
        "versions": sorted({wheel.version for wheel in wheels}),
        "files": [entry(wheel, files_at) for wheel in wheels],
    }
    (own / "index.json").write_text(json.dumps(listing, indent=1) + "\n")
    for wheel in wheels:
        alongside = own if files_at is None else wheel.path.parent
        (alongside / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
        if files_at is None:
            shutil.copyfile(wheel.path, own / wheel.path.name)


def sums(wheels: list[Wheel]) -> str:
    """As `sha256sum --check` reads it."""
    return "".join(f"{wheel.sha256}  {wheel.path.name}\n" for wheel in wheels)


def make(source: Path, out: Path, files_at: str | None = None) -> list[Wheel]:
    """Write the index of the wheels in `source`, anew; ValueError when there are none or one does not belong there."""
    wheels = [describe(path) for path in sorted(source.glob("*.whl"))]
    if not wheels:
        raise ValueError(f"{source}: got no wheels, want one at least")
    shutil.rmtree(out, ignore_errors=True)
    labels = sorted({wheel.label for wheel in wheels})
    for label in labels:
        write_label(out / label, [wheel for wheel in wheels if wheel.label == label], files_at)
    (out / "index.html").write_text(
        page(PROJECT, [f'<a href="{label}/">{html.escape(label)}</a><br>' for label in labels])
    )
    (out / "SHA256SUMS").write_text(sums(wheels))
    return wheels


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make_index", description="Write a static index of wheels.")
    parser.add_argument("source", type=Path, help="folder with the wheels")
    parser.add_argument("out", type=Path, help="where the index goes; what lies there is removed")
    parser.add_argument(
        "--files-at", help="where the wheels themselves are, such as a release's folder of files"
    )
    given = parser.parse_args(arguments)
    try:
        wheels = make(given.source, given.out, given.files_at)
    except ValueError as error:
        print(f"make_index: {error}", file=sys.stderr)
        return 1
    print(f"make_index: {len(wheels)} wheels in {given.out}: {', '.join(sorted({w.label for w in wheels}))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
