"""The file that a timing of one kernel alone leaves: device, build of the library, and a row per measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mega_moe._ops import library


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """`rows` are dataclasses, measured on the current CUDA device."""
    result = {"device": torch.cuda.get_device_name(), "build": library.build_record()}
    path.write_text(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
