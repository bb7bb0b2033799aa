"""The backend deep_gemm without a GPU: its arithmetic on a made-up library, and how an installed one is judged."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe import BackendRefusedError, LibraryError
from mega_moe._backends.deep_gemm import library as deep_gemm_library
from mega_moe._backends.deep_gemm.arithmetic import DeepGemmArithmetic
from mega_moe._backends.plain.arithmetic import Experts
from mega_moe._backends.plain.grouped import GroupedArithmetic
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, Needs
from mega_moe.testing import relative_l2

HIDDEN, INNER = 64, 32


class MadeUp:
    """The three products as their contract says, on the CPU, and as unkind about padding as they may be.

    A padded row (group -1) of an output is NaN. Groups of the third are contracted over their padded rows and added to
    what its output holds.
    """

    def __init__(self, alignment: int = 16, **changes: Any) -> None:
        self.__version__ = "2.1"
        self.alignment = alignment
        self.calls = 0
        for name, value in changes.items():
            setattr(self, name, value)

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def m_grouped_bf16_gemm_nt_contiguous(self, a: Tensor, b: Tensor, out: Tensor, group: Tensor) -> None:
        self._rows(a, b.transpose(1, 2), out, group)

    def m_grouped_bf16_gemm_nn_contiguous(self, a: Tensor, b: Tensor, out: Tensor, group: Tensor) -> None:
        self._rows(a, b, out, group)

    def k_grouped_bf16_gemm_tn_contiguous(
        self, a: Tensor, b: Tensor, out: Tensor, sizes: list[int], sizes_tensor: Tensor, added: Tensor
    ) -> None:
        self.calls += 1
        assert added is out
        assert all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in (a, b))
        assert (out.dtype, sizes_tensor.dtype, sizes_tensor.tolist()) == (torch.float32, torch.int32, sizes)
        assert sum(sizes) == len(a) == len(b)
        assert not any(size % self.alignment for size in sizes)
        for index, (left, right) in enumerate(zip(a.split(sizes), b.split(sizes))):
            out[index] += left.float().T @ right.float()

    def _rows(self, a: Tensor, b: Tensor, out: Tensor, group: Tensor) -> None:
        self.calls += 1
        assert a.is_contiguous()
        assert (group.dtype, len(group)) == (torch.int32, len(a))
        assert not len(a) % self.alignment
        # One group a block: what a tile of the kernel reads of its first row holds for all of it.
        for block in group.view(-1, self.alignment):
            assert set(block[block >= 0].tolist()) == {int(block[0])}
        out.fill_(math.nan)
        for index in group.unique().tolist():
            if index >= 0:
                rows = group == index
                out[rows] = (a[rows].float() @ b[index].float()).to(out.dtype)


@pytest.fixture
def library() -> MadeUp:
    return MadeUp()


def gemms(library: Any) -> deep_gemm_library.Gemms:
    found = deep_gemm_library.judge(library)
    assert found.gemms is not None, found.reason
    return found.gemms


def rows(counts: list[int], clamp: float | None = None) -> tuple[Tensor, Tensor, Tensor, Experts]:
    """x and dy ``[M, H]``, weights ``[M]``, experts."""
    rng = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=rng) * scale).bfloat16()

    total, experts = sum(counts), len(counts)
    gate_up = normal(experts, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
    down = normal(experts, HIDDEN, INNER, scale=INNER**-0.5)
    weight = torch.rand(total, generator=rng) - 0.2
    return (
        normal(total, HIDDEN),
        normal(total, HIDDEN),
        weight,
        Experts(gate_up, down, counts, Activation(clamp=clamp)),
    )


@pytest.mark.parametrize("counts", [[1, 7, 31, 33, 16, 0, 44], [0, 0, 5], [5, 0, 0], [16, 32], [1]], ids=str)
@pytest.mark.parametrize("clamp", [None, 0.7])
def test_as_torch_s_own_products(counts: list[int], clamp: float | None, library: MadeUp) -> None:
    x, dy, weight, experts = rows(counts, clamp)
    ours, theirs = DeepGemmArithmetic(gemms(library)), GroupedArithmetic()
    assert relative_l2(ours.forward((x,), weight, experts), theirs.forward((x,), weight, experts)) < 1e-3
    for dtype in (torch.bfloat16, torch.float32):
        got, want = (a.backward(x, dy, weight, experts, Needs(), dtype) for a in (ours, theirs))
        for name, mine, other in zip(Gradients._fields, got, want):
            assert mine is not None
            assert other is not None
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
            assert relative_l2(mine, other) < 4e-3, name
        for expert, count in enumerate(counts):
            if not count:
                assert not got.dw_gate_up[expert].any()  # type: ignore[index]
                assert not got.dw_down[expert].any()  # type: ignore[index]
    assert library.calls > 0


def test_without_a_row_nothing_is_launched(library: MadeUp) -> None:
    x, dy, weight, experts = rows([0, 0, 0])
    ours = DeepGemmArithmetic(gemms(library))
    assert ours.forward((x,), weight, experts).shape == (0, HIDDEN)
    dx, dw, dw1, dw2 = ours.backward(x, dy, weight, experts, Needs(), torch.float32)
    assert dx is not None
    assert dw is not None
    assert (dx.shape, dw.shape) == ((0, HIDDEN), (0,))
    for grad, weights in ((dw1, experts.gate_up), (dw2, experts.down)):
        assert grad is not None
        assert (grad.shape, grad.dtype) == (weights.shape, torch.float32)
        assert not grad.any()
    assert library.calls == 0


def test_only_what_is_wanted(library: MadeUp) -> None:
    x, dy, weight, experts = rows([3, 9])
    ours = DeepGemmArithmetic(gemms(library))
    for index in range(4):
        needs = [i == index for i in range(4)]
        got = ours.backward(x, dy, weight, experts, Needs(*needs), torch.bfloat16)
        assert [g is not None for g in got] == needs
    none = ours.backward(
        x[:0], dy[:0], weight[:0], experts._replace(counts=[0, 0]), Needs(*[False] * 4), torch.bfloat16
    )
    assert none == (None,) * 4


@pytest.fixture
def fresh() -> Iterator[None]:
    deep_gemm_library.status.cache_clear()
    before = sys.modules.pop("deep_gemm", None)
    yield
    deep_gemm_library.status.cache_clear()
    sys.modules.pop("deep_gemm", None)
    if before is not None:
        sys.modules["deep_gemm"] = before


@pytest.mark.usefixtures("fresh")
def test_one_that_is_missing() -> None:
    found = deep_gemm_library.status()
    assert (found.version, found.reason) == (None, "deep_gemm is not installed")
    with pytest.raises(LibraryError, match="deep_gemm is not installed"):
        deep_gemm_library.require()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert False, 'CUDA_HOME is not set'", "does not import (AssertionError: CUDA_HOME is not set)"),
        (
            "bf16_gemm_nt = print",
            "has no m_grouped_bf16_gemm_nt_contiguous, m_grouped_bf16_gemm_nn_contiguous, k_gro",
        ),
        (
            "bf16_gemm_nt = print",
            "get_mk_alignment_for_contiguous_layout or get_m_alignment_for_contiguous_layout",
        ),
    ],
)
def test_one_that_cannot_be_used(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_gemm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = deep_gemm_library.status()
    assert found.version is None
    assert reason in str(found.reason)


@pytest.mark.usefixtures("fresh")
def test_this_library_s_own_stand_in_is_none() -> None:
    from mega_moe import deep_gemm as face

    face.install()
    try:
        assert deep_gemm_library.status().reason == "deep_gemm is not installed"
    finally:
        face.uninstall()


def test_both_names_of_the_alignment() -> None:
    older = SimpleNamespace(
        **{name: getattr(MadeUp(), name) for name in deep_gemm_library._GEMMS},
        get_m_alignment_for_contiguous_layout=lambda: 128,
    )
    assert gemms(older).alignment == 128
    assert gemms(MadeUp(64)).alignment == 64


def test_named_without_a_gpu_it_is_refused_with_the_list() -> None:
    from mega_moe import MoEBuffer

    with pytest.raises(
        BackendRefusedError, match="deep_gemm: refused: needs an NVIDIA GPU, the device is cpu"
    ):
        MoEBuffer(
            num_experts=8,
            max_tokens_per_rank=64,
            top_k=2,
            hidden=64,
            intermediate=64,
            backend="deep_gemm",
            device="cpu",
        )
