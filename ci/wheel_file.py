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
COMPRESSION = 9


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


def digest(content: bytes) -> str:
    """As RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def record(files: dict[str, bytes], own_name: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([name, digest(content), len(content)] for name, content in sorted(files.items()))
    rows.writerow([own_name, "", ""])
    return text.getvalue().encode()


def record_faults(files: dict[str, bytes]) -> list[str]:
    """What RECORD says of the files that is not so."""
    own_name = f"{info_folder(files)}/RECORD"
    if own_name not in files:
        return ["RECORD is missing"]
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(files[own_name].decode())) if row}
    faults = [f"RECORD does not list {name}" for name in sorted(set(files) - set(listed))]
    faults += [f"RECORD lists {name}, which is not there" for name in sorted(set(listed) - set(files))]
    return faults + [
        f"{name} is not what RECORD says"
        for name, want in sorted(listed.items())
        if name in files and name != own_name and digest(files[name]) != want
    ]


def write(path: Path, files: dict[str, bytes]) -> None:
    """The wheel of `files` with a RECORD made anew, every file of the time SOURCE_DATE_EPOCH."""
    info = info_folder(files)
    content = {name: data for name, data in files.items() if name != f"{info}/RECORD"}
    content[f"{info}/RECORD"] = record(content, f"{info}/RECORD")
    moment = time.gmtime(max(EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST))))[:6]
    # The dist-info folder last, as the wheel format recommends.
    order = sorted(content, key=lambda name: (name.startswith(info), name.endswith("/RECORD"), name))
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in order:
            entry = zipfile.ZipInfo(name, moment)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, so that the mode below counts
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, content[name], zipfile.ZIP_DEFLATED, COMPRESSION)
