"""Lays out the files of a release, and refuses a release that is not whole.

    python ci/release.py lay-out FOLDER OUT                    the files of a release, from what the builds left
    python ci/release.py check [FOLDER] --tag vX.Y.Z [--commit COMMIT]

`lay-out` copies the labelled wheels and the source package, and adds the default wheel without its label for the
package index, the metadata that the index links, and SHA256SUMS. What lies in OUT is removed first.

`check` without FOLDER judges version and changelog alone, before anything is built. FOLDER holds what will be
published: each wheel has the name that ci/matrix.toml says, passes check_wheel.py and comes from the same clean commit.
Prints one line per fault and exits 1 when there is any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import finish_wheel
import make_index
import matrix
import wheel_file
from matrix import tomllib

ROOT = Path(__file__).resolve().parent.parent


def lay_out(source: Path, out: Path) -> list[Path]:
    """Paths of the files in `out`; ValueError where there is no wheel, or one that has no label."""
    wheels = make_index.described(source)
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


def main(arguments: list[str]) -> int:
    import check_wheel

    parser = argparse.ArgumentParser(prog="release", description="Lay out a release, or judge it as a whole.")
    commands = parser.add_subparsers(dest="command", required=True)
    laid = commands.add_parser("lay-out")
    laid.add_argument("source", type=Path, help="labelled wheels and source package")
    laid.add_argument("out", type=Path)
    check = commands.add_parser("check")
    check.add_argument("folder", type=Path, nargs="?", help="with every file of the release")
    check.add_argument("--tag", required=True, help="such as v0.1.0")
    check.add_argument("--commit", help="that the tag points to")
    given = parser.parse_args(arguments)
    if given.command == "lay-out":
        print(f"release: {len(lay_out(given.source, given.out))} files in {given.out}")
        return 0
    found = faults_of(given.folder, given.tag, given.commit, check_wheel.check)
    print(*found, f"release: {given.tag}: {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
