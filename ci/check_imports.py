"""Refuse an import that goes up, and a side door: who may know what on the Python side.

    python ci/check_imports.py [ROOT]

Two kinds of rule over ROOT/python/mega_moe: the import contracts of ROOT/pyproject.toml (import-linter), and calls
that no import shows: only `_ops/library.py` loads the compiled library, only `_backends/choice/facts.py` asks the
driver, only `_base/env.py` reads the package's environment variables. Prints one line per fault and exits 1 when there
is any.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("python/mega_moe")
# What loads a shared library, and the one file that may: the compiled library, and the driver that facts ask.
LIBRARY_DOORS = {"load_library": PACKAGE / "_ops/library.py", "CDLL": PACKAGE / "_backends/choice/facts.py"}
ENVIRONMENT_DOOR = PACKAGE / "_base/env.py"


def side_doors(source: str) -> Iterator[tuple[int, Path, str]]:
    """(line, the one file that may do it, what is done) of each reserved act in SOURCE."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and _name(node) in LIBRARY_DOORS:
            yield node.lineno, LIBRARY_DOORS[_name(node)], f"loads a library ({_name(node)})"
        if isinstance(node, ast.Call | ast.Subscript | ast.Compare):
            text = ast.unparse(node)
            if "environ" in text or "getenv" in text:
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and str(part.value).startswith("MEGA_MOE_"):
                        yield node.lineno, ENVIRONMENT_DOOR, f"touches {part.value} in the environment"


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def check_side_doors(root: Path) -> list[str]:
    faults = set()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root)
        for line, door, what in side_doors(path.read_text(encoding="utf-8")):
            if name != door:
                faults.add(f"{name.as_posix()}:{line}: {what}; only {door.as_posix()} may")
    return sorted(faults)


def check_contracts(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over ROOT's own package, whatever is installed alongside it."""
    environment = {**os.environ, "PYTHONPATH": str(root / "python")}
    code = "import sys; from importlinter.cli import lint_imports_command as run; sys.argv[0] = 'lint-imports'; run()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def main(argv: list[str]) -> int:
    root = Path(argv[0] if argv else ".").resolve()
    faults = check_side_doors(root)
    contracts = check_contracts(root)
    print(*faults, contracts.stdout, contracts.stderr, sep="\n")
    return 1 if faults or contracts.returncode else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
