"""The API reference is what the docstrings say, and is refused as soon as one of them says something else."""

from __future__ import annotations

from pathlib import Path

import api_page
import pytest

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
