"""The command `mega-moe`: finds the subcommand's module, imports it only then, and hands it the remaining words."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

# Subcommand: module with its main, and what it does.
COMMANDS = {
    "doctor": ("mega_moe._doctor", "what this machine can do, why not more, and what to install"),
    "explain": ("mega_moe._explain", "which backend would serve a given layer here, and why not the others"),
    "bench": (
        "mega_moe.bench",
        "time every backend alongside this machine's ceilings; `bench step`: training steps",
    ),
    "train": ("mega_moe.demo", "train a small mixture-of-experts language model on Python's own sources"),
}
# What a shell sees of a program that the signal SIGPIPE ended: 128 and the signal's number.
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the words after it and return its exit status.

    2: words that it does not understand, or torch is missing; 141: whoever read the output has left, as `head` does.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # at the interpreter's end a closed pipe could not be caught
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return CLOSED_PIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="mega-moe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Mixture-of-experts layers with expert parallelism.",
        epilog="\n".join(f"  {name:9}{text}" for name, (_, text) in COMMANDS.items())
        + "\n\n`mega-moe COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.version:
        import mega_moe

        print(mega_moe.__version__)
        return 0
    if arguments.command is None:
        parser.error("a COMMAND is needed")
    # torch says so once a process; nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    module, _ = COMMANDS[arguments.command]
    try:
        status: int = importlib.import_module(module).main(arguments.words)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            f"mega-moe {arguments.command}: error: torch is missing: see `mega-moe doctor`", file=sys.stderr
        )
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
