"""Tokens of C++ and words of CMake: what is left of a source when its layout and its comments do not count.

Sources with equal tokens compile to the same code. What a macro turns into a string (#x) is compared without its white
space, __LINE__ not at all.
"""

from __future__ import annotations

import re

_SPLICE = r"\\[ \t]*\r?\n"
_PREFIX = r"(?:u8|[uUL])?"
_TOKEN = re.compile(
    rf"""
    (?P<joint>(?<=\S){_SPLICE}(?=\S))
    | (?P<space>(?:[ \t\r\f\v]|{_SPLICE})+)
    | (?P<newline>\n)
    | (?P<comment>//(?:{_SPLICE}|[^\n])* | /\*.*?\*/)
    | (?P<text>
        (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{{0,16}})\(.*?\)(?P=delimiter)"
        | {_PREFIX}"(?:\\\r?\n|\\.|[^"\\\n])*"
        | {_PREFIX}'(?:\\.|[^'\\\n])+'
        | \.?\d(?:[eEpP][+-]|'\w|[\w.])*
        | [^\W\d]\w*
        | <=> | \.\.\. | ->\* | <<= | >>= | :: | -> | \.\* | \+\+ | -- | << | >> | && | \|\| | \#\#
        | [-+*/%&|^<>=!]=
        | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)
_CMAKE = re.compile(
    r'(?P<comment>\#\[(=*)\[.*?\]\2\]|\#[^\n]*)|(?P<word>\[(=*)\[.*?\]\4\]|"(?:\\.|[^"\\])*"|[()]|(?:\\.|[^\s()"\#\\])+)',
    re.DOTALL,
)
_DIRECTIVE, _END = "\n#", "\n"


def tokens(text: str) -> tuple[str, ...]:
    """Tokens of a C++ source. A preprocessor directive begins with the token "\\n#" and ends with "\\n"."""
    found: list[str] = []
    at_line_start, in_directive, after = True, False, 0
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind == "newline":
            if in_directive:
                found.append(_END)
            at_line_start, in_directive = True, False
        elif kind in ("joint", "text"):
            if token == "#" and at_line_start:
                token, in_directive = _DIRECTIVE, True
            # "#define F(x)" takes an argument, "#define F (x)" does not.
            if token == "(" and after == match.start() and found[-3:-1] == [_DIRECTIVE, "define"]:
                token = "call("
            # A line that goes on within a token: kept apart, so that it equals neither one token nor two.
            found.append("\\" if kind == "joint" else token)
            at_line_start, after = False, match.end()
    return tuple([*found, _END] if in_directive else found)


def quoted_includes(source: tuple[str, ...]) -> list[str]:
    """What the tokens include by #include "..."; ValueError for an #include that names neither this way nor by <>."""
    found = []
    for directive, word, name in zip(source, source[1:], source[2:]):
        if (directive, word) != (_DIRECTIVE, "include"):
            continue
        if name.startswith('"'):
            found.append(name[1:-1])
        elif name != "<":
            raise ValueError(f'#include: got {name}, wanted "..." or <...>')
    return found


def cmake_words(text: str) -> tuple[str, ...]:
    """Arguments and parentheses of a CMake file, without its comments."""
    return tuple(match["word"] for match in _CMAKE.finditer(text) if match["word"] is not None)
