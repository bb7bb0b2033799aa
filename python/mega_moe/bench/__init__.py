"""Benchmarks that a user runs on the installed package: `mega-moe bench`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """The command `mega-moe bench` with the words after it; returns the exit status."""
    # Imported here: reading this package must not pull in what only a run needs.
    from mega_moe.bench.command import main as command

    return command(argv)


__all__ = ["main"]
