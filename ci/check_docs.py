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

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DOCUMENTS = ("*.md", "docs/*.md")
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


class Tree:
    """What the documents are held against."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignore = root / ".gitignore"
        self.made = (
            {line.strip() for line in ignore.read_text().splitlines() if line.endswith("/")}
            if ignore.exists()
            else set()
        )
        self._help: dict[str, str | None] = {}

    def has_path(self, text: str, document: Path) -> bool:
        if any(text.startswith(folder) or f"{text}/" == folder for folder in self.made):
            return True
        return any((base / text).exists() for base in (self.root, document.parent))

    def sessions(self) -> set[str]:
        """Names of the functions of noxfile.py that `nox.session` decorates."""
        tree = ast.parse((self.root / "noxfile.py").read_text())
        return {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and any("session" in ast.unparse(mark) for mark in node.decorator_list)
        }

    def variables(self) -> set[str]:
        table = self.root / ENVIRONMENT_TABLE
        if not table.exists():
            return set()
        return {
            node.value
            for node in ast.walk(ast.parse(table.read_text()))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and VARIABLE.fullmatch(node.value)
        }

    def _python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.root / "python"), "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def help_of(self, command: str) -> str | None:
        """What `mega-moe COMMAND --help` prints, None when the command line refuses it."""
        if command not in self._help:
            run = "import sys; from mega_moe.cli import main; sys.exit(main())"
            answer = self._python(run, *command.split(), "--help")
            self._help[command] = answer.stdout if answer.returncode == 0 else None
        return self._help[command]

    def missing_names(self, names: set[str]) -> dict[str, str]:
        """Those of NAMES (dotted, from the package down) that cannot be imported, with the error."""
        if not names:
            return {}
        answer = self._python(
            "import pkgutil, sys\n"
            "for name in sys.argv[1:]:\n"
            "    try: pkgutil.resolve_name(name)\n"
            "    except Exception as error: print(name, repr(error), sep='\\t')\n",
            *sorted(names),
        )
        if answer.returncode != 0:
            return {"mega_moe": answer.stderr.strip().splitlines()[-1]}
        return dict(line.split("\t", 1) for line in answer.stdout.splitlines())


def commands_of(text: str) -> Iterator[str]:
    """Every shell command of a document: the lines of its shell blocks and its `code` spans."""
    for fence in FENCE.finditer(text):
        if fence.group(2) in SHELL:
            for line in fence.group(3).replace("\\\n", " ").splitlines():
                yield from re.split(r"&&|\|\||;|\|", line.split(" #")[0])
    yield from (span.group(1) for span in INLINE.finditer(FENCE.sub("", text)))


def check_command(command: str, document: Path, tree: Tree) -> Iterator[str]:
    words = command.removeprefix("$ ").split()
    if any(re.search(r"[<>{}*$…]", word) for word in words if "/" in word):
        return
    for before, word in zip(["", *words], words):
        # What a command writes need not be there before it.
        if before in WRITES:
            continue
        if PATH.match(word) and not tree.has_path(word.removeprefix("./"), document):
            yield f"no such path: {word}"
    programs = [Path(word).name for word in words]
    if "nox" in programs and "-s" in words:
        for session in words[words.index("-s") + 1 :]:
            if session.startswith("-"):
                break
            if session not in tree.sessions():
                yield f"no such nox session: {session}"
    if "mega-moe" in programs:
        given = words[programs.index("mega-moe") + 1 :]
        subcommand = given[0] if given and re.fullmatch(r"[a-z][a-z-]*", given[0]) else ""
        if given[:2] == ["bench", "step"]:  # the one command that has a command below it
            subcommand = "bench step"
        answer = tree.help_of(subcommand)
        if answer is None:
            yield f"the command line refuses: mega-moe {subcommand}"
            return
        for word in given:
            flag = word.split("=")[0].rstrip(".,")
            if flag.startswith("-") and not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", answer):
                yield f"mega-moe {subcommand} has no {flag}"


def check_document(document: Path, tree: Tree) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    for command in commands_of(text):
        yield from check_command(command, document, tree)
    for link in LINK.finditer(FENCE.sub("", text)):
        target = link.group(1).split("#")[0]
        if (
            target
            and "://" not in target
            and not target.startswith("mailto:")
            and not tree.has_path(target, document)
        ):
            yield f"broken link: {target}"
    spans = [span.group(1).split("(")[0] for span in INLINE.finditer(FENCE.sub("", text))]
    names = {found.group(1) for span in spans if (found := NAME.match(span)) and not PATH.match(span)}
    yield from (f"no such name: {name} ({error})" for name, error in tree.missing_names(names).items())
    yield from (
        f"the environment table does not read {name}"
        for name in sorted(set(VARIABLE.findall(text)) - tree.variables())
    )


def main(argv: list[str]) -> int:
    root = Path(argv[0] if argv else ".").resolve()
    documents = sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))
    tree = Tree(root)
    faults = [
        f"{path.relative_to(root)}: {fault}" for path in documents for fault in check_document(path, tree)
    ]
    told = {name for path in documents for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    faults += [f"no document tells of {name}" for name in sorted(tree.variables() - told)]
    print(*faults, f"check_docs: {len(documents)} documents, {len(faults)} faults", sep="\n")
    return 1 if faults or not documents else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
