"""`mega-moe bench step`: full training steps of models with MoE layers, backend by backend.

Read in this order: `shapes` (models, FLOPs, what fits), `model` (the transformer), `measure` (one backend's steps),
`command` (words, table, plot).
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """The command `mega-moe bench step` with the words after it; returns the exit status."""
    # Imported here: the command line must not pull in what only a run needs.
    from mega_moe.bench.step.command import main as command

    return command(argv)


__all__ = ["main"]
