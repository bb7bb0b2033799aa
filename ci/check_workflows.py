"""Refuses a workflow that does more than call one command that a person also types, or that may do more than it needs.

    python ci/check_workflows.py [ROOT]

Rules over ROOT/.github/workflows, besides what actionlint and zizmor know:
- a job runs one nox session, defined in noxfile.py, and neither builds nor installs anything of the project itself;
- actions are pinned by the 40 digits of a commit, with the version in a comment;
- no permission is given to a whole workflow, each job names what it needs, and how long it may take;
- what runs on the project's own machines installs the artifact of a build and never builds;
- a release is drafted by one job and published by another, which needs the first and checks what was uploaded.
Prints one line per fault, exits 1 when there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What stands in a run step without being a session; a job that reads the matrix prints it for others.
BUILDS = re.compile(
    r"\b(?:cmake|ninja|cibuildwheel|auditwheel|docker|podman|nvcc|pytest)\b"
    r"|pip3? (?:install|wheel) (?!nox\b)|-m build\b"
)
SESSION = re.compile(r"\bnox -s (\S+)")
BUILDING_SESSIONS = {"wheel", "wheel_manylinux", "reproducible", "tests", "demo"}
PINNED = re.compile(r"uses: (?:[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d\S*|\$/\.github/workflows/\w+\.yml)$")
PUBLISHES = "--draft=false"
# By its label, or as the machine with a GPU that ci/matrix.toml names for a wheel.
OWN_MACHINE = re.compile(r"\bself-hosted\b|\bmatrix\.wheel\.gpu\b")


def sessions(root: Path) -> set[str]:
    """Names of the functions of noxfile.py that `nox.session` decorates."""
    text = (root / "noxfile.py").read_text(encoding="utf-8")
    return set(re.findall(r"^@nox\.session\b[^\n]*\ndef (\w+)", text, re.MULTILINE))


def called(job: dict[str, Any]) -> Iterator[str]:
    """Sessions that the steps of a job start, a matrix of them resolved."""
    for step in job["steps"]:
        for name in SESSION.findall(step.get("run", "")):
            variable = step.get("env", {}).get(name.strip('"$'), "")
            key = re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", variable)
            yield from job["strategy"]["matrix"][key[1]] if key else [name]


def job_faults(job: dict[str, Any], known: set[str]) -> Iterator[str]:
    if "permissions" not in job:
        yield "names no permissions"
    if "uses" in job:
        return
    if "timeout-minutes" not in job:
        yield "has no timeout-minutes"
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    if len(SESSION.findall(runs)) > 1:
        yield "starts more than one nox session"
    if found := BUILDS.search(runs):
        yield f"does itself what a nox session is for: {found.group().strip()}"
    for session in called(job):
        if session not in known:
            yield f"no such nox session: {session}"
        own = OWN_MACHINE.search(str(job["runs-on"]))
        if own and (session in BUILDING_SESSIONS or not re.search(r"nox -s .*\.whl", runs)):
            yield f"runs {session} on the project's own machine without the wheel of a build"


def release_faults(jobs: dict[str, Any]) -> Iterator[str]:
    """Over every job that creates or publishes a release."""
    text = {
        name: "\n".join(step.get("run", "") for step in job.get("steps", ())) for name, job in jobs.items()
    }
    drafts = {name for name, run in text.items() if "gh release create" in run}
    for name in drafts:
        if "--draft" not in text[name] or PUBLISHES in text[name]:
            yield f"{name}: creates a release that is not a draft"
    for name, run in text.items():
        if PUBLISHES in run and not drafts & {jobs[name].get("needs")}:
            yield f"{name}: publishes without needing the job that drafts"
        if PUBLISHES in run and not re.search(r"sha256sum --check.*nox -s release_check", run, re.DOTALL):
            yield f"{name}: publishes what it did not check"


def faults(path: Path, known: set[str]) -> Iterator[str]:
    import yaml

    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    for use in re.findall(r"uses: .*", text):
        if not PINNED.fullmatch(use):
            yield f"'{use}' is not pinned by a commit with its version behind it"
    if data.get("permissions") != {}:
        yield f"permissions of the workflow are {data.get('permissions')}, must be {{}}"
    for name, job in data["jobs"].items():
        yield from (f"{name}: {fault}" for fault in job_faults(job, known))
    yield from release_faults(data["jobs"])


def main(argv: list[str]) -> int:
    root = Path(argv[0] if argv else ".").resolve()
    paths = sorted((root / ".github/workflows").glob("*.yml"))
    found = [f"{path.name}: {fault}" for path in paths for fault in faults(path, sessions(root))]
    print(*found, f"check_workflows: {len(paths)} workflows, {len(found)} faults", sep="\n")
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
