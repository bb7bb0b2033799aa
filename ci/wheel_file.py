"""Reads and writes the archive that a wheel is: same content, same bytes, whoever writes it and when."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import time
import zipfile
from pathlib import Path

# The archive format knows no earlier time.
EARLIEST = 315532800


def read(path: Path) -> dict[str, bytes]:
    """Content of every file in the wheel, by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def info_folder(files: dict[str, bytes]) -> str:
    """Name of the only dist-info folder; ValueError when there is none or more than one."""
    folders = {name.partition("/")[0] for name in files if name.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise ValueError(f"dist-info: got {sorted(folders)}, want one folder")
    return folders.pop()


def record(files: dict[str, bytes]) -> bytes:
    """The RECORD of `files`, sorted by name and without the RECORD that they may hold."""
    own, text = f"{info_folder(files)}/RECORD", io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name in sorted(files.keys() - {own}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(files[name])])
    rows.writerow([own, "", ""])
    return text.getvalue().encode()


def record_faults(files: dict[str, bytes]) -> list[str]:
    """What RECORD says of the files that is not so."""
    said = set(files[f"{info_folder(files)}/RECORD"].decode().splitlines())
    found = set(record(files).decode().splitlines())
    return [f"RECORD has no true line of {line.partition(',')[0]}" for line in sorted(found - said)] + [
        f"RECORD has a false line of {line.partition(',')[0]}" for line in sorted(said - found)
    ]


def write(path: Path, files: dict[str, bytes]) -> None:
    """The wheel of `files` with a new RECORD, every file of the time SOURCE_DATE_EPOCH."""
    info = info_folder(files)
    content = {**files, f"{info}/RECORD": record(files)}
    moment = time.gmtime(max(EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST))))[:6]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        # The dist-info folder last, as the wheel format recommends.
        for name in sorted(content, key=lambda n: (n.startswith(info), n.endswith("/RECORD"), n)):
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix, so that the mode below counts
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, content[name], zipfile.ZIP_DEFLATED, compresslevel=9)
