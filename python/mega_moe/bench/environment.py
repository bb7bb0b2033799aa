"""Where a run takes place: device, driver, versions, and the hashes that tie its figures to one wheel and source."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
from pathlib import Path

import torch

import mega_moe
from mega_moe._backends.choice import facts
from mega_moe._ops import library
from mega_moe.bench.ranks import Context
from mega_moe.bench.schema import Environment

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe(context: Context, wheel: Path | None) -> Environment:
    """The environment of this rank. `wheel` is the file that was installed, where the user names it."""
    known = facts.collect(context.device)
    on_gpu = context.device.type == "cuda"
    wheel_sha256, wheel_reason = wheel_hash(wheel)
    return Environment(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=known.device_name if on_gpu else f"CPU {known.device_name}, {torch.get_num_threads()} threads",
        num_sms=known.num_sms,
        num_ranks=context.num_ranks,
        driver=driver_version(_DRIVER_FILE) if on_gpu else None,
        cuda=known.torch_cuda,
        torch=known.torch_version,
        python=known.python_version,
        platform=platform.platform(),
        mega_moe=known.package_version,
        wheel_sha256=wheel_sha256,
        wheel_reason=wheel_reason,
        kernels_sha256=known.kernels_sha256,
        kernels_reason=None
        if known.kernels_sha256
        else (known.library_reason or "build.json holds no kernels_sha256"),
        code=kernel_code(known.compute_capability),
        compiler=library.status().build.get("compiler"),
    )


def kernel_code(capability: tuple[int, int] | None) -> dict[str, str] | None:
    """sha256 of the machine code of each compiled kernel that a device of `capability` runs; None where no library is
    loaded, or its wheel does not say."""
    recorded = library.wheel_record().get("code") if library.status().loaded else None
    if recorded is None:
        return None
    architecture = None if capability is None else "{}{}".format(*capability)
    runs = {v["name"] for v in library.variants() if v["architecture"].rstrip("af") == architecture}
    return {name: digest for name, digest in recorded.items() if name in runs}


def driver_version(path: Path) -> str | None:
    """The NVIDIA driver's version as its kernel module states it; None where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found.group(1) if found else None


def wheel_hash(wheel: Path | None) -> tuple[str | None, str | None]:
    """sha256 of the wheel that the running package came from, or None and why it is not known.

    A named file is hashed; else the installer's record (direct_url.json) is read, which holds the hash when the wheel
    was installed from a file. Raises FileNotFoundError when the named file is missing.
    """
    if wheel is not None:
        return hashlib.sha256(wheel.read_bytes()).hexdigest(), None
    try:
        distribution = importlib.metadata.distribution("mega-moe")
    except importlib.metadata.PackageNotFoundError:
        return None, "mega-moe is not installed, it runs from a source tree"
    running = Path(mega_moe.__file__).resolve()
    if running != Path(str(distribution.locate_file("mega_moe/__init__.py"))).resolve():
        return None, "the running package is not the installed one"
    record = json.loads(distribution.read_text("direct_url.json") or "{}")
    digest = record.get("archive_info", {}).get("hashes", {}).get("sha256")
    if digest:
        return str(digest), None
    return None, "the installer recorded no hash; name the file with --wheel"
