"""Refuse a document that cites what is not there: a path, a command, a name or an environment variable.

    python ci/check_docs.py [ROOT]

Reads *.md and docs/*.md of ROOT. Checked are
- paths, in links, in `code` and in shell blocks: they exist, or .gitignore names their folder (a command makes them);
- `nox -s SESSION`: noxfile.py defines it;
- `mega-moe COMMAND --flag`: the command line of ROOT/python answers `mega-moe COMMAND --help` and lists the flag;
- `mega_moe.name`: it can be imported from ROOT/python;
- `MEGA_MOE_*` variables: the environment table reads them, and the documents name every one that it reads.
Prints one line per fault, exits 1 when there is any. The interpreter needs torch, as the package does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from check_workflows import sessions

ENVIRONMENT_TABLE = "python/mega_moe/_base/env.py"
SUFFIXES = r"\.(?:py|md|toml|sh|cu|cuh|h|hpp|cpp|cmake|txt|json|png|so|yml|yaml)"

FENCE = re.compile(r"^(```|~~~)\s*(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"^(?:\./)?[\w.][\w.-]*(?:/[\w.-]+)*(?:/|{SUFFIXES})$")
VARIABLE = re.compile(r"\bMEGA_MOE_[A-Z][A-Z_]*[A-Z]\b")
NAME = re.compile(r"^(mega_moe(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?$")
WRITES = {"--json", "--plot", "--out"}
SHELL = {"", "sh", "bash", "console", "shell"}

# One process answers for all documents, as importing torch takes seconds: the error of each name that cannot be
# imported, and what each command prints for --help, None where the command line refuses it.
ANSWERS = """
import contextlib, io, json, pkgutil, sys
names, commands = json.loads(sys.argv[1])
missing, helps = {}, {}
for name in names:
    try:
        pkgutil.resolve_name(name)
    except Exception as error:
        missing[name] = repr(error)
for command in commands:
    from mega_moe.cli import main
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as stopped:
            code = stopped.code
    helps[command] = out.getvalue() if not code else None
print(json.dumps([missing, helps]))
"""


class Document:
    """One document: what it cites."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.prose = FENCE.sub("", self.text)
        self.spans = INLINE.findall(self.prose)
        heads = (span.split("(")[0] for span in self.spans)
        self.names = {found[1] for head in heads if (found := NAME.match(head)) and not PATH.match(head)}
        self.variables = set(VARIABLE.findall(self.text))

    @cached_property
    def commands(self) -> list[list[str]]:
        """Words of every shell command: the lines of the shell blocks and the `code` spans."""
        blocks = [body.replace("\\\n", " ") for _, kind, body in FENCE.findall(self.text) if kind in SHELL]
        lines = [line.split(" #")[0] for body in blocks for line in body.splitlines()]
        parts = [part for line in lines for part in re.split(r"&&|\|\||;|\|", line)]
        return [part.removeprefix("$ ").split() for part in [*parts, *self.spans]]

    def cited(self) -> Iterator[tuple[str, list[str]]]:
        """Each subcommand of `mega-moe` with the words that follow it."""
        for words in self.commands:
            programs = [Path(word).name for word in words]
            if "mega-moe" in programs and not _is_pattern(words):
                given = words[programs.index("mega-moe") + 1 :]
                named = given[:1] if given and re.fullmatch(r"[a-z][a-z-]*", given[0]) else []
                # The one command that has a command below it.
                yield "bench step" if given[:2] == ["bench", "step"] else "".join(named), given


def _is_pattern(words: list[str]) -> bool:
    return any(re.search(r"[<>{}*$…]", word) for word in words if "/" in word)


def ask(root: Path, documents: list[Document]) -> tuple[dict[str, str], dict[str, str | None]]:
    names = sorted({name for document in documents for name in document.names})
    commands = sorted({command for document in documents for command, _ in document.cited()})
    answer = subprocess.run(
        [sys.executable, "-c", ANSWERS, json.dumps([names, commands])],
        env={**os.environ, "PYTHONPATH": str(root / "python"), "COLUMNS": "200"},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    missing, helps = json.loads(answer.stdout)
    return missing, helps


def check(root: Path) -> tuple[int, list[str]]:
    """Number of documents, and one line per fault."""
    paths = [path for pattern in ("*.md", "docs/*.md") for path in sorted(root.glob(pattern))]
    documents = [Document(path) for path in paths]
    ignore, table = root / ".gitignore", root / ENVIRONMENT_TABLE
    made = [line for line in (ignore.read_text() if ignore.exists() else "").split() if line.endswith("/")]
    known = sessions(root) if (root / "noxfile.py").exists() else set()
    read = set(re.findall(rf'"({VARIABLE.pattern})"', table.read_text() if table.exists() else ""))
    missing, helps = ask(root, documents)

    def has_path(text: str, document: Document) -> bool:
        return any(text.startswith(folder) or f"{text}/" == folder for folder in made) or any(
            (base / text).exists() for base in (root, document.path.parent)
        )

    def faults_of(document: Document) -> Iterator[str]:
        for words in document.commands:
            if _is_pattern(words):
                continue
            for before, word in zip(["", *words], words):
                # What a command writes need not be there before it.
                if before not in WRITES and PATH.match(word) and not has_path(word, document):
                    yield f"no such path: {word}"
            if "nox" in (Path(word).name for word in words) and "-s" in words:
                for session in words[words.index("-s") + 1 :]:
                    if session.startswith("-"):
                        break
                    if session not in known:
                        yield f"no such nox session: {session}"
        for command, given in document.cited():
            answer = helps[command]
            if answer is None:
                yield f"the command line refuses: mega-moe {command}"
                continue
            for word in given:
                flag = word.split("=")[0].rstrip(".,")
                if flag.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", answer):
                    yield f"mega-moe {command} has no {flag}"
        for link in LINK.findall(document.prose):
            target = link.split("#")[0]
            if target and not re.match(r"\w+:", target) and not has_path(target, document):
                yield f"broken link: {target}"
        yield from (
            f"no such name: {name} ({missing[name]})" for name in sorted(document.names & missing.keys())
        )
        yield from (
            f"the environment table does not read {name}" for name in sorted(document.variables - read)
        )

    faults = [f"{d.path.relative_to(root)}: {fault}" for d in documents for fault in faults_of(d)]
    told = {name for document in documents for name in document.variables}
    return len(documents), faults + [f"no document tells of {name}" for name in sorted(read - told)]


def main(argv: list[str]) -> int:
    number, faults = check(Path(argv[0] if argv else ".").resolve())
    print(*faults, f"check_docs: {number} documents, {len(faults)} faults", sep="\n")
    return 1 if faults or not number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
