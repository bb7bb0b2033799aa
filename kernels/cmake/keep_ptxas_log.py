"""Compiler launcher: runs nvcc and keeps what it says in a file of the build folder.

keep_ptxas_log.py LOG_FOLDER nvcc ARGUMENTS...
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(folder: Path, command: list[str]) -> int:
    (source,) = (Path(argument) for argument in command if argument.endswith(".cu"))
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{source.stem}.log").write_text(run.stdout)
    if run.returncode:
        sys.stdout.write(run.stdout)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
