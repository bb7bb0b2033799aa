"""What this rank is: versions, device, links, library. Collected for a buffer or a person, never at import."""

from __future__ import annotations

import ctypes
import platform
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mega_moe._backends.deep_gemm import library as deep_gemm_library
from mega_moe._backends.dispatched import packages
from mega_moe._base.types import DISPATCHERS
from mega_moe._ops import library


@dataclass(frozen=True)
class Variant:
    """One compiled kernel of the wheel, as its variants.json lists it."""

    op: str
    architecture: str
    precision: str
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    wgrad: str = "none"  # precision of wgrad, of a backward
    saved: str = "nothing"  # "gate_up": between forward and backward
    trace: bool = False

    def computes(self, op: str, precision: str, wgrad: str = "none") -> bool:
        """Whether it is the kernel of these that calls launch by default."""
        key = (self.op, self.precision, self.wgrad, self.saved, self.trace)
        return key == (op, precision, wgrad, "nothing", False)


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank.

    ``machine`` is equal on ranks of one machine, whatever containers call themselves; ``peer_access`` maps the UUIDs
    of other visible GPUs to what the driver says of them.
    """

    host: str = "localhost"
    machine: str = ""
    device: str = "cpu"
    device_name: str = ""
    device_uuid: str | None = None
    compute_capability: tuple[int, int] | None = None
    num_sms: int | None = None
    memory_bytes: int | None = None
    peer_access: tuple[tuple[str, bool], ...] = ()
    group_backend: str | None = None
    python_version: str = ""
    torch_version: str = ""
    torch_cuda: str | None = None
    driver_cuda: tuple[int, int] | None = None
    package_version: str = ""
    library_loaded: bool = False
    library_reason: str | None = None
    library_cuda: str | None = None
    library_architectures: tuple[str, ...] = ()
    kernels_sha256: str | None = None
    variants: tuple[Variant, ...] = ()
    deep_gemm_version: str | None = None
    deep_gemm_reason: str | None = "deep_gemm is not looked for without a GPU"
    engine_version: str | None = (
        None  # of the package that moves the tokens of the backend dispatched, where one is named
    )
    engine_reason: str | None = "no engine is looked for without a GPU"

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]


def default_device(group_backend: str | None) -> torch.device:
    """The current GPU where there is one and the group can move its tensors, else the CPU."""
    if torch.cuda.is_available() and (group_backend is None or "nccl" in group_backend):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_device(device: torch.device | str) -> torch.device:
    """``device`` as torch.device, ValueError when torch knows no such one; "cpu:0" is "cpu", as tensors say it."""
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: got {device!r}, want a device of torch such as 'cpu' or 'cuda:0'"
        ) from error
    return torch.device("cpu") if known.type == "cpu" else known


def collect(
    device: torch.device | str, group_backend: str | None = None, dispatcher: str = "nccl"
) -> RankFacts:
    """Facts of this process about ``device``; loads the compiled library to see whether it loads.

    Where a package that ``dispatcher`` names can be needed, it imports that, too.
    """
    device = as_device(device)
    status = library.status()
    known: dict[str, Any] = dict(
        host=socket.gethostname(),
        machine=_machine(),
        device=str(device),
        device_name=platform.machine(),  # platform.processor() would start a program
        group_backend=group_backend,
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver_cuda=_driver_cuda(),
        package_version=library.package_version(),
        library_loaded=status.loaded,
        library_reason=status.reason,
        library_cuda=status.build.get("cuda"),
        library_architectures=tuple(status.build.get("architectures", ())),
        kernels_sha256=status.build.get("kernels_sha256"),
        variants=variants() if status.loaded else (),
    )
    if device.type == "cuda":
        known.update(_gpu(device))
        if dispatcher in DISPATCHERS[1:]:
            engine = packages.status(dispatcher)
            known.update(engine_version=engine.version, engine_reason=engine.reason)
    return RankFacts(**known)


def variants() -> tuple[Variant, ...]:
    """The compiled kernels of this wheel, for whatever device."""
    known = {field.name for field in fields(Variant)}
    return tuple(Variant(**{key: v[key] for key in known & v.keys()}) for v in library.variants())


def _gpu(device: torch.device) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ValueError(f"device: got {device}, but this torch ({torch.__version__}) sees no GPU")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: got {device}, want cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    own, deep_gemm = torch.cuda.get_device_properties(index), deep_gemm_library.status()
    others = (i for i in range(torch.cuda.device_count()) if i != index)
    return dict(
        device=f"cuda:{index}",
        device_name=own.name,
        device_uuid=str(own.uuid),
        compute_capability=(own.major, own.minor),
        num_sms=own.multi_processor_count,
        memory_bytes=own.total_memory,
        deep_gemm_version=deep_gemm.version,
        deep_gemm_reason=deep_gemm.reason,
        peer_access=tuple(
            (str(torch.cuda.get_device_properties(i).uuid), torch.cuda.can_device_access_peer(index, i))
            for i in others
        ),
    )


def _machine() -> str:
    # Containers of one machine have their own host names and share the kernel's boot id.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else socket.gethostname()


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver serves; None without a driver."""
    try:
        # The driver's own library: torch tells the version it was built with, not the driver's. Makes no context.
        driver = ctypes.CDLL("libcuda.so.1")  # noqa: TID251 - the one place
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10
