"""Two builds are equal to the last byte or refused, with the files that differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import wheel_file

from ._helpers import make_wheel


def test_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel(tmp_path, "mega-moe", "0.1.0", "py3-none-any")
    other = tmp_path / "other.whl"
    shutil.copy(wheel, other)
    assert wheel_file.main([str(wheel), str(other)]) == 0
    files = wheel_file.read(wheel)
    wheel_file.write(other, {**files, "mega_moe/__init__.py": b"", "mega_moe/x.so": b""})
    assert wheel_file.main([str(wheel), str(other)]) == 1
    assert [line.split("/")[-1] for line in capsys.readouterr().out.splitlines() if "differs: " in line] == [
        "RECORD",
        "__init__.py",
        "x.so",
    ]
    # As a build without SOURCE_DATE_EPOCH would have it.
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheel_file.write(other, files)
    assert wheel_file.differences(wheel, other)[0].startswith("equal files, packed in another way")
