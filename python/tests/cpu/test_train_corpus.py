"""The text of the demonstration job and the batches that are cut from it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from mega_moe.demo.corpus import load_corpus, training_batch, validation_batches

from ._train import small


def library(folder: Path, num_files: int = 8) -> Path:
    """A folder of files, each of 400 equal letters: a, b, c ..., with things among them that are not text to read."""
    for i in range(num_files):
        (folder / f"pkg{i % 2}").mkdir(exist_ok=True, parents=True)
        (folder / f"pkg{i % 2}" / f"m{i}.py").write_text(chr(97 + i) * 400)
    for name in ("test/test_x.py", "site-packages/y.py", "pkg0/__pycache__/z.py", "pkg0/data.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("!" * 400)
    return folder


def test_files_are_sorted_by_path_and_every_nth_is_held_out(tmp_path: Path) -> None:
    corpus = load_corpus(small(validation_every=4), library(tmp_path))
    # By path: pkg0 holds a c e g, pkg1 holds b d f h; the fourth and the eighth are held out.
    letters = [bytes(part.tolist()).decode() for part in (corpus.train, corpus.validation)]
    assert letters == ["".join(c * 400 for c in "acebdf"), "g" * 400 + "h" * 400]
    assert corpus.num_files == 8


def test_hash_is_that_of_names_and_bytes(tmp_path: Path) -> None:
    config = small(validation_every=4)
    first = load_corpus(config, library(tmp_path / "one")).sha256
    names = ["pkg0/m0", "pkg0/m2", "pkg0/m4", "pkg0/m6", "pkg1/m1", "pkg1/m3", "pkg1/m5", "pkg1/m7"]
    told = "".join(f"{name}.py\x00400\x00{letter * 400}" for name, letter in zip(names, "acegbdfh"))
    assert first == hashlib.sha256(told.encode()).hexdigest()
    moved = library(tmp_path / "two")
    assert load_corpus(config, moved).sha256 == first
    (moved / "pkg0" / "m0.py").write_text("a" * 399 + "b")
    assert load_corpus(config, moved).sha256 != first
    (moved / "pkg0" / "m0.py").write_text("a" * 400)
    (moved / "pkg0" / "m0.py").rename(moved / "pkg0" / "m1.py")
    assert load_corpus(config, moved).sha256 != first


def test_size_is_bounded(tmp_path: Path) -> None:
    corpus = load_corpus(small(validation_every=2, max_corpus_bytes=2100), library(tmp_path))
    assert len(corpus.train) + len(corpus.validation) == 2000


def test_too_little_text_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"corpus: 0 training bytes in 0 \*\.py files under .*need more than"
    ):
        load_corpus(small(), tmp_path)
    with pytest.raises(ValueError, match="corpus: 0 held-out bytes in 8"):
        load_corpus(small(validation_every=9), library(tmp_path))


def test_standard_library_is_there_and_read_alike() -> None:
    first, second = load_corpus(small()), load_corpus(small())
    assert first.sha256 == second.sha256
    assert torch.equal(first.train, second.train)
    assert b"import" in bytes(first.train.tolist())


def test_batch_is_a_function_of_seed_and_step() -> None:
    config = small()
    corpus = load_corpus(config)
    inputs, targets = training_batch(corpus, config, step=5)
    assert inputs.shape == targets.shape == (config.global_batch, config.sequence_length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, training_batch(corpus, config, step=5)[0])
    assert not torch.equal(inputs, training_batch(corpus, config, step=6)[0])
    assert not torch.equal(inputs, training_batch(corpus, small(seed=1), step=5)[0])


def test_evaluation_covers_the_held_out_text_from_end_to_end(tmp_path: Path) -> None:
    config = small(validation_every=4, eval_sequences=9)
    batches = validation_batches(load_corpus(config, library(tmp_path)), config)
    assert [len(inputs) for inputs, _ in batches] == [8, 8]  # whole global batches
    assert batches[0][0][0].eq(ord("g")).all()
    assert batches[-1][1][-1].eq(ord("h")).all()
