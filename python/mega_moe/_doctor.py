"""The command `mega-moe doctor`: what this machine can do, why not more, and what to install.

It answers where torch, or another package that this one needs, is missing or does not load: that is when it is asked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mega_moe
from mega_moe._advice import Installation, advice
from mega_moe._backends.choice.decide import Verdict
from mega_moe._backends.choice.request import Request
from mega_moe._base import env
from mega_moe._ops import library

if TYPE_CHECKING:
    from mega_moe._backends.choice.facts import RankFacts

# The layer that verdicts are given for: that of a 30B model, whose sizes every backend accepts.
_LAYER: dict[str, Any] = {
    "num_experts": 128,
    "top_k": 8,
    "hidden": 2048,
    "intermediate": 768,
    "max_tokens_per_rank": 16384,
}
_NVIDIA_SMI_SECONDS = 30  # a driver in trouble lets it hang
# Processes of one host hand tensors to each other through it: a container's default of 64 MiB is too little for NCCL's
# rings and for the workers of a data loader.
_SHARED_MEMORY = Path("/dev/shm")


def main(argv: list[str]) -> int:
    """Print the examination; 0 when a buffer with backend="auto" can be built on some device, 1 when on none."""
    parser = argparse.ArgumentParser(
        prog="mega-moe doctor",
        description="Versions, library, devices, links, verdict per backend, what to install.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(argv).json
    found = examine()
    print(json.dumps(found, indent=1) if as_json else render(found))
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything that the command tells, as plain values."""
    distributions = _distributions()
    try:
        facts = _facts()
    # OSError: a library of torch's that is not there, or is another machine's.
    except (ImportError, OSError) as error:
        known = _without_torch(error)
    else:
        judgements, wrong = _judge(facts)
        known = {
            "versions": _versions(facts[0]),
            "library": _library(),
            "devices": [_device(fact) for fact in facts],
            "links": _links(facts),
            "judgements": judgements,
            "advice": [*wrong, *advice(facts, _installation(distributions))],
        }
    return {
        "ok": any(judgement["chosen"] for judgement in known["judgements"]),
        **known,
        "layer": _LAYER,
        "shared_memory_bytes": _shared_memory(),
        "distributions": [f"{place} ({version})" for place, version in distributions],
        "package": str(Path(mega_moe.__file__).parent),
        "environment": env.given(),
    }


def render(found: dict[str, Any]) -> str:
    """The examination as text."""
    lines = ["versions"]
    lines += [f"  {name}: {value or 'none'}" for name, value in found["versions"].items()]
    lines += [f"library: {'loaded' if found['library']['loaded'] else 'not loaded'}"]
    lines += [
        f"  {name}: {_plain(value)}" for name, value in found["library"].items() if name != "loaded" and value
    ]
    lines += ["devices"]
    for device in found["devices"]:
        lines += ["  " + ", ".join(f"{name} {_plain(value)}" for name, value in device.items() if value)]
    if found["links"]["peer_access"]:
        lines += ["peer access (row reads column)"]
        shown = {True: "y", False: "n", None: "-"}
        lines += ["  " + " ".join(shown[cell] for cell in row) for row in found["links"]["peer_access"]]
    if found["links"]["topology"]:
        lines += ["links", *("  " + line for line in found["links"]["topology"].splitlines())]
    if found["shared_memory_bytes"] is not None:
        lines += [f"shared memory ({_SHARED_MEMORY}): {found['shared_memory_bytes'] / 2**20:.0f} MiB"]
    layer = ", ".join(f"{name}={value}" for name, value in found["layer"].items())
    for judgement in found["judgements"]:
        lines += [f"backends on {judgement['where']} ({layer}, bf16)"]
        for verdict in judgement["verdicts"]:
            lines += ["  " + str(Verdict(verdict["backend"], tuple(verdict["reasons"]), verdict["note"]))]
        lines += [f"  a buffer gets: {judgement['chosen'] or 'none: ' + judgement['refusal']}"]
    lines += [
        f"installed in: {', '.join(found['distributions']) or 'nowhere'}; imported from: {found['package']}"
    ]
    lines += [f"environment: {name}={value}" for name, value in found["environment"].items()]
    lines += [f"advice: {line}" for line in found["advice"]]
    return "\n".join(lines)


def _facts() -> list[RankFacts]:
    """Of every GPU, else of the CPU."""
    import torch

    from mega_moe._backends.choice.facts import collect

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [collect(f"cuda:{index}", "nccl" if count > 1 else None) for index in range(count)] or [
        collect("cpu")
    ]


def _judge(facts: list[RankFacts]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each kind of device on its own, then all GPUs together as the ranks of one group: the verdicts, and what a buffer
    with backend="auto" would get there under this environment. Then what is wrong with the environment itself."""
    from mega_moe._backends.choice import explanation

    named, strict, wrong = None, False, None
    try:
        named, strict, _ = explanation.wanted("auto"), explanation.wanted_strict(None), env.debug()
    except ValueError as error:
        wrong = str(error)
    cases = [(fact.device, [fact]) for fact in facts]
    if len(facts) > 1 and _LAYER["num_experts"] % len(facts) == 0:
        cases.append((f"all {len(facts)} GPUs as one group", facts))
    judgements: list[dict[str, Any]] = []
    for where, ranks in cases:
        judged = explanation.forecast(Request(**_LAYER, num_ranks=len(ranks)), ranks, named, strict)
        judgement = {
            "verdicts": [verdict.as_dict() for verdict in judged.verdicts],
            "chosen": None if wrong else judged.chosen,
            "refusal": wrong or judged.refusal,
        }
        last = judgements[-1] if judgements else None
        if last is not None and len(ranks) == 1 and {**last, **judgement} == last:
            last["where"] += f", {where}"
        else:
            judgements.append({"where": where, **judgement})
    return judgements, [] if wrong is None else [f"no buffer is built until this is mended: {wrong}"]


def _without_torch(error: ImportError | OSError) -> dict[str, Any]:
    """What can be told where importing torch, or something else that the package needs, ended in ``error``."""
    if isinstance(error, ModuleNotFoundError):
        advised = f"{error.name} is missing: pip install '{_requirement(str(error.name))}'"
    else:
        advised = f"torch cannot be used ({error}): pip install --force-reinstall torch"
    return {
        "versions": {"mega_moe": library.package_version(), "torch": None, **_versions_of_the_machine()},
        "library": {"loaded": False, "reason": str(error), **_record()},
        "devices": [],
        "links": {"peer_access": [], "topology": None},
        "judgements": [],
        "advice": [advised],
    }


def _requirement(module: str) -> str:
    """What this package's metadata asks of ``module``, such as torch>=2.10."""
    try:
        asked = metadata.requires("mega-moe") or []
    except metadata.PackageNotFoundError:
        asked = []
    wanted = [line.partition(";")[0].strip() for line in asked]
    return next((line for line in wanted if re.split(r"[^\w.-]", line)[0] == module), module)


def _versions(fact: RankFacts) -> dict[str, str | None]:
    return {
        "mega_moe": fact.package_version,
        "torch": fact.torch_version,
        "torch_cuda": fact.torch_cuda,
        "driver_cuda": _dotted(fact.driver_cuda),
        **_versions_of_the_machine(),
    }


def _versions_of_the_machine() -> dict[str, str | None]:
    return {
        "driver": _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "python": platform.python_version(),
        "glibc": " ".join(platform.libc_ver()).strip(),
        "platform": platform.platform(),
    }


def _library() -> dict[str, Any]:
    status = library.status()
    return {"loaded": status.loaded, "reason": status.reason, "path": status.path, **_record()}


def _record() -> dict[str, Any]:
    """What the wheel says of itself; of each kernel's code only how many there are."""
    build, record = library.build_record(), library.wheel_record()
    shown = {name: value for name, value in build.items() if name != "code"}
    origin = {name: record.get(name) for name in ("label", "commit")}
    return {**shown, "kernels": len(build.get("code", ())), **origin}


def _shared_memory() -> int | None:
    """Bytes of /dev/shm in all; None where there is none."""
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


def _device(fact: RankFacts) -> dict[str, Any]:
    return {
        "device": fact.device,
        "name": fact.device_name,
        "capability": _dotted(fact.compute_capability),
        "sms": fact.num_sms,
        "memory_bytes": fact.memory_bytes,
        "uuid": fact.device_uuid,
    }


def _links(facts: list[RankFacts]) -> dict[str, Any]:
    """peer_access[i][j]: whether GPU i reads GPU j's memory; None for itself. topology: as nvidia-smi draws it."""
    if len(facts) < 2:
        return {"peer_access": [], "topology": None}
    return {
        "peer_access": [
            [dict(row.peer_access).get(str(column.device_uuid)) for column in facts] for row in facts
        ],
        "topology": _nvidia_smi("topo", "-m"),
    }


def _installation(distributions: list[tuple[str, str]]) -> Installation:
    return Installation(
        distributions=tuple(distributions),
        package=Path(mega_moe.__file__).parent,
        record=library.wheel_record(),
        missing_extras=tuple(
            name for name in ("tqdm", "matplotlib") if importlib.util.find_spec(name) is None
        ),
        driver_tool=shutil.which("nvidia-smi") is not None,
    )


def _distributions() -> list[tuple[str, str]]:
    """Folder and version of every distribution named mega-moe."""
    found = ((str(one.locate_file("")), one.version) for one in metadata.distributions(name="mega-moe"))
    return list(dict.fromkeys(found))


def _nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints, or None where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(
        r"\x1b\[[0-9;]*m", "", done.stdout
    ).strip()  # the topology's heading is underlined for a screen


def _dotted(pair: tuple[int, int] | None) -> str | None:
    return None if pair is None else f"{pair[0]}.{pair[1]}"


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
