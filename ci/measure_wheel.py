"""Measures what a wheel costs before it computes: size, import, loading of the library, first call.

    python ci/measure_wheel.py WHEEL FILE.json [--device cuda]   measure with this Python's torch, write FILE.json
    python ci/measure_wheel.py --write | --check                 a document's table from ci/results/, or compare it

WHEEL is unpacked into a temporary folder, and each figure is the median of fresh processes that import torch first. The
first call is one forward pass of a small layer, with the buffer built and, on a GPU, torch's own context made.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import document_tables

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 5

PROBE = """
import json, sys, time
import torch
device = sys.argv[1]
def timed(what):
    start = time.perf_counter()
    value = what()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), value
if device == "cuda":
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
import warnings
start = time.perf_counter()
import mega_moe
mega_moe.moe  # brings what the import alone leaves for later
imported = 1e3 * (time.perf_counter() - start)
warnings.simplefilter("ignore", mega_moe.FallbackWarning)
from mega_moe._ops import library
loaded, status = timed(library.status)
assert status.loaded, status.reason
from mega_moe.testing import random_problem
problem = random_problem(64, 512, 256, device=device)
buffer = mega_moe.MoEBuffer(None, **problem.sizes)
call = lambda: mega_moe.moe(*problem.inputs, buffer=buffer)
first, _ = timed(call)
second, _ = timed(call)
name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
print(json.dumps(dict(import_ms=imported, load_ms=loaded, first_call_ms=first, second_call_ms=second,
                      backend=buffer.backend, device=name, torch=torch.__version__, version=mega_moe.__version__)))
"""


def measure(wheel: Path, device: str) -> dict[str, Any]:
    """The figures of one wheel on one device; CalledProcessError where the package does not run there."""
    with tempfile.TemporaryDirectory() as site:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site]
        subprocess.run([*pip, str(wheel)], check=True)
        probe, environment = [sys.executable, "-c", PROBE, device], {**os.environ, "PYTHONPATH": site}
        told = [
            json.loads(subprocess.run(probe, env=environment, stdout=subprocess.PIPE, check=True).stdout)
            for _ in range(PROCESSES)
        ]
    medians = {
        key: round(statistics.median(one[key] for one in told), 2) for key in told[0] if key.endswith("_ms")
    }
    content = wheel.read_bytes()
    return {
        **told[0],
        **medians,
        "wheel": wheel.name,
        "wheel_sha256": hashlib.sha256(content).hexdigest(),
        "wheel_bytes": len(content),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def table(root: Path) -> str:
    """The figures of every file in ci/results, as Markdown."""
    head = ["measured on", "torch", "wheel", "size", "import", "library loads", "first call", "second call"]
    rows = []
    for path in sorted((root / "ci/results").glob("wheel-*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        imported, loaded, first, second = (
            f"{one[key]:.3g} ms" for key in ("import_ms", "load_ms", "first_call_ms", "second_call_ms")
        )
        measured, name = f"{one['device']}, {one['date']}", f"{one['version']}, `{one['wheel_sha256'][:12]}`"
        size, first = f"{one['wheel_bytes'] / 1e6:.2f} MB", f"{first} ({one['backend']})"
        rows.append([measured, one["torch"], name, size, imported, loaded, first, second])
    return document_tables.markdown(head, rows)


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_wheel", description="What a wheel costs before it computes."
    )
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--write", action="store_true", help="the table anew, in the document that has a place for it"
    )
    parser.add_argument("--check", action="store_true", help="refuse a document whose table is another")
    given = parser.parse_args(arguments)
    if given.check or given.write:
        found = document_tables.sync(root, "wheel", table(root), given.write)
        print(*found, f"measure_wheel: {len(found)} faults", sep="\n")
        return 1 if found else 0
    if given.wheel is None or given.result is None:
        parser.error("got no WHEEL and FILE.json, and neither --write nor --check")
    found = measure(given.wheel, given.device)
    given.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
