"""What a rank says of itself: on this machine, and on machines that it only pretends to be."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_moe import LibraryError
from mega_moe._backends.choice import facts as module
from mega_moe._backends.choice.facts import RankFacts, as_device, collect, default_device
from mega_moe._ops import library


def test_facts_of_the_cpu_are_this_machine() -> None:
    fact = collect("cpu", "gloo")
    assert (fact.device, fact.device_type, fact.group_backend) == ("cpu", "cpu", "gloo")
    assert fact.torch_version == torch.__version__
    assert fact.python_version == platform.python_version()
    assert fact.package_version == library.package_version()
    assert fact.library_loaded == library.status().loaded
    assert (fact.library_reason is None) == fact.library_loaded
    assert fact.compute_capability is fact.device_uuid is fact.num_sms is None
    assert fact.machine
    assert fact.host == platform.node()
    assert bool(fact.variants) == fact.library_loaded


def test_facts_are_equal_from_call_to_call_and_fit_into_json() -> None:
    fact = collect("cpu")
    assert fact == collect(torch.device("cpu"))
    told = json.loads(json.dumps(asdict(fact)))
    assert told.keys() == RankFacts.__dataclass_fields__.keys()


def test_devices() -> None:
    assert as_device("cpu") == as_device("cpu:0") == as_device(torch.device("cpu")) == torch.device("cpu")
    assert collect("cpu:0").device == "cpu"
    assert as_device("cuda:3") == torch.device("cuda", 3)
    with pytest.raises(ValueError, match="device: got 'gpu', want a device of torch"):
        as_device("gpu")
    assert collect("meta").device_type == "meta"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device(None) == default_device("nccl") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device: got cuda:1, but this torch \(.*\) sees no GPU"):
        collect("cuda:1")


def driver(version: int, status: int = 0) -> Callable[[str], Any]:
    """What opens the driver's library: one that serves CUDA ``version`` / 1000."""

    def get_version(into: Any) -> int:
        into._obj.value = version
        return status

    return lambda name: SimpleNamespace(cuDriverGetVersion=get_version)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees an H200 and an L40 without peer access, and the L40 is current."""

    def properties(index: int) -> Any:
        major, minor, name = ((9, 0, "H200"), (8, 9, "L40"))[index]
        return SimpleNamespace(
            name=name,
            uuid=f"uuid{index}",
            major=major,
            minor=minor,
            multi_processor_count=132,
            total_memory=1 << 37,
        )

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_properties": properties,
        "can_device_access_peer": lambda a, b: a > b,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module.ctypes, "CDLL", driver(12090))


@pytest.mark.usefixtures("two_gpus")
def test_facts_of_a_gpu() -> None:
    fact = collect("cuda:0", "nccl")
    assert (fact.device, fact.device_type, fact.device_name, fact.device_uuid) == (
        "cuda:0",
        "cuda",
        "H200",
        "uuid0",
    )
    assert fact.compute_capability == (9, 0)
    assert (fact.num_sms, fact.memory_bytes) == (132, 1 << 37)
    assert fact.peer_access == (("uuid1", False),)
    assert fact.driver_cuda == (12, 9)
    json.dumps(asdict(fact))


@pytest.mark.usefixtures("two_gpus")
def test_cuda_without_a_number_is_the_current_gpu() -> None:
    fact = collect("cuda")
    assert (fact.device, fact.device_name) == ("cuda:1", "L40")
    assert fact.peer_access == (("uuid0", True),)
    with pytest.raises(ValueError, match=r"device: got cuda:2, want cuda:0 to cuda:1"):
        collect("cuda:2")


@pytest.mark.usefixtures("two_gpus")
def test_the_default_device_is_one_that_the_group_serves() -> None:
    assert default_device(None) == default_device("nccl") == torch.device("cuda", 1)
    assert default_device("cpu:gloo,cuda:nccl") == torch.device("cuda", 1)
    assert default_device("gloo") == torch.device("cpu")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert collect("cpu").driver_cuda is None
    monkeypatch.setattr(module.ctypes, "CDLL", driver(13000, status=100))
    assert collect("cpu").driver_cuda is None
    monkeypatch.setattr(module.ctypes, "CDLL", driver(13010))
    assert collect("cpu").driver_cuda == (13, 1)


def test_ranks_of_two_containers_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.socket, "gethostname", lambda: "container7")
    inside = collect("cpu")
    assert inside.host == "container7"
    if Path("/proc/sys/kernel/random/boot_id").is_file():
        monkeypatch.undo()
        assert inside.machine == collect("cpu").machine


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert library.package_version() == "0+unknown"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder where the library is looked for."""
    cached = (library.build_record, library.wheel_record, library.status, library.variants)
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    yield tmp_path
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def test_a_missing_library_is_a_fact_with_its_path(folder: Path) -> None:
    fact = collect("cpu")
    assert not fact.library_loaded
    assert (
        fact.library_reason
        == f"{folder / 'mega_moe_ops.so'} is missing: this is not an installed mega-moe wheel"
    )
    assert (fact.library_cuda, fact.library_architectures, fact.variants) == (None, (), ())
    with pytest.raises(LibraryError, match="is missing: this is not an installed mega-moe wheel"):
        library.require()


def test_a_file_that_is_no_library_is_a_fact(folder: Path) -> None:
    (folder / "mega_moe_ops.so").write_bytes(b"\x7fELF, but not really")
    listed = {"op": "forward", "architecture": "90a", "precision": "bf16"}
    (folder / "variants.json").write_text(json.dumps({"variants": [listed]}))
    fact = collect("cpu")
    assert not fact.library_loaded
    assert fact.library_reason is not None
    assert "does not load: " in fact.library_reason
    assert fact.variants == ()  # what the file lists cannot be called


def test_an_older_torch_is_told_before_anything_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mega_moe_ops.so").write_bytes(b"")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"opened {path}"))
    reason = collect("cpu").library_reason
    assert reason == "torch is 2.9.1+cu128, the library needs torch >= 2.10"


def test_a_library_that_loads_brings_its_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mega_moe_ops.so").write_bytes(b"")
    (folder / "build.json").write_text(
        json.dumps({"cuda": "13.0", "architectures": ["90a"], "kernels_sha256": "abc", "version": "1"})
    )
    listed = {"op": "quantize_weights", "architecture": "90a", "precision": "fp8", "hidden_multiple": 128}
    (folder / "variants.json").write_text(json.dumps({"variants": [listed]}))
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    fact = collect("cpu")
    assert fact.library_loaded
    assert (fact.library_cuda, fact.library_architectures, fact.kernels_sha256) == ("13.0", ("90a",), "abc")
    assert fact.variants == (module.Variant("quantize_weights", "90a", "fp8", 128),)


def test_collecting_makes_no_cuda_context() -> None:
    import subprocess

    code = (
        "import torch; from mega_moe._backends.choice.facts import collect; collect('cpu'); "
        "print(torch.cuda.is_initialized())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "False\n"
