"""The text: the Python sources of the running interpreter's standard library, read as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_moe.demo.config import Config
from mega_moe.demo.streams import random_stream

# Not library code: test suites (some systems ship them apart), and whatever was installed alongside the library.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """uint8 [bytes] for training, uint8 [bytes] held out, and the sha256 of both with their file names."""

    train: Tensor
    validation: Tensor
    sha256: str
    num_files: int
    folder: str


def load_corpus(config: Config, folder: Path | None = None) -> Corpus:
    """Read `folder` (default: the standard library), files sorted by path, up to `config.max_corpus_bytes`.

    One file in `config.validation_every` is held out, whole. Raises ValueError where either part is shorter than one
    sequence.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    digest = hashlib.sha256()
    parts = (bytearray(), bytearray())
    num_files = 0
    for name in paths:
        if SKIPPED_FOLDERS.intersection(name.split("/")):
            continue
        text = (root / name).read_bytes()
        if len(parts[0]) + len(parts[1]) + len(text) > config.max_corpus_bytes:
            break
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
        parts[num_files % config.validation_every == config.validation_every - 1].extend(text)
        num_files += 1
    for part, label in zip(parts, ("training", "held-out"), strict=True):
        if len(part) <= config.sequence_length:
            raise ValueError(
                f"corpus: {len(part)} {label} bytes in {num_files} *.py files under {root}, "
                f"need more than sequence_length = {config.sequence_length}"
            )
    train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(train, validation, digest.hexdigest(), num_files, str(root))


def training_batch(corpus: Corpus, config: Config, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, int64 [global_batch, sequence_length], of one step.

    A function of (seed, step) alone: every rank computes the same global batch, and a resumed run needs no state.
    """
    generator = random_stream(config.seed, f"batch {step}")
    last_start = len(corpus.train) - config.sequence_length - 1
    starts = torch.randint(last_start + 1, (config.global_batch,), generator=generator)
    return _windows(corpus.train, starts, config.sequence_length)


def validation_batches(corpus: Corpus, config: Config) -> list[tuple[Tensor, Tensor]]:
    """Evenly spaced held-out windows, about `config.eval_sequences` of them, in whole global batches."""
    num_batches = -(-config.eval_sequences // config.global_batch)
    last_start = len(corpus.validation) - config.sequence_length - 1
    starts = torch.linspace(0, last_start, num_batches * config.global_batch, dtype=torch.float64).long()
    return [_windows(corpus.validation, part, config.sequence_length) for part in starts.chunk(num_batches)]


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
