"""What the tests of the core share: one layer run forward and backward, its comparison with fp64, poisoned memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._ops import layer
from mega_moe.testing import Gradients, Problem, fp64_moe_grads, relative_l2


class Case(NamedTuple):
    """A backend with a dtype, and its largest relative L2 error against fp64: of a whole result, of an expert's dW."""

    backend: str
    dtype: torch.dtype
    tolerance: float

    def __str__(self) -> str:
        return f"{self.backend}-{str(self.dtype).removeprefix('torch.')}"


CASES = (
    Case("reference", torch.float64, 1e-12),
    Case("reference", torch.float32, 1e-5),
    Case("reference", torch.bfloat16, 6e-3),
    Case("grouped", torch.float32, 1e-5),
    Case("grouped", torch.bfloat16, 6e-3),
    Case("dispatched", torch.float32, 1e-5),
    Case("dispatched", torch.bfloat16, 6e-3),
)


@pytest.fixture(params=["nodes", "operators"], autouse=True)
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of a module that imports it runs on autograd's own nodes, and on the registered operators."""
    if request.param == "operators":
        monkeypatch.setattr(layer, "_is_plain", lambda tensors: False)


def make_buffer(
    problem: Problem, backend: str = "reference", precision: str = "bf16", **changes: Any
) -> MoEBuffer:
    settings = {**problem.sizes, "dtype": problem.x.dtype, "backend": backend, "precision": precision}
    return MoEBuffer(**{**settings, **changes})


def results(problem: Problem, buffer: MoEBuffer, clamp: float | None = None) -> Gradients:
    """y, dx, dtopk, dW of one forward and backward; the problem's own tensors stay as they are."""
    leaves = problem.requires_grad()
    y = mega_moe.moe(*leaves.inputs, buffer=buffer, activation_clamp=clamp)
    y.backward(leaves.dy)
    return Gradients(y.detach(), *(grad for grad in leaves.grads() if grad is not None))


def exact(problem: Problem, clamp: float | None = None) -> Gradients:
    return fp64_moe_grads(problem.dy, *problem.inputs, clamp)


def worst_errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """Relative L2 error of each result: the largest of the whole, of any expert's dW, and of half any token's y and dx.

    Half, since one token's few numbers stray twice as far as their mean. Infinite where a row must be zero and is not,
    where shapes differ and where anything is NaN.
    """
    worst: dict[str, float] = {}
    for name, a, b in zip(want._fields, got, want):
        if a.shape != b.shape:
            worst[name] = math.inf
            continue
        share = {"y": 0.5, "dx": 0.5, "dtopk": 0.0}.get(name, 1.0)
        found = [relative_l2(a, b), *(share * relative_l2(*rows) for rows in zip(a, b) if share)]
        worst[name] = math.inf if any(map(math.isnan, found)) else max(found)
    return worst


def assert_close(got: Gradients, want: Gradients, tolerance: float) -> None:
    worst = worst_errors(got, want)
    assert all(error <= tolerance for error in worst.values()), (tolerance, worst)


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself and -0 is not 0."""
    return value.detach().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(got: Gradients, want: Gradients) -> None:
    for name, a, b in zip(want._fields, got, want):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert torch.equal(bits(a), bits(b)), name


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that the package asks for holds NaN: what torch.empty gives, and recycled blocks of the allocator."""
    blocks = [torch.full((1 << size,), float("nan")) for size in range(6, 20) for _ in range(4)]
    del blocks
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills fresh tensors, see torch.utils.deterministic
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
