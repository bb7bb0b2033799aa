"""The command `mega-moe`: finds the subcommand's module, imports it only then, and hands it the remaining words."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Subcommand: module with its main, and what it does.
COMMANDS = {
    "doctor": ("mega_moe._doctor", "what this machine can do, why not more, and what to install"),
    "explain": ("mega_moe._explain", "which backend would serve a given layer here, and why not the others"),
    "bench": ("mega_moe.bench", "time every backend beside this machine's ceilings"),
    "train": ("mega_moe.demo", "train a small mixture-of-experts language model on Python's own sources"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the words after it; the exit status is 2 for words that it does not understand."""
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
    module, _ = COMMANDS[arguments.command]
    status: int = importlib.import_module(module).main(arguments.words)
    return status


if __name__ == "__main__":
    sys.exit(main())
