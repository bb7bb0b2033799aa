"""Processes that form one gloo group and run functions of a test file, each call under a hard limit.

Importing torch costs seconds, so a `World` serves many calls; it is started anew after a call that left a rank stuck or
dead. Run as a script this file is one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any

START_SECONDS = 90.0  # two loaded cores import torch four times
GROUP_SECONDS = 60  # the group's own time-out: longer than any call that ends as it should
_KEY = "MEGA_MOE_TEST_RANKS_KEY"


class RankLostError(Exception):
    """A rank did not return in time, or its process died; the text holds the stacks or the end of its log."""


@dataclass(frozen=True)
class Outcome:
    """What one rank's call gave: a value, or an error with its trace."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0


class World:
    """``size`` processes, ranks of one gloo group; started by the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Outcome]:
        """``function(rank, *args)`` on every rank -> outcomes by rank, after at most about ``limit`` seconds."""
        if not self._ranks:
            self._start()
        path = str(Path(inspect.getfile(function)).resolve())
        call = (function.__module__, path, function.__qualname__, pickle.dumps(args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank shows when its answer is read
                pipe.send(call)
        end = time.monotonic() + limit
        outcomes = [self._answer(rank, end) for rank in range(self.size)]
        if any(isinstance(o.error, RankLostError) for o in outcomes):
            self.close(limit=0)
        return outcomes

    def values(self, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        """As `run`, for a call that must succeed on every rank."""
        outcomes = self.run(function, *args, limit=limit)
        failed = [f"rank {rank}:\n{o.trace}" for rank, o in enumerate(outcomes) if o.error is not None]
        assert not failed, "\n".join(failed)
        return [o.value for o in outcomes]

    def close(self, limit: float = 20.0) -> list[int]:
        """Let the ranks return from their main function -> exit codes; -9 for one that had to be killed."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + limit
        for process in self._ranks:
            try:
                process.wait(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        codes = [process.returncode for process in self._ranks]
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return codes

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        key = secrets.token_hex(16)
        with Listener(str(Path(self._folder.name, "door")), "AF_UNIX", authkey=key.encode()) as door:
            door._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            for rank in range(self.size):
                log = self._log(rank).open("wb")
                command = [sys.executable, __file__, str(door.address), str(rank), str(self.size)]
                # MKL and OpenMP threads of several ranks would fight for the cores.
                environment = {**os.environ, _KEY: key, "OMP_NUM_THREADS": "1"}
                self._ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                log.close()
            try:
                known = dict(self._greet(door) for _ in range(self.size))
                self._pipes = [known[rank] for rank in range(self.size)]
                port = self._pipes[0].recv()
                for pipe in self._pipes[1:]:
                    pipe.send(port)
            except (OSError, EOFError) as error:
                logs = "\n".join(self._log(rank).read_text() for rank in range(self.size))
                self.close(limit=0)
                raise RankLostError(f"a rank did not start ({error!r}):\n{logs}") from error

    @staticmethod
    def _greet(door: Listener) -> tuple[int, Connection]:
        pipe = door.accept()
        return pipe.recv(), pipe

    def _answer(self, rank: int, end: float) -> Outcome:
        pipe, process = self._pipes[rank], self._ranks[rank]
        try:
            if pipe.poll(max(end - time.monotonic(), 0)):
                return Outcome(*pickle.loads(pipe.recv_bytes()))
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # the rank writes its stacks
            why = f"rank {rank} did not return"
        except (EOFError, ConnectionError):
            why = f"rank {rank} died with {process.wait(10)}"
        text = f"{why}\n{self._log(rank).read_text()[-6000:]}"
        return Outcome(error=RankLostError(text), trace=text)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"rank{rank}.log")


@functools.cache
def shared_world(size: int) -> World:
    """One world per size for all tests of this process; ended with it."""
    world = World(size)
    atexit.register(world.close)
    return world


def _serve(address: str, rank: int, size: int) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Client(address, authkey=os.environ.pop(_KEY).encode())
    pipe.send(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # As under pytest: a warning that nobody expects is an error, unless torch warns itself of its own old parts.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size)
    import datetime

    limit = datetime.timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    while (call := pipe.recv()) is not None:
        pipe.send_bytes(_outcome(rank, *call))
    # Rank 0 holds the store: it leaves last, or the others' shutdown would find a closed socket.
    dist.barrier()
    dist.destroy_process_group()


def _outcome(rank: int, module: str, path: str, name: str, args: bytes) -> bytes:
    """Pickled fields of an `Outcome`: as a script this file's classes have another module's name than in the tests."""
    start = time.monotonic()
    try:
        function = getattr(_load(module, Path(path)), name)
        value = function(rank, *pickle.loads(args))
        return pickle.dumps((value, None, "", time.monotonic() - start))
    except BaseException as error:  # noqa: BLE001 -- every failure of a rank belongs to the test
        trace, seconds = traceback.format_exc(), time.monotonic() - start
        try:
            packed = pickle.dumps((None, error, trace, seconds))
            pickle.loads(packed)
        except Exception:  # noqa: BLE001 -- an exception with a constructor of its own
            return pickle.dumps((None, RuntimeError(repr(error)), trace, seconds))
        return packed


def _load(module: str, path: Path) -> ModuleType:
    """The test file under the name that pytest gave it: its relative imports work, and pickles mean the same there."""
    package, folder = module.rpartition(".")[0], path.parent
    while package:
        if package not in sys.modules:
            spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            sys.modules[package] = importlib.util.module_from_spec(spec)
        package, folder = package.rpartition(".")[0], folder.parent
    return importlib.import_module(module)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
