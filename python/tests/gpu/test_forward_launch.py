"""Captured launches, other streams, kernels of others alongside them, and calls of one buffer that alternate."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from mega_moe._base.mode import Mode

from ._forward import Layer, assert_same_bits, random_experts, random_layer
from ._forward_ranks import ForwardRanks, new_ranks, pool_of, shape_of, smallest_pool
from ._precision import PRECISIONS, assert_y_right, hidden_of
from ._virtual import VirtualRanks, assert_tables, random_ids
from ._waits import synchronising_is_an_error

pytestmark = pytest.mark.timeout(90, method="thread")

STEPS = 1000  # replays of a graph

KINDS = ("random", "one expert", "masked", "empty", "one rank", "duplicates")


def layers_of(device: torch.device, tokens: list[int], kinds: tuple[str, ...] = KINDS) -> list[Layer]:
    """Layers of the same extents and experts, ids all int64 and weights all fp32."""
    experts = random_experts(device, 16, 512, 256)
    layers = []
    for seed, kind in enumerate(kinds):
        ids = [own.long() for own in random_ids(kind, tokens, 4, 16, device, seed)]
        layer = random_layer(ids, experts, weights="signed", seed=seed)
        layers.append(replace(layer, weights=[own.float() for own in layer.weights]))
    torch.cuda.synchronize(device)
    return layers


class Captured:
    """A graph per rank around one launch on inputs that lie at a fixed place."""

    def __init__(self, ranks: ForwardRanks, layer: Layer) -> None:
        self.layer = layer.with_own_tokens()
        self.graphs = [torch.cuda.CUDAGraph() for _ in layer.x]
        self.y: list[torch.Tensor] = []
        torch.cuda.synchronize()
        for rank, graph in enumerate(self.graphs):
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                self.y.append(ranks.start(rank, self.layer)[0])
        ranks.have_room(layer)  # a capture empties the allocator's cache

    def fill(self, rank: int, layer: Layer) -> None:
        """On the current stream."""
        self.layer.take(rank, layer)


@PRECISIONS
@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [
        pytest.param([600], "one chunk", id="smoke-1"),
        pytest.param([1024], "many chunks", id="1"),
        pytest.param([700, 0], "one chunk", id="2"),
        pytest.param([512, 100, 0, 513], "many chunks", id="4"),
    ],
)
def test_thousand_replays(cuda_device: torch.device, precision: str, tokens: list[int], chunks: str) -> None:
    """Captured once, with a T for each rank; new x, ids and weights for every replay, without a wait in between."""
    layers = layers_of(cuda_device, tokens)
    pool = pool_of(chunks, shape_of(layers[0]))
    ranks = new_ranks(cuda_device, layers[0], pool_rows=pool, precision=precision)
    want = [ranks.forward(layer) for layer in layers]
    assert_y_right(layers[0], want[0], precision)
    captured = Captured(ranks, layers[0])
    wrong = [torch.zeros((), dtype=torch.int64, device=cuda_device) for _ in tokens]

    def compare(rank: int, at: int) -> None:
        got, expected = captured.y[rank].view(torch.int16), want[at][rank].view(torch.int16)
        wrong[rank] += (got != expected).any()

    # Every kernel has run once before ranks wait for one another: loading one could wait for them.
    for rank in range(len(tokens)):
        with ranks.on(rank):
            captured.fill(rank, layers[0])
            compare(rank, 0)
            wrong[rank].zero_()
    torch.cuda.synchronize()
    for step in range(STEPS):
        for rank in range(len(tokens)):
            with ranks.on(rank):
                captured.fill(rank, layers[step % len(layers)])
                captured.graphs[rank].replay()
                compare(rank, step % len(layers))
        if step % 100 == 50:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert [int(own) for own in wrong] == [0] * len(tokens)
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_graphs_between_eager_calls(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """Two captures of different T and eager calls of a third, on one buffer in turn."""
    sizes = [
        [400 - 50 * rank for rank in range(num_ranks)],
        [64] * num_ranks,
        [129 + rank for rank in range(num_ranks)],
    ]
    layers = [layers_of(cuda_device, tokens, ("random",))[0] for tokens in sizes]
    ranks = new_ranks(cuda_device, layers[0], precision=precision)
    want = [ranks.forward(layer) for layer in layers]
    for layer, y in zip(layers, want):
        assert_y_right(layer, y, precision)
    graphs = [Captured(ranks, layers[0]), Captured(ranks, layers[1])]
    for step in range(50):
        for at, captured in enumerate(graphs):
            for rank in range(num_ranks):
                captured.y[rank].fill_(torch.nan)
            torch.cuda.synchronize()
            for rank in range(num_ranks):
                with ranks.on(rank):
                    captured.graphs[rank].replay()
            torch.cuda.synchronize()
            assert_same_bits(captured.y, want[at], f"replay {step} of graph {at}")
        assert_same_bits(ranks.forward(layers[2]), want[2], f"eager call {step}")
    ranks.check()


@PRECISIONS
def test_launches_of_two_streams_are_chained(cuda_device: torch.device, precision: str) -> None:
    """One buffer, two streams, no event between them: the library orders the launches, in the order of the host."""
    layers = layers_of(cuda_device, [900], ("random", "one rank"))
    ranks = new_ranks(cuda_device, layers[0], precision=precision)
    want = [ranks.forward(layer)[0] for layer in layers]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    torch.cuda.synchronize()
    for step in range(60):
        with torch.cuda.stream(streams[step % 2]):
            if step % 7 == 0:
                torch.cuda._sleep(200_000)
            results.append(ranks.start(0, layers[step % 2])[0])
    torch.cuda.synchronize()
    for step, y in enumerate(results):
        assert_same_bits([y], [want[step % 2]], f"launch {step}")
    ranks.check()


@PRECISIONS
def test_nothing_waits_for_the_device(cuda_device: torch.device, precision: str) -> None:
    (layer,) = layers_of(cuda_device, [500], ("random",))
    ranks = new_ranks(cuda_device, layer, precision=precision)
    want = ranks.forward(layer)
    with synchronising_is_an_error():
        y = ranks.start_all(layer)
    torch.cuda.synchronize()
    assert_same_bits(y, want, "while waiting was an error")


@PRECISIONS
def test_occupied_sms_only_delay(cuda_device: torch.device, precision: str) -> None:
    """Another stream keeps one SM for half a second, and then all of them with products in a row."""
    (layer,) = layers_of(cuda_device, [2000], ("random",))
    ranks = new_ranks(cuda_device, layer, precision=precision)
    want = ranks.forward(layer)
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
        y = ranks.start_all(layer)
        torch.cuda.synchronize()
        assert_same_bits(y, want, f"alongside a sleeper, on {number} SMs")
        with torch.cuda.stream(side):
            for _ in range(20):
                square @ square
        repeats = [ranks.start_all(layer) for _ in range(5)]
        torch.cuda.synchronize()
        for own in repeats:
            assert_same_bits(own, want, f"alongside products, on {number} SMs")
    ranks.check()


@PRECISIONS
def test_collective_of_others_in_another_order(cuda_device: torch.device, precision: str) -> None:
    """Kernels on other streams that wait for one another, as an all-reduce does: one rank starts its own first, the
    other the layer. With SMs left for them all end."""
    layers = layers_of(cuda_device, [400, 300], ("random", "one rank"))
    ranks = ForwardRanks(cuda_device, shape_of(layers[0], mode=Mode(precision)), num_sms=48)
    want = [ranks.forward(layer) for layer in layers]
    shape = replace(ranks.shape, hidden=256, intermediate=0, mode=Mode())
    others = VirtualRanks(cuda_device, shape, num_sms=4, arrival=5.0, progress=5.0, first_lane=8)
    others.launch(layers[0].ids)
    for step in range(50):
        layer = layers[step % 2]
        torch.cuda.synchronize()
        y: dict[int, torch.Tensor] = {}
        routed = {}
        for which in ("layer 0", "others 1", "others 0", "layer 1"):
            rank = int(which[-1])
            if which.startswith("layer"):
                with ranks.on(rank):
                    y[rank] = ranks.start(rank, layer)[0]
            else:
                with torch.cuda.stream(others.streams[rank]):
                    routed[rank] = others.kernels[rank].route(layer.ids[rank], None)
        torch.cuda.synchronize()
        assert_same_bits([y[0], y[1]], want[step % 2], f"step {step}")
    assert_tables(others, layer.ids, [routed[0], routed[1]])
    others.check()
    ranks.check()


@PRECISIONS
def test_late_rank_is_waited_for(cuda_device: torch.device, precision: str) -> None:
    """Later than the progress limit, earlier than the arrival limit: the result is right."""
    (layer,) = layers_of(cuda_device, [300, 200], ("random",))
    ranks = ForwardRanks(cuda_device, shape_of(layer, mode=Mode(precision)), arrival=20.0, progress=0.3)
    want = ranks.forward(layer)
    assert_y_right(layer, want, precision)
    for late in (0, 1):
        y: dict[int, torch.Tensor] = {}
        for rank in (1 - late, late):
            with ranks.on(rank):
                y[rank] = ranks.start(rank, layer)[0]
            time.sleep(1.0)
        torch.cuda.synchronize()
        assert_same_bits([y[0], y[1]], want, f"rank {late} late")
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_routing_and_forward_alternate(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """On one buffer, with another T each time."""
    tokens = [500 - 60 * rank for rank in range(num_ranks)]
    layers = layers_of(cuda_device, tokens)
    least = smallest_pool(shape_of(layers[0]))
    ranks = new_ranks(cuda_device, layers[0], pool_rows=least, precision=precision)
    want = [ranks.forward(layer) for layer in layers]
    for step in range(30):
        at = step % len(layers)
        sizes = [(97 * step + 131 * rank) % (count + 1) for rank, count in enumerate(tokens)]
        part = layers[at].first(sizes)
        if step % 3:
            assert_tables(ranks, part.ids, ranks.launch(part.ids, part.weights), part.weights)
        got = ranks.forward(part)
        assert_same_bits(got, [own[:size] for own, size in zip(want[at], sizes)], f"step {step}")
    ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_two_buffers_alternate(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """Of different extents; launches of both follow one another without a wait."""
    layers = [
        layers_of(cuda_device, [300 - 20 * rank for rank in range(num_ranks)], ("random",))[0],
        random_layer(
            random_ids("random", [200 + 30 * rank for rank in range(num_ranks)], 3, 8, cuda_device),
            random_experts(cuda_device, 8, hidden_of(precision, 768), 128),
        ),
    ]
    buffers = [new_ranks(cuda_device, layer, precision=precision) for layer in layers]
    want = [ranks.forward(layer) for ranks, layer in zip(buffers, layers)]
    for layer, y in zip(layers, want):
        assert_y_right(layer, y, precision)
    torch.cuda.synchronize()
    results = [[ranks.start_all(layer) for ranks, layer in zip(buffers, layers)] for _ in range(40)]
    torch.cuda.synchronize()
    for step, both in enumerate(results):
        for got, expected in zip(both, want):
            assert_same_bits(got, expected, f"step {step}")
    for ranks in buffers:
        ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tracing_changes_no_bit(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """Its events are of known kinds, in order, and one of each CTA is the routing."""
    (layer,) = layers_of(cuda_device, [600] * num_ranks, ("random",))
    ranks = new_ranks(cuda_device, layer, precision=precision)
    want = ranks.forward(layer)
    ctas = torch.cuda.get_device_properties(cuda_device).multi_processor_count // num_ranks // 2 * 2
    # Loads the tracing kernel, which could wait for a launch that waits.
    alone = random_layer([layer.ids[0][:0]], (layer.gate_up, layer.down))
    nothing = torch.zeros(2, 5, 8, 3, dtype=torch.int64, device=cuda_device)
    ForwardRanks(cuda_device, shape_of(alone, mode=Mode(precision)), num_sms=2).start(0, alone, trace=nothing)
    for events in (512, 3):  # the second has no room for all of them
        traces = [torch.zeros(ctas, 5, events, 3, dtype=torch.int64, device=cuda_device) for _ in layer.x]
        torch.cuda.synchronize()
        y = []
        for rank in range(num_ranks):
            with ranks.on(rank):
                y.append(ranks.start(rank, layer, trace=traces[rank])[0])
        torch.cuda.synchronize()
        assert_same_bits(y, want, f"{events} events")
        for trace in traces:
            code, start, end = trace.unbind(3)
            used = code != 0
            assert bool((code[used] & 0xFF).clamp(1, 17).eq(code[used] & 0xFF).all())
            assert bool((start[used] > 0).all())
            assert bool((end[used] >= start[used]).all())
            assert int(((code[:, 0] & 0xFF) == 16).sum()) == ctas
            if events == 512:
                assert {6, 7, 8, 9} <= set((code[used] & 0xFF).tolist())
    ranks.check()
