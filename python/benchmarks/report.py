"""README's table, docs/benchmarks.md and docs/benchmarks.png from results/*.json, and from nothing else.

    python python/benchmarks/report.py           rewrites all three
    python python/benchmarks/report.py --check   exits 1 when one is not what it would write

README gets the chart and a short table, docs/benchmarks.md a line for each layer, training steps and every row. The
newest result of each device and number of ranks counts, and docs/benchmarks.md has what lies in results/more behind
them; those of `mega-moe bench step` lie in results/steps, and the newest of each model, device and number of ranks
counts. A row is stale when a kernel that it
launches has changed since it was measured: see staleness.py. Needs a wheel of the present kernels, in dist/ or
installed, and the standard library alone, for Python 3.10 tomli too, and matplotlib to draw.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import struct
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compact_table
import full_table
import staleness
import step_table
import summary

del sys.path[0]

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
README, FULL, PLOT = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/benchmarks.png")
NONE_YET = (
    "No figures yet: `python/benchmarks/run.py` measures them on a GPU, `mega-moe bench` on your own machine."
)
INTRODUCTION = (
    "Latency per layer call (ms), `fused` unless noted, T tokens per GPU, burst / sustained: right after a pause / "
    "back to back."
)
LEGEND = (
    "Of ceiling: the time that the layer's GEMMs take at this machine's rate for one large GEMM, over the time of the "
    "call. Vs: speed-up over the other one, where `grouped` is torch grouped GEMM + all-to-all. Both are of one run, "
    "and of forward and backward together unless noted."
)
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
        result = schema.read(path, schema.StepResult)
        for model in sorted({row.model for row in result.rows}):
            key = (result.environment.device, result.environment.num_ranks, model)
            if key not in latest or latest[key].environment.date < result.environment.date:
                latest[key] = result
    found: list = []
    for key in sorted(latest):
        if latest[key] not in found:
            found.append(latest[key])
    return found


def report(results: list, kernels: Any) -> str:
    """What stands between README's markers."""
    table = summary.section(results, kernels)
    if table is None:
        return NONE_YET
    caption, rest = table.split("\n\n", 1)
    return f"![Latency per layer call]({PLOT})\n\n{wrapped(caption)}\n\n{rest}"


def layer_report(results: list, kernels: Any) -> list[str]:
    """A line for each layer, alongside what else was measured."""
    tables = [
        table + published(result, "\n\n")
        for result in results
        if (table := compact_table.section(result, kernels)) is not None
    ]
    legend = wrapped(f"{LEGEND} {shapes(results)}")
    return ["### By layer", wrapped(INTRODUCTION), *tables, legend] if tables else []


def full_report(results: list, kernels: Any, steps: Sequence = (), more: Sequence = ()) -> str:
    """What stands between the markers of docs/benchmarks.md. ``more``: results that tell what the newest leave out."""
    sections = layer_report(results, kernels)
    if steps:
        sections += ["### Training steps", *(step_table.section(result, kernels) for result in steps)]
    sections += [full_table.section(result, kernels) for result in results]
    sections += [full_table.section(result, kernels, ", a run of its own") for result in more]
    if any(summary.panels(results)):
        sections.insert(0, f"![Latency per layer call]({PLOT.name})")
    return "\n\n".join(sections) or NONE_YET


def published(result: Any, before: str) -> str:
    where = result.environment
    return before + wrapped(PUBLISHED) if (where.num_ranks, where.device) == PUBLISHED_ON else ""


def shapes(results: list) -> str:
    """The sizes behind the names of the shapes, a sentence each."""
    sizes = {
        row.shape: f"{row.shape}: hidden {row.hidden}, intermediate {row.intermediate}, top {row.top_k} of "
        f"{row.num_experts} experts."
        for result in results
        for row in result.rows
        if row.kind == "layer" and row.outcome.status == "measured"
    }
    return " ".join(sizes.values())


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def file_name(environment) -> str:
    """<device>-<date>.json, with -xN after the device of a run on N ranks."""
    device = re.sub(r"[^a-z0-9]+", "-", environment.device.lower()).strip("-")
    ranks = "" if environment.num_ranks == 1 else f"-x{environment.num_ranks}"
    return f"{device}{ranks}-{environment.date[:10]}.json"


def with_report(document: str, text: str, name: Path) -> str:
    """The document with the text between its markers. Raises ValueError unless each is there once, in order."""
    begins, ends = document.count(BEGIN), document.count(END)
    if begins != 1 or ends != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(
            f"{name}: got {begins} of {BEGIN} and {ends} of {END}, wanted one each, in this order"
        )
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def documents(
    root: Path, results: list, kernels: Any, steps: Sequence = (), more: Sequence = ()
) -> dict[Path, tuple[str, str]]:
    """What lies in each document and what should lie there."""
    texts = {README: report(results, kernels), FULL: full_report(results, kernels, steps, more)}
    found = {name: (root / name).read_text(encoding="utf-8") for name in texts}
    return {name: (found[name], with_report(found[name], text, name)) for name, text in texts.items()}


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


def faults(root: Path, results: list, kernels: Any, steps: Sequence = (), more: Sequence = ()) -> list[str]:
    """What `--check` refuses: a document or a plot that does not come from the results."""
    found = [
        f"{name}: the benchmark table is not what results/ and kernels/ give"
        for name, (present, wanted) in documents(root, results, kernels, steps, more).items()
        if present != wanted
    ]
    plot, wanted = root / PLOT, any(summary.panels(results))
    if wanted and not plot.is_file():
        found.append(f"{PLOT}: missing, though there are results")
    elif wanted and stamp_of(plot) != plot_stamp(results):
        found.append(f"{PLOT}: drawn from other results")
    elif not wanted and plot.is_file():
        found.append(f"{PLOT}: no result stands behind it")
    return found


def write(root: Path, results: list, kernels: Any, steps: Sequence = (), more: Sequence = ()) -> None:
    for name, (_, wanted) in documents(root, results, kernels, steps, more).items():
        (root / name).write_text(wanted, encoding="utf-8")
    plot = root / PLOT
    if any(summary.panels(results)):
        load(Path(__file__).with_name("plot.py")).draw(results, plot, plot_stamp(results))
    else:
        plot.unlink(missing_ok=True)


def main(argv: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description="Write README's benchmark table, docs/benchmarks.md and the plot from results/*.json."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when something would change"
    )
    words = parser.parse_args(argv)
    results = newest(root / "python/benchmarks/results")
    steps = newest_steps(root / "python/benchmarks/results/steps")
    more = [schema.read(path) for path in sorted((root / "python/benchmarks/results/more").glob("*.json"))]
    try:
        kernels = staleness.Kernels.of(root)
    except (FileNotFoundError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    if not words.check:
        write(root, results, kernels, steps, more)
        return 0
    found = faults(root, results, kernels, steps, more)
    for fault in found:
        print(f"{fault}; run: python python/benchmarks/report.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
