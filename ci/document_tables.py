"""Generated tables of documents: between `<!-- NAME:begin -->` and `<!-- NAME:end -->` in README.md or docs/*.md."""

from __future__ import annotations

import re
from pathlib import Path


def sync(root: Path, name: str, table: str, write: bool = False) -> list[str]:
    """The fault where no document has a place for the table, or the one there is another; `write` puts it there."""
    place = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if place.search(text):
            new = place.sub(lambda match: match[1] + table + match[2], text)
            if write:
                path.write_text(new, encoding="utf-8")
            return (
                []
                if write or new == text
                else [f"{path.name}: the table {name} is an old one: write it anew"]
            )
    return [f"no document has a place for the table between <!-- {name}:begin --> and its end"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
