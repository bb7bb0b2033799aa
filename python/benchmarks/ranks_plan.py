"""What the run over several GPUs does, in which order, how long each part is expected to take, and what is left out.

Importance 1 is what the run is for. Where the time is short, the highest number is dropped first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from report import ROOT, load

shapes = load(ROOT / "python/mega_moe/bench/shapes.py")

MODELS = ("30B", "235B")
TOKENS = (16384, 8192)
SKEWS = (2.0, 4.0, 7.0)
RESERVED_SMS = 16  # as `mega-moe bench` does, whose module for layers needs torch
TEST_SCRIPTS = ("route_ranks.py", "fused_ranks.py", "late_ranks.py")
BASELINE, FP8_PEER = "baseline_grouped.py", "peer_deep_gemm_fp8.py"

# Rough rates on one H200 in TF/s, for the estimates alone: backend -> forward, backward.
_RATES = {"fused": (450, 300), "deep_gemm": (200, 200), "grouped": (120, 170), "reference": (25, 30)}
_START_S = 14.0  # N processes import torch, join a group and load kernels
_CEILINGS_S = 20.0
_CASE_S = 1.5  # inputs, a buffer, its check against the reference


@dataclass(frozen=True)
class Case:
    """One layer under the clock: what `measure_layer` takes, one backend at a time."""

    shape: str
    tokens: int
    precision: str
    backend: str
    directions: tuple[str, ...]
    skew: float | None
    importance: int
    dw_precision: str = "bf16"
    reserved_sms: int = 0
    """Left to other work, where a backend can leave some."""

    @property
    def quick(self) -> bool:
        """Fewer windows for all but what the run is for."""
        return self.importance > 1

    @property
    def name(self) -> str:
        skew = "" if self.skew is None else f", {self.skew:g}x to rank 0"
        ways = "+".join(self.directions)
        dw = "" if self.dw_precision == "bf16" else f" with dW {self.dw_precision}"
        reserved = f", {self.reserved_sms} SMs reserved" if self.reserved_sms else ""
        return f"{self.shape} T={self.tokens} {self.precision}{dw}{skew}{reserved}: {self.backend} {ways}"

    def seconds(self) -> float:
        """Expected, on H200s."""
        shape = shapes.find_shape(self.shape)
        units = self.tokens * shape.top_k * shape.hidden * shape.intermediate * (self.skew or 1.0)
        forward, backward = _RATES[self.backend]
        times = {"forward": 6e-12 * units / forward, "backward": 16e-12 * units / backward}
        times["forward_backward"] = sum(times.values())
        total = _CASE_S
        for direction in self.directions:
            total += row_seconds(times[direction], quick=self.quick)
        return total


def row_seconds(call_s: float, *, quick: bool) -> float:
    """Both protocols of one row."""
    burst = (3 if quick else 9) * (0.25 + max(0.01, call_s))
    return burst + 4 * max(0.33, call_s) + 6 * call_s + 0.4


@dataclass(frozen=True)
class Part:
    """One program, or with `cases` the measuring one. `skipped`: why it is not run on this machine."""

    name: str
    importance: int
    seconds: float
    limit_s: float
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True)
class Setting:
    """The machine and the words of the command line."""

    num_ranks: int
    device: str
    wheel: Path | None
    peers: Path | None
    tiny: bool
    quick: bool
    folder: Path
    """Of what the parts leave for one another."""


def torchrun(setting: Setting, *words: str) -> tuple[str, ...]:
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.num_ranks}")
    return (sys.executable, *launch, *words)


def plan(setting: Setting) -> list[Part]:
    """All parts in the order of the run."""
    return [
        *test_parts(setting),
        rows_part(setting, cases(setting)),
        *peer_parts(setting),
        demo_part(setting),
        *step_parts(setting),
    ]


def test_parts(setting: Setting) -> list[Part]:
    """The multi-process tests of the wheel; without two GPUs their scripts, as far as they run there."""
    if setting.device == "cpu":
        # The kernels need a GPU; what is written against the public API alone does not.
        scripts: Sequence[str] = ("late_ranks.py",)
        return [_script(setting, name, "cpu") for name in scripts]
    if setting.num_ranks == 1:
        return [_script(setting, name) for name in TEST_SCRIPTS]
    files = sorted((ROOT / "python/tests/gpu").glob("test_*_multi_gpu.py"))
    all_of_them = setting.num_ranks
    names = [str(path.relative_to(ROOT)) for path in files]
    parts = [_suite(path.stem, all_of_them, 1, name) for path, name in zip(files, names)]
    others = ("python/tests/gpu", "--ignore-glob=*_multi_gpu.py")
    parts.append(_suite("other files", all_of_them, 2, *others))
    if setting.num_ranks == 8:
        parts += [_suite(path.stem, 4, 4, name) for path, name in zip(files, names)]
    return parts


def _script(setting: Setting, name: str, *words: str) -> Part:
    command = torchrun(setting, f"python/tests/gpu/{name}", *words)
    return Part(f"tests: {name}", 1, 20, 90, command)


def _suite(name: str, num_ranks: int, importance: int, *words: str) -> Part:
    # As ci/test_wheel.sh, which would unpack the wheel anew for each part: it is unpacked once for all of them.
    suite = (sys.executable, "-m", "pytest", "-m", "multi_gpu", "-q", "-p", "no:cacheprovider")
    # The tests take as many GPUs as they see.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = seen.split(",")[:num_ranks] if seen else map(str, range(num_ranks))
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "MEGA_MOE_REQUIRE_INSTALLED": "1",
        "MEGA_MOE_REQUIRE_GPU": "1",
    }
    return Part(f"tests: {name}, EP {num_ranks}", importance, 28, 100, (*suite, *words), env)


def rows_part(setting: Setting, chosen: Iterable[Case]) -> Part:
    chosen = tuple(chosen)
    seconds = _START_S + _CEILINGS_S + sum(case.seconds() for case in chosen)
    return Part("ceilings and layers", 1, seconds, 3 * seconds + 60, cases=chosen)


def cases(setting: Setting) -> list[Case]:
    """Every layer: the even ones by importance, then the uneven ones."""
    if setting.tiny:
        return _tiny_cases(setting)
    ways, both = ("forward", "backward"), ("forward_backward",)
    found = []
    # More than two GPUs have more to tell than that fewer tokens fill them less.
    for tokens, later in zip(TOKENS, (0, 2 if setting.num_ranks <= 2 else 4)):
        for model in MODELS:
            found += [
                Case(model, tokens, "bf16", "fused", ways, None, 1 + later),
                Case(model, tokens, "bf16", "grouped", ways, None, 2 + later),
                Case(model, tokens, "fp8", "fused", ways, None, 2 + later),
                Case(model, tokens, "fp8_bwd", "fused", ("backward",), None, 2 + later),
                Case(model, tokens, "fp8", "fused", ("backward",), None, 3 + later, dw_precision="fp8"),
                Case(model, tokens, "bf16", "deep_gemm", ways, None, 4 + later // 2),
            ]
    found += [
        Case(model, TOKENS[0], "bf16", "fused", ways, None, 6, reserved_sms=RESERVED_SMS) for model in MODELS
    ]
    found += [Case(model, TOKENS[0], "bf16", "fused", both, None, 7) for model in MODELS]
    found += [Case(model, TOKENS[0], "bf16", "reference", ways, None, 8) for model in MODELS]
    uneven = []
    for skew in SKEWS:
        # Two ranks know only the worst case of it, in which one of them has all rows.
        if 2 < setting.num_ranks >= skew:
            for model in MODELS:
                uneven.append(Case(model, TOKENS[0], "bf16", "fused", ways, skew, 3))
                uneven.append(Case(model, TOKENS[0], "fp8", "fused", ways, skew, 4))
                uneven.append(Case(model, TOKENS[0], "bf16", "grouped", ways, skew, 5))
    return sorted(found, key=by_importance) + sorted(uneven, key=by_importance)


def by_importance(case: Case) -> int:
    return case.importance


def _tiny_cases(setting: Setting) -> list[Case]:
    ways = ("forward", "backward")
    even = [
        Case("tiny", 256, "bf16", backend, ways, None, importance)
        for importance, backend in enumerate(("fused", "grouped", "reference"), 1)
    ]
    if setting.num_ranks == 1:
        return even
    return [*even, Case("tiny", 256, "bf16", "grouped", ("forward",), float(setting.num_ranks), 4)]


def peer_parts(setting: Setting) -> list[Part]:
    """Other implementations, from a folder that the user gives; their wheels lie there too."""
    parts = []
    for tokens, importance in zip(TOKENS, (2, 5)):
        for script, name, seconds in ((BASELINE, "baseline", 32), (FP8_PEER, "FP8 peer", 21)):
            path = None if setting.peers is None else setting.peers / script
            skipped = None
            if setting.device == "cpu":
                skipped = "needs GPUs"
            elif path is None:
                skipped = "no folder was given, --peers names it"
            elif not path.is_file():
                skipped = f"{path.name} is not in the folder that --peers names"
            command = () if skipped else torchrun(setting, str(path))
            label = f"peer: {name}, T={tokens}"
            env = {"TOK": str(tokens)}
            parts.append(Part(label, importance, seconds, 4 * seconds, command, env, skipped=skipped))
    return parts


def demo_part(setting: Setting) -> Part:
    """The example language model for a fixed number of steps."""
    steps = "6" if setting.tiny else "40"
    words = ["train", "--steps", steps, "--minutes", "0", "--out", str(setting.folder / "demo"), "--json"]
    if setting.device == "cpu":
        words += ["--device", "cpu"]
    return Part("demo", 2, 23, 120, torchrun(setting, "-m", "mega_moe.cli", *words))


def step_parts(setting: Setting) -> list[Part]:
    """Training steps, a program for each backend: one that hangs must not cost the other's row."""
    # As many layers as two GPUs hold for each pair of them; a published number of layers needs more GPUs.
    size = ["--model", "tiny"] if setting.tiny else ["--model", "30B", "--layers", str(4 * setting.num_ranks)]
    parts = []
    for backend in ("fused", "grouped"):
        words = ["bench", "step", *size, "--backend", backend, "--steps", "8", "--skip", "3"]
        words += ["--json", str(setting.folder / f"step-{backend}.json"), "--device", setting.device]
        if setting.wheel is not None:
            words += ["--wheel", str(setting.wheel)]
        command = torchrun(setting, "-m", "mega_moe.cli", *words)
        parts.append(Part(f"step: {backend}", 2, 24, 120, command))
    return parts


def fit(parts: Sequence[Part], budget_s: float) -> tuple[list[Part], list[str]]:
    """The parts that fit into `budget_s`, and the names of what was dropped, the least important first."""
    entries = []
    for place, part in enumerate(parts):
        if part.skipped is None:
            alone = part.seconds - sum(case.seconds() for case in part.cases)
            entries.append((part.importance, place, -1, alone, part.name))
            entries += [
                (case.importance, place, index, case.seconds(), case.name)
                for index, case in enumerate(part.cases)
            ]
    total, dropped = sum(entry[3] for entry in entries), []
    # Within one importance the last goes first.
    for entry in sorted(entries, key=lambda entry: entry[:3], reverse=True):
        if total <= budget_s:
            break
        total -= entry[3]
        dropped.append(entry)
    gone = {entry[1:3] for entry in dropped}
    kept = []
    for place, part in enumerate(parts):
        if (place, -1) in gone:
            continue
        left = tuple(case for index, case in enumerate(part.cases) if (place, index) not in gone)
        if left != part.cases:
            seconds = part.seconds - sum(case.seconds() for case in part.cases if case not in left)
            kept.append(replace(part, seconds=seconds, limit_s=3 * seconds + 60, cases=left))
        else:
            kept.append(part)
    return kept, [entry[4] for entry in dropped]
