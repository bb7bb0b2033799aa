"""check_docs refuses each planted citation of something that is not there, and passes what is."""

from __future__ import annotations

from pathlib import Path

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
