"""Gate and up kept from forward to backward: the bits of a backward that computes them again, whatever is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_moe._backends.fused.rows import SavedRows

from ._backward import assert_right, assert_same_bits, random_dy
from ._backward_fp8 import Judge
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import pool_of, shape_of, smallest_pool
from ._virtual import HUGE, NAN, NUMBER, random_ids
from .test_backward_values import small_layer
from .test_forward_values import FEW, KINDS, ids_of, layer_of_model

pytestmark = pytest.mark.timeout(120, method="thread")

PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_dw"])
CHUNKS = pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
ALL, SOME = 8.0, 0.4  # shares of a balanced routing's rows: more than there can be, and too few
BORDER = 1 << 12  # numbers on either side of a tensor, which nothing may write
MARK = 0x1234


class Saved:
    """A tensor for each rank, full of ``word``, between numbers that must stay as they are."""

    def __init__(self, ranks: BackwardRanks, layer: Layer, share: float, word: int = NAN) -> None:
        rows = SavedRows.of(ranks.shape, share)
        columns = 2 * layer.down.shape[2]
        self.tensors: list[Tensor] = []
        self._whole: list[Tensor] = []
        for own in layer.x:
            slots = rows.slots(len(own))
            whole = torch.full(
                (slots * columns + 2 * BORDER,), MARK, dtype=torch.int16, device=layer.device
            ).view(torch.bfloat16)
            self._whole.append(whole)
            self.tensors.append(whole[BORDER:-BORDER].view(slots, columns))
        self.fill(word)

    def fill(self, word: int) -> None:
        for own in self.tensors:
            own.view(torch.int16).fill_(word - (word >> 15 << 16))
        torch.cuda.synchronize(self.tensors[0].device)

    def check(self) -> None:
        for whole in self._whole:
            words = whole.view(torch.int16)
            assert bool((words[:BORDER] == MARK).all())
            assert bool((words[-BORDER:] == MARK).all())


def compare(
    ranks: BackwardRanks, layer: Layer, share: float = ALL, seed: int = 0, word: int = NAN, **options: Any
) -> None:
    """Both ways, on memory full of ``word``."""
    dy = random_dy(layer, seed)
    y = ranks.forward(layer)
    want = ranks.backward(layer, dy, **options)
    if ranks.shape.mode.backward == "bf16":
        assert_right(layer, dy, want)
    saved = Saved(ranks, layer, share, word)
    assert_same_y(ranks.forward_saving(layer, saved.tensors), y, "y")
    ranks.poison(word)
    assert_same_bits(ranks.backward(layer, dy, saved=saved.tensors, **options), want, f"share {share}")
    saved.check()


def test_smoke_one_expert_one_tile(cuda_device: torch.device) -> None:
    """The least that there is to do: if this is wrong, begin here."""
    ids = random_ids("random", [64], 1, 1, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 1, 256, 128))
    ranks = new_backward_ranks(cuda_device, layer)
    compare(ranks, layer)
    ranks.check()


def test_smoke_what_is_saved(cuda_device: torch.device) -> None:
    """Gate and up of each row, put into order: by 64 slots, 128 features, warp, vector and lane."""
    ids = random_ids("one expert", [300], 1, 2, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 2, 256, 384))
    ranks = new_backward_ranks(cuda_device, layer)
    saved = Saved(ranks, layer, ALL)
    ranks.forward_saving(layer, saved.tensors)
    slots = saved.tensors[0].shape[0]
    # By blocks of slots and of features, warp, gate or up, vector, lane / 4, lane % 4; and in a vector by 8 features,
    # 8 rows, and pair: the order of the accumulators.
    words = saved.tensors[0].view(slots // 64, 3, 4, 2, 8, 8, 4, 2, 2, 2)
    rows = words.permute(0, 2, 8, 5, 3, 1, 4, 7, 6, 9).reshape(slots, 2 * 384)
    # One expert's rows are its tokens in order, from its first slot on.
    want = (layer.x[0].double() @ layer.gate_up[1].double().T).float()
    got = rows[:300].float()
    assert float((got - want).norm() / want.norm()) < 4e-3
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 385])
def test_smoke_edges_of_one_expert(cuda_device: torch.device, tokens: int, precision: str) -> None:
    ids = random_ids("one expert", [tokens], 1, 3, cuda_device)
    layer = random_layer(ids, random_experts(cuda_device, 3, 512, 384))
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    for share in (ALL, SOME):
        compare(ranks, layer, share)
    ranks.check()


@PRECISIONS
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("share", [ALL, 1.0, SOME, 0.01])
def test_any_routing(
    cuda_device: torch.device, num_ranks: int, chunks: str, share: float, precision: str
) -> None:
    counts = [max(FEW - 90 * rank, 5) for rank in range(num_ranks)]
    experts = random_experts(cuda_device, 16, 512, 384)
    ranks = None
    for seed, kind in enumerate(KINDS):
        layer = random_layer(ids_of(kind, counts, 4, 16, cuda_device), experts, weights="signed", seed=seed)
        if ranks is None:
            pool = pool_of(chunks, shape_of(layer, max_tokens=FEW))
            ranks = new_backward_ranks(
                cuda_device, layer, max_tokens=FEW, pool_rows=pool, precision=precision
            )
        compare(ranks, layer, share, seed, word=(NAN, HUGE, NUMBER)[seed % 3])
    assert ranks is not None
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("clamp", [0.5, 10.0])
def test_clamp(cuda_device: torch.device, num_ranks: int, clamp: float, precision: str) -> None:
    layer = small_layer(cuda_device, num_ranks, clamp=clamp)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    compare(ranks, layer)
    ranks.check()


@PRECISIONS
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_only_what_is_needed(cuda_device: torch.device, num_ranks: int, chunks: str, precision: str) -> None:
    layer = small_layer(cuda_device, num_ranks)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool, precision=precision)
    dy = random_dy(layer)
    whole = ranks.backward(layer, dy)
    saved = Saved(ranks, layer, ALL)
    ranks.forward_saving(layer, saved.tensors)
    for needs in itertools.product((False, True), repeat=4):
        got = ranks.backward(layer, dy, needs=needs, saved=saved.tensors)
        want = [type(own)(*(value if needed else None for value, needed in zip(own, needs))) for own in whole]
        assert_same_bits(got, want, f"needs {needs}")
    ranks.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_that_are_added(cuda_device: torch.device, dtype: torch.dtype) -> None:
    layer = small_layer(cuda_device, 2)
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=smallest_pool(shape_of(layer)))
    dy = random_dy(layer)
    saved = Saved(ranks, layer, ALL)
    ranks.forward_saving(layer, saved.tensors)
    sums = []
    for given in (None, saved.tensors):
        into = [tuple(torch.ones_like(w, dtype=dtype) for w in layer.experts(rank)) for rank in range(2)]
        torch.cuda.synchronize(cuda_device)
        ranks.backward(layer, dy, into=into, saved=given, dw_dtype=dtype)
        sums.append([grad for pair in into for grad in pair])
    for got, want in zip(*sums, strict=True):
        assert torch.equal(got, want)
    ranks.check()


def test_the_backward_reads_it(cuda_device: torch.device) -> None:
    """Zeros there are zeros of dtopk, but for the rows beyond."""
    layer = small_layer(cuda_device, 1)
    ranks = new_backward_ranks(cuda_device, layer)
    dy = random_dy(layer)
    want = ranks.backward(layer, dy)[0].dtopk
    assert want is not None
    for share, least in ((ALL, 0.99), (SOME, 0.2)):
        saved = Saved(ranks, layer, share, 0)
        got = ranks.backward(layer, dy, saved=saved.tensors)[0].dtopk
        assert got is not None
        zero = got == 0
        assert float(zero.float().mean()) >= least
        assert torch.equal(got[~zero], want[~zero])
        assert share == ALL or not bool(zero.all())
    ranks.check()


@PRECISIONS
@CHUNKS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_delays_and_any_number_of_sms(
    cuda_device: torch.device, num_ranks: int, chunks: str, precision: str
) -> None:
    """Other SMs, and other orders, in the two directions of one call."""
    layer = small_layer(cuda_device, num_ranks)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool, precision=precision)
    dy = random_dy(layer)
    want = ranks.backward(layer, dy)
    for seed in range(1, 16):
        share = (ALL, 1.0, SOME)[seed % 3]
        saved = Saved(ranks, layer, share, HUGE)
        ranks.use_sms(2 * (seed % 8) + 2)
        ranks.forward_saving(layer, saved.tensors, delay_seed=seed)
        ranks.poison(NAN)
        ranks.use_sms(2 * (3 * seed % 8) + 2)
        got = ranks.backward(layer, dy, saved=saved.tensors, delay_seed=100 + seed)
        assert_same_bits(got, want, f"delays of seed {seed}")
        saved.check()
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_calls_at_once(cuda_device: torch.device, num_ranks: int, precision: str) -> None:
    layers = [small_layer(cuda_device, num_ranks, seed) for seed in range(3)]
    ranks = new_backward_ranks(cuda_device, layers[0])
    dy = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
    want = [ranks.backward(layer, own) for layer, own in zip(layers, dy)]
    saved = [Saved(ranks, layer, ALL) for layer in layers]
    for layer, own in zip(layers, saved):
        ranks.forward_saving(layer, own.tensors)
    for at in (2, 0, 1):
        got = ranks.backward(layers[at], dy[at], saved=saved[at].tensors)
        assert_same_bits(got, want[at], f"call {at}")
    ranks.check()


@PRECISIONS
def test_one_rank_keeps_it_and_another_does_not(cuda_device: torch.device, precision: str) -> None:
    layer = small_layer(cuda_device, 2)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    compare(ranks, layer)  # loads every form before two are to run at once
    dy = random_dy(layer)
    want = ranks.backward(layer, dy)
    saved = Saved(ranks, layer, ALL)
    mixed = [saved.tensors[0], None]
    ranks.forward_saving(layer, mixed)
    assert_same_bits(ranks.backward(layer, dy, saved=mixed), want, "one of two")
    ranks.check()


@pytest.mark.parametrize("dw", ["bf16", "fp8"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_backward_in_fp8_of_a_forward_in_bf16(cuda_device: torch.device, num_ranks: int, dw: str) -> None:
    """What is kept are the forward's, so gradients are those of gate and up in bf16."""
    layer = small_layer(cuda_device, num_ranks)
    precision = "fp8_bwd" if dw == "bf16" else "fp8_bwd_dw"
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    dy = random_dy(layer)
    saved = Saved(ranks, layer, ALL)
    assert_same_y(ranks.forward_saving(layer, saved.tensors), ranks.forward(layer), "y")
    got = ranks.backward(layer, dy, saved=saved.tensors)
    Judge(layer, dy, ranks.shape, saved=True).assert_right(got)
    with pytest.raises(AssertionError, match="rank 0"):
        Judge(layer, dy, ranks.shape).assert_right(got)
    ranks.poison(HUGE)
    assert_same_bits(ranks.backward(layer, dy, saved=saved.tensors), got, "again")
    some = Saved(ranks, layer, SOME)
    ranks.forward_saving(layer, some.tensors)
    first = ranks.backward(layer, dy, saved=some.tensors)
    ranks.poison(NUMBER)
    assert_same_bits(ranks.backward(layer, dy, saved=some.tensors), first, "some rows, again")
    some.check()
    ranks.check()


@pytest.mark.parametrize(
    ("name", "num_ranks", "most"),
    [
        pytest.param("30B", 1, 2048, id="smoke-30B-1"),
        pytest.param("30B", 8, 4096, id="30B-8"),
        pytest.param("235B", 1, 4096, id="235B-1", marks=pytest.mark.big_memory),
    ],
)
def test_models(cuda_device: torch.device, name: str, num_ranks: int, most: int) -> None:
    """Real extents in the memory that a buffer takes for them, and the room of a share of 1."""
    layer, rows = layer_of_model(name, num_ranks, most, cuda_device)
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=rows)
    dy = random_dy(layer)
    want = ranks.backward(layer, dy)
    saved = Saved(ranks, layer, 1.0)
    ranks.forward_saving(layer, saved.tensors)
    assert_same_bits(ranks.backward(layer, dy, saved=saved.tensors), want, name)
    saved.check()
    ranks.check()
