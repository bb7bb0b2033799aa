"""Write the API reference docs/api.md from the docstrings of the public names; `--check` refuses a stale page.

    python ci/api_page.py [--check] [ROOT]

Public are the names in the `__all__` of MODULES and the package's own classes that a public function returns.
griffe reads the sources without importing them: the page depends neither on torch nor on Python's version.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

MODULES = ("mega_moe", "mega_moe.nn", "mega_moe.integrations", "mega_moe.deep_gemm", "mega_moe.testing")
HEAD = "# API reference\n\n<!-- Written by `nox -s api` from the docstrings: change those, then run it again. -->"


def docstring(item: griffe.Object) -> Iterator[str]:
    """Paragraphs of ITEM's docstring; a section such as Args is a list."""
    for section in item.docstring.parse("google", warnings=False) if item.docstring else ():
        if section.kind is griffe.DocstringSectionKind.text:
            yield section.value
            continue
        yield f"**{section.kind.value.capitalize()}**"
        # A raised or returned value has a type in place of a name.
        names = (str(getattr(part, "name", "") or part.annotation).strip("()") for part in section.value)
        texts = (part.description.replace("\n", "\n  ") for part in section.value)
        yield "\n".join(f"- `{name}`: {text}" for name, text in zip(names, texts))


def signature(item: griffe.Class | griffe.Function) -> str:
    glued = re.sub(r"(?<!,) ", "\N{NO-BREAK SPACE}", item.signature())  # lines end only between parameters
    code = textwrap.fill(glued, 100, subsequent_indent="    ", break_on_hyphens=False)
    return f"```python\n{code}\n```".replace("\N{NO-BREAK SPACE}", " ")


def entry(item: griffe.Object) -> Iterator[str]:
    """A heading, the signature and the docstring of ITEM, then its public members if it is a class."""
    yield f"### {item.name}"
    if item.signature():
        yield signature(item)
    yield from (text := list(docstring(item)))
    members = [m for m in item.members.values() if not m.name.startswith("_")] if item.is_class else []
    told = [m.name for m in members if any(f"- `{m.name}`: " in part for part in text)]
    fields = [m for m in members if m.is_attribute and m.annotation and m.name not in told]
    lines = [f"- `{m.name}: {m.annotation}`" + "".join(f": {p}" for p in docstring(m)) for m in fields]
    yield from ["**Members**", "\n".join(lines)] if lines else []
    for method in members:
        if method.is_function:
            yield f"#### {item.name}.{method.name}"
            yield signature(method)
            yield from docstring(method)


def public(module: griffe.Module) -> Iterator[griffe.Object]:
    """What MODULE exports, and each class of the package that an exported function returns."""
    items = [module[name] for name in module.exports or ()]
    items = [item.final_target if item.is_alias else item for item in items]
    yield from (item for item in items if item.is_class or item.is_function)
    for item in items:
        path = getattr(item.returns, "canonical_path", "") if item.is_function else ""
        if path.startswith(f"{module.package.name}.") and not any(path == other.path for other in items):
            yield module.package[path.partition(".")[2]]


def page(root: Path) -> str:
    package = griffe.load("mega_moe", search_paths=[root / "python"], allow_inspection=False)
    parts = [HEAD]
    for name in MODULES:
        module = package.modules_collection[name]
        parts += [f"## `{name}`", *docstring(module)]
        parts += [paragraph for item in public(module) for paragraph in entry(item)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    check, (root, *_) = "--check" in argv, [*(Path(a) for a in argv if a != "--check"), Path()]
    file, text = root / "docs" / "api.md", page(root)
    if not check:
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        print("api_page: docs/api.md is not what the docstrings say; run `nox -s api`")
        return 1
    print(f"api_page: docs/api.md has {text.count('### ')} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
