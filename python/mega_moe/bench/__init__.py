"""Benchmarks that a user runs on the installed package: `mega-moe bench` and, of full training steps, `bench step`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """The command `mega-moe bench` with the words after it; returns the exit status."""
    # Imported here: reading this package must not pull in what only a run needs.
    if argv[:1] == ["step"]:
        from mega_moe.bench.step.command import main as step

        return step(argv[1:])
    from mega_moe.bench.command import main as command

    return command(argv)


__all__ = ["main"]
