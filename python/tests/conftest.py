"""Where the package must come from, and what a test gets that needs a GPU."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("MEGA_MOE_REQUIRE_INSTALLED") != "1":
        return
    found = importlib.util.find_spec("mega_moe")
    where = Path(found.origin).resolve() if found is not None and found.origin else None
    # An installer leaves a record alongside the package, in site-packages or in a folder of its own.
    if where is None or not any(where.parents[1].glob("mega_moe-*.dist-info/RECORD")):
        pytest.exit(
            f"MEGA_MOE_REQUIRE_INSTALLED=1: mega_moe comes from {where}, want it installed from a wheel", 4
        )


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Threads that wait for one another on shared cores make tests on small tensors several times slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_of_big_memory_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked big_memory wait for one another in all processes of this machine, and give back what they took."""
    if request.node.get_closest_marker("big_memory") is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"mega-moe-big-memory-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="module")
def cached_memory_goes_back() -> Iterator[None]:
    """Processes that share a GPU: what one keeps for later, the others miss, and to free it waits for every kernel."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def cuda_device() -> torch.device:
    """The current GPU; without one the test is skipped, or fails where MEGA_MOE_REQUIRE_GPU=1 promised it."""
    return cuda_devices_or_give_up(1)[0]


@pytest.fixture
def cuda_devices() -> list[torch.device]:
    """All GPUs of this machine, two at least; without them as `cuda_device`."""
    return cuda_devices_or_give_up(2)


def cuda_devices_or_give_up(want: int) -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < want:
        reason = f"needs {want} CUDA device(s), torch {torch.__version__} sees {count}"
        if os.environ.get("MEGA_MOE_REQUIRE_GPU") == "1":
            pytest.fail(f"MEGA_MOE_REQUIRE_GPU=1: {reason}", pytrace=False)
        pytest.skip(reason)
    return [torch.device("cuda", index) for index in range(count)]
