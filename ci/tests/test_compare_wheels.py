"""compare_wheels passes equal wheels only, and says where others differ."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import compare_wheels
import pytest
import wheel_file

from ._index import made_up_wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return made_up_wheel(tmp_path / "one", "mega-moe", "0.1.0", "py3-none-any")


def changed(wheel: Path, name: str, content: bytes) -> Path:
    other = wheel.parent.parent / "other" / wheel.name
    wheel_file.write(other, {**wheel_file.read(wheel), name: content})
    return other


def test_equal_wheels_pass(wheel: Path, tmp_path: Path) -> None:
    shutil.copy(wheel, tmp_path / "copy.whl")
    assert compare_wheels.main([str(wheel), str(tmp_path / "copy.whl")]) == 0
    assert compare_wheels.main([]) == 2


def test_names_what_differs(wheel: Path) -> None:
    other = changed(wheel, "mega_moe/__init__.py", b"")
    assert compare_wheels.differences(wheel, other) == [
        "differs: mega_moe-0.1.0.dist-info/RECORD",
        "differs: mega_moe/__init__.py",
    ]
    assert compare_wheels.main([str(wheel), str(other)]) == 1
    assert "only in one: mega_moe/x.so" in compare_wheels.differences(
        wheel, changed(wheel, "mega_moe/x.so", b"")
    )


def test_sees_another_time(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build without SOURCE_DATE_EPOCH would have it."""
    other = tmp_path / "later.whl"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheel_file.write(other, wheel_file.read(wheel))
    with zipfile.ZipFile(other) as archive:
        assert archive.infolist()[0].date_time[0] == 2023
    assert compare_wheels.differences(wheel, other)[0].startswith("equal files, packed in another way")
