"""What a person should install or change, from facts alone: the last lines of `mega-moe doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_moe._backends.choice.facts import RankFacts


@dataclass(frozen=True)
class Installation:
    """How the package came here: folders and versions that pip knows, the folder that was imported, wheel.json."""

    distributions: tuple[tuple[str, str], ...]
    package: Path
    record: dict[str, Any]
    missing_extras: tuple[str, ...] = ()
    driver_tool: bool = False  # nvidia-smi is there


def advice(facts: Sequence[RankFacts], installed: Installation) -> list[str]:
    """One line per thing to do, most basic first; empty when nothing is amiss."""
    first = facts[0]
    return [
        *_library(first),
        *_torch(first, installed),
        *_driver(first, installed.record),
        *_architecture(facts, installed.record),
        *_copies(installed),
        *_extras(installed.missing_extras),
    ]


def _library(fact: RankFacts) -> Iterator[str]:
    if fact.library_loaded:
        return
    reason = fact.library_reason or ""
    if "needs torch" in reason:
        yield f"{reason}: pip install --upgrade torch"
    elif "holds no kernels" in reason:
        yield f"{reason}: a wheel, or a build with a CUDA compiler, holds them"
    elif "does not load" in reason:
        yield f"the compiled library is there and cannot be used: {reason}"
    else:
        yield f"the compiled library is missing ({reason}): install the mega-moe wheel"


def _torch(fact: RankFacts, installed: Installation) -> Iterator[str]:
    if fact.torch_cuda is None and (installed.driver_tool or fact.driver_cuda is not None):
        serves = f" that serves CUDA {_dotted(fact.driver_cuda)}" if fact.driver_cuda else ""
        yield (
            f"there is an NVIDIA driver{serves}, but this torch ({fact.torch_version}) is built without CUDA: "
            "install a CUDA build of torch"
        )
    elif fact.torch_cuda is not None and fact.device_type == "cpu" and fact.driver_cuda is None:
        yield (
            f"torch is built with CUDA but sees no GPU and no NVIDIA driver: its CUDA {fact.torch_cuda} needs driver "
            f"{_oldest_driver(fact.torch_cuda, installed.record)} or newer"
        )
    elif fact.torch_cuda is not None and fact.device_type == "cpu":
        yield "torch is built with CUDA but sees no GPU: check the driver and CUDA_VISIBLE_DEVICES"


def _driver(fact: RankFacts, record: dict[str, Any]) -> Iterator[str]:
    """A binary of CUDA n runs on drivers of CUDA n and later, whatever the minor version."""
    if fact.driver_cuda is None:
        return
    for what, cuda in (("torch", fact.torch_cuda), ("this mega-moe wheel", fact.library_cuda)):
        if cuda is None or fact.driver_cuda[0] >= _major(cuda):
            continue
        instead = "install a torch for CUDA " + str(fact.driver_cuda[0])
        if what != "torch":
            fitting = [f["label"] for f in _flavours(record) if _major(f["cuda"]) <= fact.driver_cuda[0]]
            instead = f"install its +{fitting[-1]} wheel" if fitting else "there is no older wheel"
        yield (
            f"the driver serves CUDA {_dotted(fact.driver_cuda)}, {what} is built with CUDA {cuda}: update the driver "
            f"to {_oldest_driver(cuda, record)} or newer, or {instead}"
        )


def _architecture(facts: Sequence[RankFacts], record: dict[str, Any]) -> Iterator[str]:
    for fact in facts:
        if fact.compute_capability is None or not fact.library_loaded:
            continue
        device = "{}{}".format(*fact.compute_capability)
        if _serves(fact.library_architectures, device):
            continue
        holds = ", ".join(f"sm_{name}" for name in fact.library_architectures) or "none"
        others = [f["label"] for f in _flavours(record) if _serves(f["architectures"], device)]
        if others:
            do = f"install the +{others[-1]} wheel"
        else:
            do = "no wheel of this version holds any; backend='grouped' serves it, a newer version may hold some"
        yield f"{fact.device} is sm_{device} ({fact.device_name}), this wheel holds kernels for {holds}: {do}"


def _copies(installed: Installation) -> Iterator[str]:
    if len(installed.distributions) > 1:
        listed = ", ".join(f"{version} in {place}" for place, version in installed.distributions)
        yield (
            f"mega-moe is installed {len(installed.distributions)} times: uninstall until one is left ({listed})"
        )
    places = {Path(place).resolve() for place, _ in installed.distributions}
    if places and installed.package.parent.resolve() not in places:
        here = installed.package.parent
        yield f"the imported package in {here} hides the installed one: leave that folder or PYTHONPATH"


def _extras(missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"`mega-moe train` needs {' and '.join(missing)}: pip install 'mega-moe[demo]'"


def _flavours(record: dict[str, Any]) -> list[dict[str, Any]]:
    return list(record.get("flavours", ()))


def _serves(architectures: Sequence[str], device: str) -> bool:
    return any(name.rstrip("af") == device for name in architectures)


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def _oldest_driver(cuda: str, record: dict[str, Any]) -> int | str:
    known = {_major(f["cuda"]): int(f["driver"]) for f in _flavours(record)}
    return known.get(_major(cuda), f"one for CUDA {cuda}")


def _dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
