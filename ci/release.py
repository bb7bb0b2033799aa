"""Lays out the files of a release, refuses a release that is not whole, and writes the index for pip and uv.

    python ci/release.py lay-out FOLDER OUT                    the files of a release, from what the builds left
    python ci/release.py check [FOLDER] --tag vX.Y.Z [--commit COMMIT]
    python ci/release.py index FOLDER OUT [--files-at ADDRESS]

`lay-out` copies the labelled wheels and the source package, and adds the default wheel without its label for the
package index, the metadata that the index links, and SHA256SUMS. What lies in OUT is removed first.

`check` without FOLDER judges version and changelog alone, before anything is built. FOLDER holds what will be
published: each wheel has the name that ci/matrix.toml says, passes check_wheel.py and comes from the same clean commit.
Prints one line per fault and exits 1 when there is any.

`index` writes one static index per CUDA version: OUT/<label>/mega-moe/index.html (PEP 503) links each wheel with its
sha256, the Pythons it wants and the sha256 of its metadata, which lies alongside it (PEP 658). Wheels are copied there,
or linked under ADDRESS where they are files of a release ({version} in it is the wheel's). Hashes are of the files
themselves: make the index from what was uploaded.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import finish_wheel
import matrix
import wheel_file
from matrix import tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "mega-moe"


def lay_out(source: Path, out: Path) -> list[Path]:
    """Paths of the files in `out`; ValueError where there is no wheel, or one that has no label."""
    wheels = described(source)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for wheel in wheels:
        shutil.copyfile(wheel.path, out / wheel.path.name)
        (out / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
        if wheel.label == matrix.load().default:
            finish_wheel.strip_label(wheel.path, out)
    for archive in source.glob("*.tar.gz"):
        shutil.copy(archive, out)
    files = sorted(out.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums)
    return [*files, out / "SHA256SUMS"]


def version_faults(tag: str, root: Path = ROOT) -> list[str]:
    """The tag against the one source of the version, and the changelog's entry of it."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    faults = [] if tag == f"v{version}" else [f"tag is {tag}, pyproject.toml says version {version}"]
    entries = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    own = [entry for entry in entries if re.match(rf"{re.escape(version)}\b(?![.\d])", entry)]
    if len(own) != 1:
        return [*faults, f"CHANGELOG.md has {len(own)} entries of {version}, must have one"]
    heading, _, text = own[0].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", heading.strip()):
        faults.append(f"CHANGELOG.md: heading is '{heading.strip()}', must be '{version}, YYYY-MM-DD'")
    if not re.search(r"^- \S", text, re.MULTILINE):
        faults.append(f"CHANGELOG.md: the entry of {version} lists nothing")
    return faults


def wanted_names(loaded: matrix.Matrix, version: str) -> set[str]:
    """Names of the wheels and of the source package of a whole release."""
    names = {f"mega_moe-{version}.tar.gz"}
    for wheel in loaded.wheels():
        tags = f"py3-none-{loaded.policy}_{wheel['platform']}"
        names.add(f"mega_moe-{version}+{wheel['label']}-{tags}.whl")
        if wheel["label"] == loaded.default:
            names.add(f"mega_moe-{version}-{tags}.whl")
    return names


def source_faults(wheels: list[Path], commit: str | None) -> list[str]:
    """Whether all wheels come from one commit without changes, and from the same kernels."""
    commits, kernels, faults = set(), set(), []
    for path in wheels:
        files = wheel_file.read(path)
        record, build = (
            json.loads(files.get(name, b"{}")) for name in (finish_wheel.WHEEL_RECORD, finish_wheel.BUILD)
        )
        commits.add(str(record.get("commit")))
        kernels.add(build.get("kernels_sha256"))
        if not re.fullmatch(r"[0-9a-f]{40}", str(record.get("commit"))):
            faults.append(f"{path.name}: built from {record.get('commit')}, must be a clean commit")
    if len(commits) > 1 or len(kernels) > 1:
        faults.append(
            f"wheels come from {len(commits)} commits and {len(kernels)} states of kernels/, must be one"
        )
    if commit is not None and commits - {commit}:
        faults.append(f"wheels come from {sorted(commits)}, the release is of {commit}")
    return faults


def faults_of(
    folder: Path | None, tag: str, commit: str | None, judge: Callable[[Path], list[str]], root: Path = ROOT
) -> list[str]:
    """One line per fault of the release in `folder`, of its texts alone without one; `judge` judges one wheel."""
    found = version_faults(tag, root)
    if folder is None:
        return found
    want = wanted_names(matrix.load(), tag.removeprefix("v"))
    got = {path.name for kind in ("*.whl", "*.tar.gz") for path in folder.glob(kind)}
    found += [f"a hole in the release: {name} is missing" for name in sorted(want - got)]
    found += [f"{name} does not belong into the release" for name in sorted(got - want)]
    wheels = [folder / name for name in sorted(want & got) if name.endswith(".whl")]
    found += source_faults(wheels, commit)
    return found + [f"{path.name}: {fault}" for path in wheels for fault in judge(path)]


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


def make_index(source: Path, out: Path, files_at: str | None = None) -> list[Wheel]:
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
    import check_wheel

    parser = argparse.ArgumentParser(prog="release", description="Lay out a release, or judge it as a whole.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("lay-out", "index"):
        writer = commands.add_parser(name)
        writer.add_argument("source", type=Path, help="folder of labelled wheels, and of the source package")
        writer.add_argument("out", type=Path, help="what lies there is removed")
    writer.add_argument("--files-at", help="where the wheels are, such as a release's folder of files")
    check = commands.add_parser("check")
    check.add_argument("folder", type=Path, nargs="?", help="with every file of the release")
    check.add_argument("--tag", required=True, help="such as v0.1.0")
    check.add_argument("--commit", help="that the tag points to")
    given = parser.parse_args(arguments)
    if given.command == "lay-out":
        print(f"release: {len(lay_out(given.source, given.out))} files in {given.out}")
        return 0
    if given.command == "index":
        print(f"release: {len(make_index(given.source, given.out, given.files_at))} wheels in {given.out}")
        return 0
    found = faults_of(given.folder, given.tag, given.commit, check_wheel.check)
    print(*found, f"release: {given.tag}: {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
