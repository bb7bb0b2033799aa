"""Everything that several GPUs of one host can tell, in one command and a bounded time.

    python3 python/benchmarks/ranks.py --wheel FILE --out FOLDER [--gpus N] [--peers FOLDER] [--budget SECONDS]
    python3 python/benchmarks/ranks.py --dry-run --gpus N          the plan with expected seconds; needs no GPU
    python3 python/benchmarks/ranks.py --device cpu --out FOLDER   a rehearsal with tiny shapes over gloo

In this order, each part with a limit of its own: the multi-process tests of the wheel, ceilings and layers, uneven
routing, other implementations, the demo, training steps. After every part and every row FOLDER holds what is known:
<device>-xN-<date>.json and steps/<device>-xN-<date>.json for report.py, ranks.json (what became of each part), log.txt,
demo/. Exits 1 when a part or a row failed. Also as the program of torchrun, whose other ranks then leave at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks_plan import Setting, fit, plan
from ranks_run import Run
from report import ROOT

# Under eight minutes for two GPUs, under ten for more, with room for the start of a machine's first program.
BUDGET_S = {1: 450.0, 2: 470.0, 4: 560.0, 8: 560.0}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Tests, ceilings, layers, other implementations, demo and training steps over the GPUs of one host."
    )
    add = made.add_argument
    add(
        "--gpus",
        type=int,
        choices=sorted(BUDGET_S),
        metavar="N",
        help="1, 2, 4 or 8 (default: all there are)",
    )
    add("--wheel", type=Path, metavar="FILE", help="to test and measure (default: the only one in dist/)")
    add("--peers", type=Path, metavar="FOLDER", help="scripts of other implementations, and wheels for them")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "python/benchmarks/results",
        help="of the results",
    )
    add("--budget", type=float, metavar="SECONDS", help="of the whole run; drops the least important first")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, tiny shapes, two ranks")
    add("--tiny", action="store_true", help="tiny shapes on GPUs too")
    add("--quick", action="store_true", help="three windows of each protocol")
    add("--dry-run", action="store_true", help="print the plan and leave")
    return made


def main(argv: list[str]) -> int:
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    words = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            setting = _setting(words, Path(folder))
        except ValueError as error:
            print(f"ranks: {error}", file=sys.stderr)
            return 2
        budget = words.budget or BUDGET_S[setting.num_ranks]
        if words.dry_run:
            print(described(setting, budget), end="")
            return 0
        # The part that runs is ended with this program.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return Run(setting, words.out, budget, argv).everything()


def _setting(words: argparse.Namespace, folder: Path) -> Setting:
    on_cpu = words.device == "cpu"
    if words.peers is not None and not words.peers.is_dir():
        raise ValueError(f"peers: got {words.peers}, wanted a folder")
    num_ranks = words.gpus or (2 if on_cpu else _count_gpus())
    if num_ranks not in BUDGET_S:
        raise ValueError(f"gpus: got {num_ranks}, wanted one of {', '.join(map(str, BUDGET_S))}")
    wheel = words.wheel
    if wheel is None and len(found := list((ROOT / "dist").glob("*.whl"))) == 1:
        wheel = found[0]
    if not words.dry_run and not on_cpu and (wheel is None or not wheel.is_file()):
        raise ValueError(f"wheel: got {wheel}, wanted the file of one, or exactly one in dist/")
    return Setting(
        num_ranks=num_ranks,
        device=words.device,
        # A rehearsal runs what is installed: a wheel for GPUs says nothing of the sources that are being written.
        wheel=words.wheel if on_cpu else (wheel.resolve() if wheel else None),
        peers=words.peers.resolve() if words.peers else None,
        tiny=words.tiny or on_cpu,
        quick=words.quick or on_cpu,
        folder=folder,
    )


def _count_gpus() -> int:
    """Asked in a program of its own: this one must not hold a device."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    count = int(done.stdout) if done.returncode == 0 else 0
    if count == 0:
        raise ValueError("gpus: torch sees none; --gpus N with --dry-run, or --device cpu, needs none")
    return max(number for number in BUDGET_S if number <= count)


def described(setting: Setting, budget_s: float) -> str:
    """The plan as text: what runs in order with its expected seconds, what is dropped, what cannot run here."""
    parts = plan(setting)
    kept, dropped = fit(parts, budget_s)
    lines = ["importance  seconds  limit  what"]
    for part in kept:
        if part.skipped is not None:
            lines.append(f"{part.importance:10}        -      -  {part.name}: skipped, {part.skipped}")
            continue
        lines.append(f"{part.importance:10}  {part.seconds:7.0f}  {part.limit_s:5.0f}  {part.name}")
        if part.command:
            shown = " ".join([*(f"{name}={value}" for name, value in part.env.items()), *part.command])
            lines.append(f"{'':27}{shown}")
        lines += [f"{case.importance:10}  {case.seconds():7.0f}         - {case.name}" for case in part.cases]
    total = sum(part.seconds for part in kept if part.skipped is None)
    lines.append(f"expected: {total:.0f} s of {budget_s:.0f} s on {setting.num_ranks} x {setting.device}")
    lines += [f"dropped for time: {name}" for name in dropped]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    started = time.monotonic()
    code = main(sys.argv[1:])
    if "--dry-run" not in sys.argv and int(os.environ.get("RANK", "0")) == 0:
        print(f"ranks: {time.monotonic() - started:.0f} s")
    sys.exit(code)
