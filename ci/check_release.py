"""Refuses a release that is not whole: a hole in the matrix, a wheel too many, another version, no changelog entry.

    python ci/check_release.py [FOLDER] --tag vX.Y.Z [--commit COMMIT]

Without FOLDER only version and changelog are judged, before anything is built. FOLDER holds what will be published:
every wheel of ci/matrix.toml with its label, and those of the default flavour a second time without a label, for the
package index, with the source package. Each wheel is judged by check_wheel.py, must have the platform tag of the matrix
and must come from the same clean commit. Prints one line per fault and exits 1 when there is any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import finish_wheel
import matrix
import wheel_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PARTS = (finish_wheel.WHEEL_RECORD, finish_wheel.BUILD)


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
    """Names of the wheels of a whole release."""
    names = set()
    for wheel in loaded.wheels():
        tags = f"py3-none-{loaded.policy}_{wheel['platform']}"
        names.add(f"mega_moe-{version}+{wheel['label']}-{tags}.whl")
        if wheel["label"] == loaded.default:
            names.add(f"mega_moe-{version}-{tags}.whl")
    return names


def source_faults(folder: Path, names: list[str], commit: str | None) -> list[str]:
    """Whether all wheels come from one commit without changes, and from the same kernels."""
    commits, kernels, faults = set(), set(), []
    for name in names:
        files = wheel_file.read(folder / name)
        record, build = (json.loads(files.get(part, b"{}")) for part in PARTS)
        commits.add(str(record.get("commit")))
        kernels.add(build.get("kernels_sha256"))
        if not re.fullmatch(r"[0-9a-f]{40}", str(record.get("commit"))):
            faults.append(f"{name}: built from {record.get('commit')}, must be a clean commit")
        label = name.split("-")[1].partition("+")[2]
        if label and label != record.get("label"):
            faults.append(f"{name}: wheel.json says {record.get('label')}")
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
    version = tag.removeprefix("v")
    want = wanted_names(matrix.load(root / "ci/matrix.toml"), version)
    got = {path.name for path in folder.glob("*.whl")}
    archives = [path.name for path in folder.glob("*.tar.gz")]
    if archives != [f"mega_moe-{version}.tar.gz"]:
        found.append(f"source packages are {archives}, must be mega_moe-{version}.tar.gz")
    found += [f"a hole in the matrix: {name} is missing" for name in sorted(want - got)]
    found += [f"{name} is not in the matrix" for name in sorted(got - want)]
    names = sorted(want & got)
    found += source_faults(folder, names, commit)
    return found + [f"{name}: {fault}" for name in names for fault in judge(folder / name)]


def main(arguments: list[str]) -> int:
    import check_wheel

    parser = argparse.ArgumentParser(prog="check_release", description="Judge a release as a whole.")
    parser.add_argument("folder", type=Path, nargs="?", help="with every wheel of the release")
    parser.add_argument("--tag", required=True, help="such as v0.1.0")
    parser.add_argument("--commit", help="that the tag points to")
    given = parser.parse_args(arguments)
    found = faults_of(given.folder, given.tag, given.commit, check_wheel.check)
    for fault in found:
        print(f"check_release: {fault}", file=sys.stderr)
    if not found:
        print(f"check_release: {given.tag}: {'whole' if given.folder else 'version and changelog agree'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
