"""The demonstration job `mega-moe train`: a small mixture-of-experts language model on text that every machine has.

Read in this order: `config` (all numbers), `model` (plain PyTorch plus one `MegaMoE` module per layer), `corpus`
(text), `streams` (random numbers), `parallel` (experts over ranks, the rest with FSDP2, one gradient norm over both),
`checkpoint`, `trainer` (one step), `train` (the loop), `report` (what a run leaves), `command` (the command line).
`follow` asks whether a backend trains as the reference does; `convergence` compares where several precisions end.
"""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """The command `mega-moe train` with the words after it; returns the exit status."""
    # Imported here: reading this package must not pull in what only a run needs.
    from mega_moe.demo.command import main as command

    return command(argv)


__all__ = ["main"]
