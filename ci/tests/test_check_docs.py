"""Documents cite what is there, and the API reference says what the docstrings say; each planted fault is refused."""

from __future__ import annotations

from pathlib import Path

import api_page
import check_docs
import pytest

CLI = """
import argparse
def main(argv):
    parser = argparse.ArgumentParser("mega-moe")
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train")
    train.add_argument("--steps", type=int)
    train.add_argument("--json")
    step = commands.add_parser("bench").add_subparsers().add_parser("step")
    step.add_argument("--skip")
    parser.parse_args(argv)
"""

GOOD = """
See [the guide](docs/guide.md), `docs/guide.md` and `noxfile.py`; the curve is `demo-run/loss.png`.
`mega-moe train --steps=5`, `mega_moe.cli.main` and `mega_moe.moe(x)` exist, `MEGA_MOE_STRICT=1` is read;
`fp32/fp64` is prose.
```bash
nox -s tests                       # comment with no/such/path.py
mega-moe bench step --skip 3 && mega-moe train --json written.json
.venv/bin/mega-moe train --steps 3 && .venv/bin/nox -s tests -- -k name
```
```python
open("not/a/command.py")
```
"""

PLANTED = {
    "`docs/gone.md`": "no such path: docs/gone.md",
    "`gone.py`": "no such path: gone.py",
    "[guide](docs/gone.md#top)": "broken link: docs/gone.md",
    "`nox -s test`": "no such nox session: test",
    "```bash\nnox -s tests && nox -s helper\n```": "no such nox session: helper",
    "```bash\npython ci/gone.py\n```": "no such path: ci/gone.py",
    "`mega-moe trian`": "the command line refuses: mega-moe trian",
    "`mega-moe train --step 3`": "mega-moe train has no --step",
    "`mega-moe bench --skip 3`": "mega-moe bench has no --skip",
    "`mega-moe bench step --step 3`": "mega-moe bench step has no --step",
    "`mega-moe train --json out.json read.json`": "no such path: read.json",
    "`mega_moe.cli.mian`": "no such name: mega_moe.cli.mian",
    "`mega_moe.moee(x)`": "no such name: mega_moe.moee",
    "`MEGA_MOE_STRIKT=1`": "the environment table does not read MEGA_MOE_STRIKT",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "README.md": GOOD,
        "docs/guide.md": "# Guide\n",
        ".gitignore": "demo-run/\n.venv/\n",
        "noxfile.py": "@nox.session\ndef tests(session): ...\ndef helper(session): ...\n",
        "python/mega_moe/__init__.py": "def moe(): ...\n",
        "python/mega_moe/cli.py": CLI,
        "python/mega_moe/_base/env.py": 'read("MEGA_MOE_STRICT")\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_true_citations_pass(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.main([str(tree)]) == 0, capsys.readouterr().out


def test_each_planted_citation_is_refused(tree: Path) -> None:
    """A document for each, all judged at once: the process that answers for names and commands takes a second."""
    for number, text in enumerate(PLANTED):
        (tree / "docs" / f"{number}.md").write_text(f"# Guide\n\n{text}\n")
    _, faults = check_docs.check(tree)
    assert len(faults) == len(PLANTED)
    for number, fault in enumerate(PLANTED.values()):
        assert [line for line in faults if line.startswith(f"docs/{number}.md: {fault}")], faults


def test_a_variable_that_no_document_names_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "python/mega_moe/_base/env.py").write_text('read("MEGA_MOE_STRICT", "MEGA_MOE_OTHER")\n')
    assert check_docs.main([str(tree)]) == 1
    assert "no document tells of MEGA_MOE_OTHER" in capsys.readouterr().out


def test_a_tree_without_documents_is_no_pass(tmp_path: Path) -> None:
    assert check_docs.main([str(tmp_path)]) == 1


PACKAGE = {
    "__init__.py": 'from mega_moe._core import layer\n__all__ = ["layer"]\n',
    "_core.py": '''
class Result:
    """What comes out."""

    rows: int
    """Rows of it."""
    _hidden: int

    def check(self) -> None:
        """Raise what is wrong."""

def layer(x: int, *, top_k: int = 2) -> Result:
    """Compute.

    Args:
        x: tokens ``[T, H]``,
            one row each.

    Raises:
        ValueError: x is empty.
    """

def _private() -> None:
    """Not shown."""
''',
    **dict.fromkeys(("nn.py", "integrations.py", "deep_gemm.py", "testing.py"), '"""Nothing public."""\n'),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        (tmp_path / "python" / "mega_moe" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "python" / "mega_moe" / name).write_text(text)
    (tmp_path / "docs").mkdir()
    assert api_page.main([str(tmp_path)]) == 0
    return tmp_path


def test_public_names_are_shown_with_signature_sections_and_results(root: Path) -> None:
    text = (root / "docs" / "api.md").read_text()
    assert "```python\nlayer(x: int, *, top_k: int = 2) -> Result\n```\n\nCompute." in text
    assert "- `x`: tokens ``[T, H]``,\n  one row each." in text
    assert "**Raises**\n\n- `ValueError`: x is empty." in text
    assert "### Result\n\nWhat comes out.\n\n**Members**\n\n- `rows: int`: Rows of it." in text
    assert "#### Result.check" in text
    assert "Not shown" not in text
    assert "_hidden" not in text
    assert api_page.main(["--check", str(root)]) == 0


@pytest.mark.parametrize(
    "change", [("Compute.", "Computes."), ("top_k: int = 2", "top_k: int = 4"), ("rows: int", "lines: int")]
)
def test_a_page_older_than_the_sources_is_refused(change: tuple[str, str], root: Path) -> None:
    source = root / "python" / "mega_moe" / "_core.py"
    source.write_text(source.read_text().replace(*change))
    assert api_page.main(["--check", str(root)]) == 1


def test_a_missing_page_is_refused(root: Path) -> None:
    (root / "docs" / "api.md").unlink()
    assert api_page.main(["--check", str(root)]) == 1
