"""What counts in a C++ source and what does not: layout and comments do not, everything else does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
sys.path.insert(0, str(KERNELS))
from cpp_tokens import cmake_words, quoted_includes, tokens  # noqa: E402  (the folder above must be on the path)

del sys.path[0]

RAW = 'R"x(a // b\n"c" )" /* d */)x"'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a; // why", "int a;"),
        ("int a; // why \\\n int b;", "int a;"),
        ("int a; // why \\\\\n int b;", "int a;"),
        ("int /* of\n what */ a;", "int\ta ;"),
        ("a /* // */ b", "a b"),
        ("a // /*\nb", "a b"),
        ("f(a,\r\n  b)", "f( a, b )"),
        ("#define A 1 /* one\n two */\nint b;", "#define A 1\nint b;"),
        ("#define A(x) \\\n    x + 1\nint b;", "  # define A(x) x+1\n\n\nint b;"),
        ("a\n#pragma unroll\nb", "a // c\n   #pragma   unroll // d\n b"),
        ("#define A 1", "#define A 1\n"),
        ("x = y / z; /**/ w", "x = y/z; w"),
        ("int n = 1'000; char c = '\"'; // '", "int n=1'000; char c='\"';"),
        (f"f({RAW}, 1) // c", f"f( {RAW},\n1)"),
    ],
)
def test_equal(one: str, other: str) -> None:
    assert tokens(one) == tokens(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b", "ab"),
        ("a\\\nb", "a b"),
        ("int a = 1;", "int a = 2;"),
        ('"a // b"', '"a"'),
        ('"a /* b */ c"', '"a  c"'),
        ('"a  b"', '"a b"'),
        (r'"\" // a"', r'"\" // b"'),
        ("'\\'' // a\n + 1", "'\\'' // a\n + 2"),
        ('"/*" + a + "*/"', '"/*" + b + "*/"'),
        (RAW, RAW.replace("// b", "// c")),
        (RAW, RAW.replace("/* d */", "")),
        (RAW, RAW.replace("\n", " ")),
        ('LR"(a\\\n//b)"', 'LR"(a\\\n//c)"'),
        ('FOOR"(" /* a */ + 1', 'FOOR"(" /* a */ + 2'),
        ("1'000 /* ' */ + 1", "1'000 /* ' */ + 2"),
        ("u8'x' + '\"' + 1", "u8'x' + '\"' + 2"),
        ("a + +b", "a ++b"),
        ("x > > y", "x >> y"),
        ("#define A(x) x", "#define A (x) x"),
        ("#define A\nB", "#define A B"),
        ("#define A 1\n", "define A 1\n"),
        ("x #pragma unroll", "x\n#pragma unroll"),
        ("a / b", "a // b"),
    ],
)
def test_different(one: str, other: str) -> None:
    assert tokens(one) != tokens(other)


def test_includes_are_those_of_the_code() -> None:
    source = """\
#include "a.h"
// #include "b.h"
/*
#include "c.h"
*/
#  include /* why */ "layout/d.h" // what
#include <vector>
const char* text = R"(
#include "e.h"
)";
#if defined(X)
#include "f.h"
#endif
"""
    assert quoted_includes(tokens(source)) == ["a.h", "layout/d.h", "f.h"]
    with pytest.raises(ValueError, match=r"#include: got HEADER, wanted"):
        quoted_includes(tokens("#include HEADER\n"))


def test_cmake_without_comments() -> None:
    text = 'set(a "x # y" -O3)  # why\n#[[ longer\n]]\nset(b [=[ # ]] ]=] \\# c)\n'
    first = ["set", "(", "a", '"x # y"', "-O3", ")"]
    assert list(cmake_words(text)) == [*first, "set", "(", "b", "[=[ # ]] ]=]", "\\#", "c", ")"]
    assert cmake_words("set(a\n  b)") == cmake_words("set(a b) # c")
    assert cmake_words("set(a b)") != cmake_words("set(a c)")
