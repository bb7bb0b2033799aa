"""The pools of the fused kernels: rows of a chunk, and what a buffer weighs with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_moe import BackendRefusedError, MoEBuffer
from mega_moe._backends import nbytes
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.memory import Shape, symmetric_layout, workspace_layout
from mega_moe._backends.fused.rows import expert_pool_rows, largest_pool_rows, pool_rows
from mega_moe._backends.nbytes import expert_tokens, kernel_shape
from mega_moe._ops import library

from ._facts import FULL, PROBE_ONLY

GIB = 1 << 30


def request(
    tokens: int = 16384,
    ranks: int = 8,
    experts: int = 128,
    top_k: int = 8,
    hidden: int = 2048,
    inner: int = 768,
) -> Request:
    return Request(experts, tokens, top_k, hidden, inner, num_ranks=ranks)


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (request(), 17 * 16384 * 8 // 32 + 128 * 16),  # half of a balanced routing and a sixteenth
        (request(tokens=8192), 17 * 8192 * 8 // 32 + 128 * 16),
        (request(tokens=8192, experts=256), 2048 * 32 + 128 * 32),  # 2048 rows an expert
        (request(tokens=8192, top_k=4, experts=64), 32768 + 128 * 8),  # a GPU's fill
        (request(ranks=32, top_k=16, experts=32, tokens=2000), 128 * 32 * 16 + 256),  # a block of tokens
        (request(ranks=1), 16384 * 8 + 128 * 127),  # all that can come
        (request(tokens=1, ranks=1, experts=8, top_k=2), 1024),  # 2 + 8 * 127, padded to 128
    ],
)
def test_rows_of_a_chunk(wanted: Request, rows: int) -> None:
    assert pool_rows(wanted) == rows
    assert rows % 128 == 0


def sweep() -> list[Request]:
    return [
        request(tokens, ranks, local * ranks, top_k)
        for tokens in (1, 127, 129, 4096, 5000, 7680, 16384, (1 << 20) - 1)
        for ranks in (1, 2, 8, 32)
        for local in (1, 3, 16, 64)
        for top_k in (1, 8, 16)
        if top_k <= local * ranks
    ]


def test_a_chunk_holds_a_block_and_no_more_than_everything() -> None:
    for wanted in sweep():
        rows, local = pool_rows(wanted), wanted.num_local_experts
        block = min(wanted.max_tokens_per_rank, 128) * wanted.num_ranks * wanted.top_k
        assert rows % 128 == 0
        # The rows that the routing kernel fills are those that no padding can push out.
        assert rows - 127 * local >= block, wanted
        assert rows <= largest_pool_rows(wanted), wanted


def test_a_balanced_routing_is_one_chunk() -> None:
    for wanted in sweep():
        shape = Shape(
            wanted.max_tokens_per_rank,
            wanted.top_k,
            wanted.num_experts,
            wanted.hidden,
            wanted.num_ranks,
            pool_rows=pool_rows(wanted),
        )
        balanced = wanted.max_tokens_per_rank * wanted.top_k
        every = balanced * wanted.num_ranks
        _, most_in_one = shape.chunk_limits()
        # Routings are even but for some noise.
        assert most_in_one >= min(every, balanced * 17 // 16), wanted


# With the layouts of the library


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.status().loaded:
        pytest.skip(f"the compiled library is not loaded: {library.status().reason}")
    monkeypatch.setattr(nbytes, "variants", lambda: FULL)


def sizes(**changes: Any) -> dict[str, Any]:
    known = dict(
        num_experts=128, max_tokens_per_rank=16384, top_k=8, hidden=2048, intermediate=768, num_ranks=8
    )
    return known | changes


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(("hidden", "intermediate", "limit"), [(2048, 768, 2 * GIB), (4096, 1536, 4 * GIB)])
def test_bounds_of_the_two_models(hidden: int, intermediate: int, limit: int) -> None:
    nbytes = MoEBuffer.nbytes(**sizes(hidden=hidden, intermediate=intermediate), training=False)
    pools = 2 * pool_rows(request()) * (2 * hidden + 2 * intermediate + 2 * hidden)
    home = 16384 * 8 * hidden * 2
    assert pools + home < nbytes <= limit
    assert limit == 2 * GIB * hidden // 2048


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(("hidden", "intermediate", "limit"), [(2048, 768, 4.5), (4096, 1536, 9)])
def test_bounds_of_training(hidden: int, intermediate: int, limit: float) -> None:
    nbytes = MoEBuffer.nbytes(**sizes(hidden=hidden, intermediate=intermediate))
    assert nbytes <= limit * GIB
    # x, dy and dx by slot, gate and up of dz, and h.
    assert nbytes > 2 * pool_rows(request()) * 2 * (3 * hidden + 3 * intermediate)


@pytest.mark.usefixtures("wheel")
def test_the_documented_bytes() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "backends.md").read_text()
    for name, hidden, inner in (("30B", 2048, 768), ("235B", 4096, 1536)):
        wide = sizes(hidden=hidden, intermediate=inner)
        one, eight = (MoEBuffer.nbytes(**{**wide, "num_ranks": ranks}) / GIB for ranks in (1, 8))
        assert f"| {name} | {hidden} | {inner} | {one:.2f} GiB | {eight:.2f} GiB |" in text
        for dw in ("bf16", "fp8"):
            form = {"precision": "fp8", "dw_precision": dw}
            one, eight = (MoEBuffer.nbytes(**{**wide, **form, "num_ranks": r}) / GIB for r in (1, 8))
            assert f"{one:.2f} and {eight:.2f} GiB" in text.replace("\n", " ")


@pytest.mark.usefixtures("wheel")
def test_pools_are_two_unless_one_holds_everything() -> None:
    for ranks, num_pools in ((1, 1), (8, 2)):
        wanted = request(ranks=ranks)
        layout = workspace_layout(kernel_shape(wanted, fused=True))
        for name, width in (("x_pool", 2048), ("h_pool", 768), ("o_pool", 2048)):
            assert layout.parts[name][1] == num_pools * pool_rows(wanted) * width * 2, name


@pytest.mark.usefixtures("wheel")
def test_owner_sums_are_for_other_ranks() -> None:
    for ranks in (1, 2, 8):
        parts = symmetric_layout(kernel_shape(request(ranks=ranks), fused=True)).parts
        assert parts["owner_sums"][1] == (16384 * ranks * 2048 * 2 if ranks > 1 else 0)


@pytest.mark.usefixtures("wheel")
def test_nbytes_counts_what_the_backend_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = MoEBuffer.nbytes(**sizes(), backend="fused")
    grouped = MoEBuffer.nbytes(**sizes(), backend="grouped")
    assert MoEBuffer.nbytes(**sizes()) == fused > 10 * grouped
    assert MoEBuffer.nbytes(**sizes(), backend="reference") == grouped
    # Its experts have the pools of the same routing, and stage the tokens that come for them.
    dispatched = MoEBuffer.nbytes(**sizes(), backend="dispatched")
    assert grouped + 2 * pool_rows(request()) * 2 * 3 * 2048 < dispatched < 1.5 * fused
    # More ranks than a kernel spans.
    many = sizes(num_ranks=64)
    assert MoEBuffer.nbytes(**many, backend="dispatched") < 1.5 * fused
    assert MoEBuffer.nbytes(**many) == MoEBuffer.nbytes(**many, backend="grouped") == 0
    with pytest.raises(BackendRefusedError, match="the group has 64 ranks, one kernel spans at most 32"):
        MoEBuffer.nbytes(**many, backend="fused")
    # A size, or a wheel, that no fused kernel serves.
    other = sizes(hidden=2048 + 128)
    assert MoEBuffer.nbytes(**other) == MoEBuffer.nbytes(**other, backend="grouped")
    with pytest.raises(BackendRefusedError, match="hidden is 2176, must be a multiple of 256"):
        MoEBuffer.nbytes(**other, backend="fused")
    monkeypatch.setattr(nbytes, "variants", lambda: PROBE_ONLY)
    assert MoEBuffer.nbytes(**sizes()) == grouped
    with pytest.raises(ValueError, match="backend: got 'none'"):
        MoEBuffer.nbytes(**sizes(), backend="none")


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("tokens", [1, 100, 4096])
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_pools_of_experts_behind_a_dispatcher_hold_a_block(ranks: int, tokens: int, top_k: int) -> None:
    """Rows of 128 tokens, which are never split, and no more than all that can come in a call."""
    wanted = Request(64, tokens, top_k, 512, 256, num_ranks=ranks)
    taken = expert_tokens(wanted)
    assert taken == tokens * min(ranks, top_k)
    local = 64 // ranks
    rows = expert_pool_rows(wanted, taken)
    assert rows % 128 == 0
    assert min(taken, 128) * top_k + 127 * local <= rows <= taken * top_k + 127 * local + 127
