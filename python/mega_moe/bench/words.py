"""What the commands share: options, and words that are lists."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from pathlib import Path


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Where a run takes place and where its result goes."""
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    wheel = "the wheel that was installed, where the installer kept no hash"
    add("--wheel", type=Path, metavar="FILE", help=wheel)
    add("--json", type=Path, metavar="FILE", help="also write the result here")


def check_run_options(words: argparse.Namespace) -> None:
    """Raises ValueError for a wheel that is no file, and for a result without a folder."""
    if words.wheel is not None and not words.wheel.is_file():
        raise ValueError(f"wheel: got {words.wheel}, wanted a file")
    if words.json is not None and not words.json.absolute().parent.is_dir():
        raise ValueError(f"json: got {words.json}, wanted a path in a folder that exists")


def listed(option: str, text: str, known: Collection[str]) -> list[str]:
    """The names of `text`, separated by commas. Raises ValueError for one that is not known, and for none."""
    named = [word.strip() for word in text.split(",") if word.strip()]
    for name in named or [text]:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, wanted one of {', '.join(known)}")
    return named


def without_folders(words: Sequence[str]) -> tuple[str, ...]:
    """Files by their names: where they lay says something of the machine and nothing of the figures."""
    return tuple(Path(word).name if os.sep in word else word for word in words)
