"""README's table and docs/benchmarks.png from results/*.json, and from nothing else.

    python python/benchmarks/report.py           rewrites both
    python python/benchmarks/report.py --check   exits 1 when either is not what it would write

The newest result of each device and number of ranks counts; those of `mega-moe bench step` lie in results/steps, and
the newest of each model, device and number of ranks counts. A row is stale when a kernel that it launches has changed
since it was measured: see staleness.py. Needs the standard library alone, for Python 3.10 tomli too, and matplotlib to
draw.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NONE_YET = (
    "No figures yet: `python/benchmarks/run.py` measures them on a GPU, `mega-moe bench` on your own machine."
)
PLOT = Path("docs/benchmarks.png")
PUBLISHED_ON = (8, "NVIDIA H200")
PUBLISHED = (
    "Published by the reference system for the same machine, tokens per rank not stated: 30B forward 12.0 -> 3.9 ms, "
    "235B backward 30.5 -> 24.6 ms (its trainer's own layer -> its fused one)."
)


def load(path: Path) -> ModuleType:
    """A module by its file: the package's own import would need torch."""
    spec = importlib.util.spec_from_file_location(f"report_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: wanted a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


schema = load(ROOT / "python/mega_moe/bench/schema.py")
staleness = load(ROOT / "python/benchmarks/staleness.py")


def newest(folder: Path) -> list:
    """The newest result of each device and number of ranks, by device; every file must be readable."""
    latest: dict[tuple[str, int], Any] = {}
    for path in sorted(folder.glob("*.json")):
        result = schema.read(path)
        key = (result.environment.device, result.environment.num_ranks)
        if key not in latest or latest[key].environment.date < result.environment.date:
            latest[key] = result
    return [latest[key] for key in sorted(latest)]


def newest_steps(folder: Path) -> list:
    """The newest step result of each device, number of ranks and model; every file must be readable."""
    latest: dict[tuple[str, int, str], Any] = {}
    for path in sorted(folder.glob("*.json")):
        result = schema.read_steps(path)
        for model in sorted({row.model for row in result.rows}):
            key = (result.environment.device, result.environment.num_ranks, model)
            if key not in latest or latest[key].environment.date < result.environment.date:
                latest[key] = result
    found: list = []
    for key in sorted(latest):
        if latest[key] not in found:
            found.append(latest[key])
    return found


def report(results: list, kernels: Any, steps: Sequence = ()) -> str:
    """What stands between the markers."""
    if not results and not steps:
        return NONE_YET
    sections = [section(result, kernels) for result in results]
    sections += [step_section(result, kernels) for result in steps]
    if not results:
        return "\n\n".join(sections)
    return "\n\n".join([f"![TF/s of the layer by backend]({PLOT.as_posix()})", *sections])


def section(result, kernels) -> str:
    """One result: where and with what, its table, what was refused."""
    where = result.environment
    ranks = "" if where.num_ranks == 1 else f" x {where.num_ranks}"
    head = (
        f"**{where.device}{ranks}**, {where.date[:10]}, torch {where.torch}, driver {where.driver or 'unknown'}, "
        f"kernels {short(where.kernels_sha256)}, wheel {short(where.wheel_sha256)}. "
        "Two numbers are burst / sustained: 10 ms after a pause / at least 0.3 s back to back."
    )
    rows, changed = table(result, kernels)
    lines = [head, "", *rows]
    if changed:
        lines += ["", staleness.footnote(changed, kernels)]
    missing = absent(result)
    if (where.num_ranks, where.device) == PUBLISHED_ON:
        lines += ["", PUBLISHED]
    if missing:
        # An empty line ends the table, which would swallow the list as further rows.
        lines += ["", *missing]
    return "\n".join(lines)


def step_section(result, kernels) -> str:
    """One run of `mega-moe bench step`: where, its table, what was refused."""
    where = result.environment
    ranks = "" if where.num_ranks == 1 else f" x {where.num_ranks}"
    shown = result.rows[0]
    head = (
        f"**Training step, {where.device}{ranks}**, {where.date[:10]}, torch {where.torch}, kernels "
        f"{short(where.kernels_sha256)}, wheel {short(where.wheel_sha256)}. {shown.model}: {shown.layers} of "
        f"{shown.model_layers} layers, sequence {shown.sequence} a GPU, EP {shown.ep_size}, full activation "
        "checkpointing, FSDP2, AdamW; mean of the steps after the first ones."
    )
    lines = [
        head,
        "",
        "| backend | precision | step s | tokens/s per GPU | MFU | MoE s | MoE forwards | peak GiB | load max/mean |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    changed: list[str] = []
    for row in result.rows:
        if row.status == "measured":
            old = staleness.changed(row, where, kernels)
            changed += old
            columns = [
                f"{row.backend} (stale)" if old else row.backend,
                row.precision,
                f"{row.seconds:.3f}",
                f"{row.tokens_per_s:.0f}",
                "-" if row.mfu is None else f"{row.mfu:.1%}",
                f"{row.moe_seconds:.3f}",
                str(row.moe_forwards),
                "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
                f"{row.load_max_over_mean:.2f}",
            ]
            lines.append(f"| {' | '.join(columns)} |")
    if changed:
        lines += ["", staleness.footnote(changed, kernels)]
    missing = [
        f"- {row.status}: {row.backend}: {'; '.join(row.reasons)}"
        for row in result.rows
        if row.status != "measured"
    ]
    return "\n".join([*lines, *([""] if missing else []), *missing])


def file_name(environment) -> str:
    """<device>-<date>.json, with -xN after the device of a run on N ranks."""
    device = re.sub(r"[^a-z0-9]+", "-", environment.device.lower()).strip("-")
    ranks = "" if environment.num_ranks == 1 else f"-x{environment.num_ranks}"
    return f"{device}{ranks}-{environment.date[:10]}.json"


def short(sha256: str | None) -> str:
    return "unknown" if sha256 is None else f"`{sha256[:12]}`"


def table(result, kernels) -> tuple[list[str], list[str]]:
    """One line per thing measured, its protocols side by side, and what has changed since for the stale ones."""
    groups: dict[tuple[str, ...], list] = {}
    for row in result.rows:
        if row.outcome.status == "measured":
            groups.setdefault(subject(row), []).append(row)
    lines = [
        "| what | backend | direction | ms | rate | of ceiling | MHz | dW | reserved SMs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    changed: list[str] = []
    for (what, backend, direction, unit, dw, reserved), rows in groups.items():
        rows.sort(key=lambda row: row.outcome.timing.protocol)
        columns = [
            " / ".join(number(row.outcome.timing.seconds * 1e3) for row in rows) + alone(rows),
            " / ".join(number(rate(row)) for row in rows) + f" {unit}",
            " / ".join(percent(row) for row in rows),
            " / ".join(mhz(row) for row in rows),
        ]
        old = staleness.changed(rows[0], result.environment, kernels)
        changed += old
        name = f"{what} (stale)" if old else what
        lines.append(f"| {' | '.join([name, backend, direction, *columns, dw, reserved])} |")
    return lines, changed


def subject(row) -> tuple[str, ...]:
    """What the protocols of one line have in common: what, backend, direction, unit, dW, reserved SMs."""
    if row.kind == "ceiling":
        return (f"{row.name}: {row.what}", "-", "-", row.unit, "-", "-")
    if row.kind == "stage":
        return (f"staging {row.form}, T {row.tokens}, H {row.hidden}", "-", "-", "GB/s", "-", "-")
    if row.kind == "peer":
        what = f"{row.shape}, T {row.tokens}, {row.precision}"
        return (what, row.peer, row.direction, "TF/s", "-", "-")
    reserved = "n/a" if row.reserved_sms is None else str(row.reserved_sms)
    skew = "" if row.skew is None else f", {row.skew:g}x to rank 0"
    copies = "" if row.weight_copies is None else f", weight copies {row.weight_copies}"
    what = f"{row.shape}, T {row.tokens}, {row.numerics}{copies}{skew}"
    return (what, row.backend, row.direction.replace("_", "+"), "TF/s", row.dw_dtype or "-", reserved)


def number(value: float) -> str:
    """Three digits, never an exponent for a large number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def alone(rows: list) -> str:
    """Names the protocol where a line has one only."""
    return "" if len(rows) > 1 else f" ({rows[0].outcome.timing.protocol})"


def rate(row) -> float:
    return getattr(
        row, {"ceiling": "rate", "stage": "gb_per_s", "layer": "tflops", "peer": "tflops"}[row.kind]
    )


def percent(row) -> str:
    value = None if row.kind in {"ceiling", "peer"} else row.percent_of_ceiling
    return "-" if value is None else f"{value:.0f} %"


def mhz(row) -> str:
    return "-" if row.outcome.timing.mhz is None else f"{row.outcome.timing.mhz:.0f}"


def absent(result) -> list[str]:
    """What has no figure, as list items: the rows of one backend with the same reasons share one."""
    groups: dict[tuple, list[str]] = {}
    for row in result.rows:
        if row.outcome.status == "measured":
            continue
        backend, what = "", subject(row)[0]
        if row.kind == "layer":
            backend = f"{row.backend}: "
            what = f"{row.shape} {row.numerics}" + ("" if row.direction == "all" else f" {row.direction}")
            what += "" if row.skew is None else f", {row.skew:g}x to rank 0"
        elif row.kind == "peer":
            backend = f"{row.peer}: "
        groups.setdefault((row.outcome.status, backend, row.outcome.reasons), []).append(what)
    return [
        f"- {status}: {backend}{', '.join(dict.fromkeys(rows))}: {'; '.join(reasons)}"
        for (status, backend, reasons), rows in groups.items()
    ]


def with_report(readme: str, text: str) -> str:
    """The README with the text between its markers. Raises ValueError unless each marker is there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md: wanted {BEGIN} and {END} once each, in this order")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def plot_stamp(results: list) -> str:
    """What ties a plot to the results that it shows: kept inside the PNG, whose bytes differ between libraries."""
    return (
        "results " + hashlib.sha256("".join(schema.dumps(result) for result in results).encode()).hexdigest()
    )


def stamp_of(png: Path) -> str | None:
    """The Description of a PNG file; None without one."""
    data, position = png.read_bytes(), 8
    while position + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        if kind == b"tEXt" and body.startswith(b"Description\0"):
            return body.split(b"\0", 1)[1].decode("latin-1")
        position += 12 + length
    return None


def faults(root: Path, results: list, kernels: Any, steps: Sequence = ()) -> list[str]:
    """What `--check` refuses: a README or a plot that does not come from the results."""
    found = []
    readme = (root / "README.md").read_text(encoding="utf-8")
    if with_report(readme, report(results, kernels, steps)) != readme:
        found.append("README.md: the benchmark table is not what results/ and kernels/ give")
    plot = root / PLOT
    if results and not plot.is_file():
        found.append(f"{PLOT}: missing, though there are results")
    elif results and stamp_of(plot) != plot_stamp(results):
        found.append(f"{PLOT}: drawn from other results")
    elif not results and plot.is_file():
        found.append(f"{PLOT}: no result stands behind it")
    return found


def write(root: Path, results: list, kernels: Any, steps: Sequence = ()) -> None:
    readme, plot = root / "README.md", root / PLOT
    readme.write_text(
        with_report(readme.read_text(encoding="utf-8"), report(results, kernels, steps)),
        encoding="utf-8",
    )
    if results:
        plot.parent.mkdir(exist_ok=True)
        load(Path(__file__).with_name("plot.py")).draw(results, plot, plot_stamp(results))
    else:
        plot.unlink(missing_ok=True)


def main(argv: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description="Write README's benchmark table and the plot from results/*.json."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when something would change"
    )
    words = parser.parse_args(argv)
    results = newest(root / "python/benchmarks/results")
    steps = newest_steps(root / "python/benchmarks/results/steps")
    kernels = staleness.Kernels.of(root / "kernels")
    if not words.check:
        write(root, results, kernels, steps)
        return 0
    found = faults(root, results, kernels, steps)
    for fault in found:
        print(f"{fault}; run: python python/benchmarks/report.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
