"""Ranks that come late or never, or die: the others end in bounded time with an error that names them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mega_moe
from mega_moe import MegaMoEError, MoEBuffer, PeerError, RankTimeoutError
from mega_moe._backends.plain import executor as plain
from mega_moe.testing import relative_l2

from ._ep import AT_ONCE, SIZES, small_part
from ._ranks import RankLostError, World, shared_world

TWO, FOUR = shared_world(2), shared_world(4)


def timed(call: Callable[[], Any]) -> tuple[float, BaseException | None]:
    start = time.monotonic()
    try:
        call()
    except MegaMoEError as error:
        return time.monotonic() - start, error
    return time.monotonic() - start, None


def missing(rank: int, phase: str) -> None:
    """Rank 1 makes four calls where rank 0 makes five; afterwards nothing waits, and a new buffer works."""
    mine = small_part(rank)
    buffer = MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 3})
    leaves = mine.requires_grad()
    for _ in range(4):
        y = mega_moe.moe(*leaves.inputs, buffer=buffer)
    if rank == 0:
        late: Callable[[], Any] = (
            (lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
            if phase == "forward"
            else (lambda: y.backward(leaves.dy))
        )
        seconds, error = timed(late)
        assert type(error) is RankTimeoutError
        for words in (f"rank 0 of 2: {phase} call 5", "3 s for ranks [1]", "arrived: [0]"):
            assert words in str(error), str(error)
        assert 3 <= seconds < 3 + AT_ONCE
        for again in (lambda: mega_moe.moe(*mine.inputs, buffer=buffer), lambda: y.backward(leaves.dy)):
            seconds, error = timed(again)
            assert type(error) is MegaMoEError
            assert "lost one another earlier" in str(error)
            assert "ranks [1]" in str(error)
            assert seconds < 3  # it does not wait again
    dist.barrier()
    if rank == 1:  # comes when rank 0 has given up
        seconds, error = timed(lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
        assert type(error) is RankTimeoutError
        assert seconds < 3 + AT_ONCE
    buffer.destroy()
    with MoEBuffer(dist.group.WORLD, **SIZES) as fresh:
        assert relative_l2(mega_moe.moe(*mine.inputs, buffer=fresh), y) == 0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_does_not_call_is_named_within_the_limit(phase: str) -> None:
    TWO.values(missing, phase)


def some_missing(rank: int) -> None:
    """Ranks 1 and 3 stay away, rank 2 comes two seconds after rank 0: both name the same two."""
    mine = small_part(rank, 4)
    buffer = MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 4})
    mega_moe.moe(*mine.inputs, buffer=buffer)
    if rank in (0, 2):
        time.sleep(rank)
        seconds, error = timed(lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
        assert type(error) is RankTimeoutError
        assert "forward call 2" in str(error)
        assert "ranks [1, 3]; arrived: [0, 2]" in str(error), str(error)
        assert seconds < 4 + AT_ONCE
    dist.barrier()
    buffer.destroy()


def test_all_missing_ranks_are_named_and_only_they() -> None:
    FOUR.values(some_missing)


def late(rank: int) -> None:
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 20}) as buffer:
        first = mega_moe.moe(*mine.inputs, buffer=buffer)
        time.sleep(3 * rank)  # compiling, or writing a checkpoint
        assert torch.equal(mega_moe.moe(*mine.inputs, buffer=buffer), first)


def test_a_late_rank_within_the_limit_is_waited_for() -> None:
    TWO.values(late)


def evaluation(rank: int) -> None:
    """Five batches on rank 0, three on rank 1, then the documented calls without tokens."""
    mine = small_part(rank)
    with MoEBuffer(dist.group.WORLD, **SIZES) as buffer, torch.no_grad():
        for _ in range((5, 3)[rank]):
            mega_moe.moe(*mine.inputs, buffer=buffer)
        for _ in range((0, 2)[rank]):
            x, idx, weights, w1, w2 = mine.inputs
            empty = x.new_empty(0, 128)
            y = mega_moe.moe(empty, idx[:0], weights[:0], w1, w2, buffer=buffer)
            assert y.shape == (0, 128)


def test_evaluation_loops_of_different_length_end_with_calls_without_tokens() -> None:
    TWO.values(evaluation)


def nobody_else_builds(rank: int) -> None:
    if rank == 0:
        seconds, error = timed(lambda: MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 2}))
        assert type(error) is RankTimeoutError
        assert "construction of MoEBuffer: waited 2.0 s of 2 s for ranks [1]; arrived: [0]" in str(error)
        assert 2 <= seconds < 2 + AT_ONCE


def other_order(rank: int) -> None:
    """Rank 0 builds and then reduces, rank 1 the other way round: both get an error from the buffer, neither hangs."""

    def build() -> None:
        MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 2})

    steps = [build, lambda: dist.all_reduce(torch.ones(1))]
    caught = [timed(step) for step in (steps if rank == 0 else reversed(steps))]
    errors = [error for _, error in caught if error is not None]
    assert [type(e) for e in errors] == [RankTimeoutError]
    assert "construction of MoEBuffer" in str(errors[0])
    assert all(seconds < 4 + AT_ONCE for seconds, _ in caught)


@pytest.fixture
def own_world() -> Iterator[World]:
    """Two ranks that no other test uses."""
    world = World(2)
    yield world
    world.close(limit=0)


def test_construction_is_collective(own_world: World) -> None:
    """After it ranks have built different numbers of buffers on the group, so no other test may use them."""
    own_world.values(other_order)
    own_world.values(nobody_else_builds)
    assert own_world.close() == [0, 0]


def destroyed_elsewhere(rank: int) -> None:
    mine = small_part(rank)
    buffer = MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 3})
    mega_moe.moe(*mine.inputs, buffer=buffer)
    if rank == 0:
        buffer.destroy()
    else:
        seconds, error = timed(lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
        assert type(error) is RankTimeoutError
        assert "ranks [0]" in str(error)
        assert seconds < 3 + AT_ONCE
    dist.barrier()


def test_a_buffer_destroyed_on_one_rank() -> None:
    TWO.values(destroyed_elsewhere)


def dies(rank: int, dying: int) -> str:
    mine = small_part(rank)
    buffer = MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 3})
    mega_moe.moe(*mine.inputs, buffer=buffer)
    if rank == dying:
        os._exit(7)
    _, error = timed(lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
    assert type(error) is RankTimeoutError, error
    return str(error)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_whose_process_died(own_world: World, dying: int) -> None:
    """Rank 0 takes the store with it, so nobody can say who is missing; the wait ends all the same."""
    outcomes = own_world.run(dies, dying)
    assert isinstance(outcomes[dying].error, RankLostError)
    assert f"rank {dying} died with 7" in str(outcomes[dying].error)
    survivor = outcomes[1 - dying]
    assert survivor.error is None, survivor.trace
    assert ("ranks [1]" if dying else "the store is gone") in survivor.value
    assert survivor.seconds < 3 + 2 * AT_ONCE


def dies_inside(rank: int, dying: int) -> str:
    """A rank that agreed to a call and is gone before its rows are sent."""
    mine = small_part(rank)
    buffer = MoEBuffer(dist.group.WORLD, **{**SIZES, "arrival_timeout": 3})
    if rank == dying:
        plain.all_to_all = lambda *_: os._exit(7)
    _, error = timed(lambda: mega_moe.moe(*mine.inputs, buffer=buffer))
    assert type(error) is PeerError, error
    return str(error)


def test_a_rank_whose_process_died_inside_a_call(own_world: World) -> None:
    survivor = own_world.run(dies_inside, 1)[0]
    assert survivor.error is None, survivor.trace
    assert "rank 0: rows from or to the other ranks did not arrive" in survivor.value
    assert survivor.seconds < 3 + 2 * AT_ONCE


SCRIPT = """
import sys, time
import torch, torch.distributed as dist, mega_moe
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
sizes = dict(num_experts=4, max_tokens_per_rank=4, top_k=1, hidden=8, intermediate=8, backend="reference")
buffer = mega_moe.MoEBuffer(dist.group.WORLD, arrival_timeout=2, **sizes)
if rank == 1:
    print("away", flush=True)
    time.sleep(300)
x, idx, w = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
print("calls", flush=True)
mega_moe.moe(x, idx, w, torch.ones(2, 16, 8), torch.ones(2, 8, 8), buffer=buffer)
"""


def test_a_process_ends_by_itself_after_the_error(tmp_path: Path) -> None:
    """Nobody catches the error, and the other rank is still there, asleep; a file store, as some launchers use."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, output in ((0, subprocess.PIPE), (1, subprocess.DEVNULL)):
        command = [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
        )
    try:
        assert ranks[0].stdout is not None
        assert "calls\n" in iter(ranks[0].stdout.readline, "")  # gloo may have something to say first
        start = time.monotonic()
        told, _ = ranks[0].communicate(timeout=30)
        assert time.monotonic() - start < 2 + AT_ONCE
        assert ranks[0].returncode == 1
        assert re.search(r"RankTimeoutError: rank 0 of 2: forward call 1: .* for ranks \[1\]", told), told
        assert ranks[1].poll() is None
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def stuck(rank: int, seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_the_helper_ends_a_rank_that_is_stuck() -> None:
    """What every test here relies on: the limit holds, the stack is told, and the next call gets a fresh process."""
    world = World(1)
    try:
        (first,) = world.values(stuck, 0)
        start = time.monotonic()
        (outcome,) = world.run(stuck, 60, limit=1)
        assert time.monotonic() - start < 1 + AT_ONCE
        assert isinstance(outcome.error, RankLostError)
        assert "rank 0 did not return" in outcome.trace
        assert "in stuck" in outcome.trace
        assert world.values(stuck, 0) != [first]
        assert world.close() == [0]
    finally:
        world.close(limit=0)
