"""Captured steps, other work alongside them, and layers and buffers that alternate, in both directions."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from mega_moe._base.layer import Gradients

from ._backward import assert_same_bits, random_dy
from ._backward_ranks import BackwardRanks, new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward import assert_same_bits as assert_same_y
from ._forward_ranks import pool_of, shape_of
from ._precision import OF_BACKWARD, assert_gradients_right, hidden_of
from ._virtual import random_ids
from ._waits import synchronising_is_an_error
from .test_forward_launch import layers_of

pytestmark = pytest.mark.timeout(120, method="thread")

STEPS = 300  # replays of a graph


class CapturedStep:
    """A graph per rank around a forward and a backward on inputs that lie at a fixed place."""

    def __init__(self, ranks: BackwardRanks, layer: Layer, dy: list[Tensor]) -> None:
        self.layer = layer.with_own_tokens()
        self.dy = [own.clone() for own in dy]
        self.graphs = [torch.cuda.CUDAGraph() for _ in layer.x]
        self.results: list[list[Tensor]] = []
        torch.cuda.synchronize()
        for rank, graph in enumerate(self.graphs):
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                y, _ = ranks.start(rank, self.layer)
                self.results.append([y, *present(ranks.start_backward_of(rank, self.layer, self.dy))])
        # A capture empties the allocator's cache.
        ranks.have_room(layer)
        ranks.have_room_for_gradients(layer, torch.bfloat16)

    def fill(self, rank: int, layer: Layer, dy: list[Tensor]) -> None:
        """On the current stream."""
        self.layer.take(rank, layer)
        self.dy[rank].copy_(dy[rank])


def present(gradients: Gradients) -> list[Tensor]:
    return [own for own in gradients if own is not None]


def bits(value: Tensor) -> Tensor:
    return value.view(torch.int16 if value.element_size() == 2 else torch.int32)


@OF_BACKWARD
@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        pytest.param([600], "one chunk", id="smoke-1"),
        pytest.param([1024], "many chunks", id="1"),
        pytest.param([700, 0], "one chunk", id="2"),
        pytest.param([512, 100, 0, 513], "many chunks", id="4"),
    ],
)
def test_replays(cuda_device: torch.device, precision: str, tokens: list[int], chunks: str) -> None:
    """Captured once, with a T for each rank; new inputs for every replay, without a wait in between."""
    layers = layers_of(cuda_device, tokens)
    dys = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
    pool = pool_of(chunks, shape_of(layers[0]))
    ranks = new_backward_ranks(cuda_device, layers[0], pool_rows=pool, precision=precision)
    want = []
    for layer, dy in zip(layers, dys):
        y, gradients = ranks.forward(layer), ranks.backward(layer, dy)
        want.append([[own, *present(rest)] for own, rest in zip(y, gradients)])
    captured = CapturedStep(ranks, layers[0], dys[0])
    wrong = [torch.zeros((), dtype=torch.int64, device=cuda_device) for _ in tokens]

    def compare(rank: int, at: int) -> None:
        for got, expected in zip(captured.results[rank], want[at][rank], strict=True):
            wrong[rank] += (bits(got) != bits(expected)).any()

    # Every kernel has run once before ranks wait for one another: loading one could wait for them.
    for rank in range(len(tokens)):
        with ranks.on(rank):
            captured.fill(rank, layers[0], dys[0])
            compare(rank, 0)
            wrong[rank].zero_()
    torch.cuda.synchronize()
    for step in range(STEPS):
        at = step % len(layers)
        for rank in range(len(tokens)):
            with ranks.on(rank):
                captured.fill(rank, layers[at], dys[at])
                captured.graphs[rank].replay()
                compare(rank, at)
        if step % 50 == 25:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert [int(own) for own in wrong] == [0] * len(tokens)
    ranks.check()


@OF_BACKWARD
def test_nothing_waits_for_the_device(cuda_device: torch.device, precision: str) -> None:
    (layer,) = layers_of(cuda_device, [500], ("random",))
    dy = random_dy(layer)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    want = ranks.backward(layer, dy)
    with synchronising_is_an_error():
        got = ranks.start_backward(layer, dy)
    torch.cuda.synchronize()
    assert_same_bits(got, want, "while waiting was an error")


@OF_BACKWARD
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_layers_of_other_weights_alternate(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """Forward and backward of three layers, each with experts of its own, in turn on one buffer, without a wait."""
    tokens = [400 - 30 * rank for rank in range(num_ranks)]
    layers = [
        random_layer(
            random_ids("random", tokens, 4, 16, cuda_device, seed),
            random_experts(cuda_device, 16, 512, 256, seed),
            weights="signed",
            seed=seed,
        )
        for seed in range(3)
    ]
    dys = [random_dy(layer, seed) for seed, layer in enumerate(layers)]
    ranks = new_backward_ranks(cuda_device, layers[0], precision=precision)
    y = [ranks.forward(layer) for layer in layers]
    gradients = [ranks.backward(layer, dy) for layer, dy in zip(layers, dys)]
    for layer, dy, own in zip(layers, dys, gradients):
        assert_gradients_right(layer, dy, own, ranks.shape)
    for step in range(12):
        forward, backward = step % 3, (step // 3 + step) % 3
        ranks.have_room(layers[0])
        ranks.have_room_for_gradients(layers[0], torch.bfloat16)
        got_y = ranks.start_all(layers[forward])
        got = ranks.start_backward(layers[backward], dys[backward])
        ranks.synchronize()
        assert_same_y(got_y, y[forward], f"step {step}")
        assert_same_bits(got, gradients[backward], f"step {step}")
    ranks.check()


@OF_BACKWARD
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_two_buffers_alternate(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """Of different extents; one runs forward while the other runs backward, one after the other without a wait."""
    layers = [
        layers_of(cuda_device, [300 - 20 * rank for rank in range(num_ranks)], ("random",))[0],
        random_layer(
            random_ids("random", [200 + 30 * rank for rank in range(num_ranks)], 3, 8, cuda_device),
            random_experts(cuda_device, 8, hidden_of(precision, 768), 128),
        ),
    ]
    dys = [random_dy(layer) for layer in layers]
    buffers = [new_backward_ranks(cuda_device, layer, precision=precision) for layer in layers]
    want = [
        (ranks.forward(layer), ranks.backward(layer, dy)) for ranks, layer, dy in zip(buffers, layers, dys)
    ]
    for ranks, layer, dy, (_, gradients) in zip(buffers, layers, dys, want):
        assert_gradients_right(layer, dy, gradients, ranks.shape)
    for step in range(20):
        a, b = step % 2, (step + 1) % 2
        for ranks, layer in zip(buffers, layers):
            ranks.have_room(layer)
            ranks.have_room_for_gradients(layer, torch.bfloat16)
        y = buffers[a].start_all(layers[a])
        gradients = buffers[b].start_backward(layers[b], dys[b])
        torch.cuda.synchronize()
        assert_same_y(y, want[a][0], f"step {step}")
        assert_same_bits(gradients, want[b][1], f"step {step}")
    for ranks in buffers:
        ranks.check()


@OF_BACKWARD
def test_occupied_sms_only_delay(cuda_device: torch.device, precision: str) -> None:
    """Another stream keeps one SM for a quarter of a second, and then all of them with products in a row."""
    (layer,) = layers_of(cuda_device, [2000], ("random",))
    dy = random_dy(layer)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    want = ranks.backward(layer, dy)
    side = torch.cuda.Stream()
    square = torch.randn(4096, 4096, device=cuda_device, dtype=torch.bfloat16)
    with torch.cuda.stream(side):
        square @ square
    everything = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    for number in (everything, everything - 2, everything - 16):
        ranks.use_sms(number)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)
        got = ranks.start_backward(layer, dy)
        torch.cuda.synchronize()
        assert_same_bits(got, want, f"alongside a sleeper, on {number} SMs")
        with torch.cuda.stream(side):
            for _ in range(20):
                square @ square
        repeats = [ranks.start_backward(layer, dy) for _ in range(3)]
        torch.cuda.synchronize()
        for own in repeats:
            assert_same_bits(own, want, f"alongside products, on {number} SMs")
    ranks.check()


@OF_BACKWARD
def test_late_rank_is_waited_for(cuda_device: torch.device, precision: str) -> None:
    """Later than the progress limit, earlier than the arrival limit: the result is right."""
    (layer,) = layers_of(cuda_device, [300, 200], ("random",))
    dy = random_dy(layer)
    ranks = new_backward_ranks(cuda_device, layer, limit=20.0, progress=0.3, precision=precision)
    want = ranks.backward(layer, dy)
    assert_gradients_right(layer, dy, want, ranks.shape)
    for late in (0, 1):
        ranks.have_room_for_gradients(layer, torch.bfloat16)
        got: dict[int, Gradients] = {}
        for rank in (1 - late, late):
            with ranks.on(rank):
                got[rank] = ranks.start_backward_of(rank, layer, dy)
            time.sleep(1.0)
        torch.cuda.synchronize()
        assert_same_bits([got[0], got[1]], want, f"rank {late} late")
    ranks.check()


@OF_BACKWARD
def test_weights_gradients_may_differ_between_ranks(cuda_device: torch.device, precision: str) -> None:
    """One rank adds into fp32 buffers, one overwrites in bf16, one has frozen experts: each gets its own bits."""
    tokens = [300, 200, 100, 250]
    (layer,) = layers_of(cuda_device, tokens, ("random",))
    dy = random_dy(layer)
    ranks = new_backward_ranks(cuda_device, layer, precision=precision)
    bf16, fp32 = ranks.backward(layer, dy), ranks.backward(layer, dy, dw_dtype=torch.float32)
    into = tuple(torch.zeros_like(own, dtype=torch.float32) for own in layer.experts(0))
    ranks.have_room_for_gradients(layer, torch.bfloat16)
    everything, frozen = (True,) * 4, (True, True, False, False)
    options = [{"into": into}, {}, {"needs": frozen}, {"needs": everything}]
    got: dict[int, Gradients] = {}
    for rank, chosen in enumerate(options):
        with ranks.on(rank):
            got[rank] = ranks.start_backward_of(rank, layer, dy, **chosen)
    ranks.synchronize()
    ranks.check()
    want = [
        bf16[0]._replace(dw_gate_up=None, dw_down=None),
        bf16[1],
        bf16[2]._replace(dw_gate_up=None, dw_down=None),
        bf16[3],
    ]
    assert_same_bits([got[rank] for rank in range(4)], want, "ranks of different wishes")
    for added, alone in zip(into, (fp32[0].dw_gate_up, fp32[0].dw_down)):
        assert alone is not None
        assert torch.equal(added, alone)  # -0 plus 0 is 0: as numbers
