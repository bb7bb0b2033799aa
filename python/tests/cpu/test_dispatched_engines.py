"""The engines deep_ep and nccl_ep around stand-ins of their packages, and what is said where these are missing."""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mega_moe
from mega_moe import LibraryError, MegaMoEError
from mega_moe._backends import build
from mega_moe._backends.choice.request import Request
from mega_moe._backends.dispatched import packages
from mega_moe._backends.dispatched.deep_ep import DeepEpDispatcher
from mega_moe._backends.dispatched.nccl_ep import NcclEpDispatcher
from mega_moe._backends.group import Control
from mega_moe.testing import Problem, fp64_moe_grads

from . import _engines
from ._ep import Case, gap, of_rank, part, spread_buffer
from ._layer import assert_same_bits, results
from ._ranks import shared_world

TWO, FOUR = shared_world(2), shared_world(4)
CASES = {
    "two": Case((40, 24), "dispatched", "bfloat16", masked=0.2),
    "an empty rank": Case((20, 0, 30, 14), "dispatched", "bfloat16"),
    "no token anywhere": Case((0, 0), "dispatched", "bfloat16"),
}


def engine_of(name: str, rank: int, whole: Problem) -> Any:
    sizes = {**whole.sizes}
    sizes.pop("device", None)
    request = Request(**sizes, num_ranks=dist.get_world_size())
    if name == "nccl_ep":
        return NcclEpDispatcher(_engines.NCCL_EP, dist.group.WORLD, rank, request)
    module = _engines.RENAMED_DEEP_EP if name == "renamed deep_ep" else _engines.DEEP_EP
    return DeepEpDispatcher(module, dist.group.WORLD, rank, request)


def by_engine(rank: int, name: str, case: Case) -> dict[str, float]:
    """Errors against fp64; the bits are those of the engine nccl, since the stand-ins move rows as it does."""
    case = Case(*case)
    whole, size, rows = case.problem(), len(case.tokens), case.rows(rank)
    mine = part(whole, rank, size, rows)
    engine = engine_of(name, rank, whole)
    with spread_buffer(whole, backend="dispatched", dispatcher=engine) as buffer:
        got = results(mine, buffer)
        assert_same_bits(results(mine, buffer), got)
        for need in ((True, False, False, False), (False, True, False, False), (False, False, True, True)):
            leaves = mine.requires_grad(need)
            mega_moe.moe(*leaves.inputs, buffer=buffer).backward(leaves.dy)
            for asked, grad, want in zip(need, leaves.grads(), got[1:]):
                assert (grad is not None) == asked
                assert grad is None or torch.equal(grad, want)
    with spread_buffer(whole, backend="dispatched") as buffer:
        assert_same_bits(got, results(mine, buffer))
    if name == "nccl_ep":
        group = engine._group
        del engine, buffer
        gc.collect()
        assert group.destroyed
        assert len(group.handles) == 1
    return gap(got, of_rank(fp64_moe_grads(whole.dy, *whole.inputs, None), rank, size, rows)).errors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["deep_ep", "renamed deep_ep", "nccl_ep"])
def test_an_engine_serves_forward_and_backward(name: str, case: str) -> None:
    world = TWO if len(CASES[case].tokens) == 2 else FOUR
    for errors in world.values(by_engine, name, tuple(CASES[case])):
        assert all(error <= 6e-3 for error in errors.values()), errors


# The packages


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    packages.status.cache_clear()


@pytest.mark.parametrize(("engine", "why"), [("deep_ep", "deep_ep is not"), ("nccl_ep", "nccl.ep is not")])
def test_a_package_that_is_missing(engine: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    found = packages.status(engine)
    assert found.version is None
    assert str(found.reason).startswith(f"{why} installed")
    with pytest.raises(LibraryError, match=why):
        packages.require(engine)


def module_of(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


def test_a_package_that_is_too_old_or_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "deep_ep", module_of("deep_ep", Buffer=object))
    assert packages.status("deep_ep").reason == "the installed deep_ep has no EPBuffer or ElasticBuffer"

    def breaks(name: str) -> Any:
        raise AssertionError("no nvcc")

    monkeypatch.setattr(packages.importlib, "import_module", breaks)
    assert packages.status("nccl_ep").reason == "nccl.ep does not import (AssertionError: no nvcc)"


def test_a_package_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: object())
    made = module_of("deep_ep", **vars(_engines.DEEP_EP))
    monkeypatch.setitem(sys.modules, "deep_ep", made)
    assert packages.require("deep_ep") is made
    assert packages.status("deep_ep").version == "2.0"


def test_no_package_is_looked_for_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "status", lambda engine: pytest.fail("looked for"))
    sizes = dict(num_experts=8, max_tokens_per_rank=64, top_k=2, hidden=256, intermediate=128, device="cpu")
    mega_moe.explain(**sizes, num_ranks=2)
    told = mega_moe.explain(**sizes, num_ranks=2, backend="dispatched", dispatcher="deep_ep")
    assert told.chosen is None
    assert "dispatcher deep_ep: needs an NVIDIA GPU, the device is cpu" in str(told)


def test_what_a_package_raises_is_an_error_of_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the other ranks are told of it when they build their buffers."""

    class Breaks:
        def __init__(self, *args: Any, **options: Any) -> None:
            raise AssertionError("no RDMA")

    monkeypatch.setattr(packages, "require", lambda engine: module_of("deep_ep", ElasticBuffer=Breaks))
    request = Request(8, 64, 2, 256, 128, num_ranks=2, dispatcher="deep_ep")
    with pytest.raises(MegaMoEError, match="dispatcher deep_ep: AssertionError: no RDMA"):
        build.build_dispatcher(request, Control(), None)
