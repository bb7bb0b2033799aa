"""Bad ids, a refused call, a missing rank, one that stops half way: each ends as decided, in bounded time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from mega_moe import MegaMoEError, PeerError, RankTimeoutError
from mega_moe._base.layer import LayerInputs
from mega_moe._base.mode import Mode

from ._forward import Layer, assert_same_bits, random_experts, random_layer
from ._forward_ranks import ForwardRanks, inputs_of, shape_of
from ._precision import FP8, PRECISIONS, assert_y_right
from ._virtual import random_ids

pytestmark = pytest.mark.timeout(60, method="thread")

TOKENS, TOP_K, EXPERTS = 300, 4, 16


def layer_of(device: torch.device, num_ranks: int) -> Layer:
    ids = random_ids("random", [TOKENS] * num_ranks, TOP_K, EXPERTS, device)
    return random_layer(ids, random_experts(device, EXPERTS, 512, 256))


def ranks_of(
    device: torch.device, layer: Layer, precision: str, arrival: float = 20.0, progress: float = 20.0
) -> ForwardRanks:
    shape = shape_of(layer, mode=Mode(precision))
    ranks = ForwardRanks(device, shape, arrival=arrival, progress=progress)
    ranks.have_room(layer)
    return ranks


def start(ranks: ForwardRanks, rank: int, layer: Layer) -> Tensor:
    with ranks.on(rank):
        return ranks.start(rank, layer)[0]


def settle() -> None:
    """Launches that were started are on the device. The routing kernel takes SMs one by one: where it came first, two
    of a cluster might no longer be found for all of a forward, until one of the two gives up."""
    time.sleep(0.1)


def all_nan(y: Tensor) -> bool:
    torch.cuda.synchronize()
    return bool(y.isnan().all())


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("bad", [EXPERTS, -2, 2**31 - 1])
def test_smoke_bad_id(cuda_device: torch.device, precision: str, num_ranks: int, bad: int) -> None:
    """The rank's y is NaN, its next call or check raises, the others' results stand, and nobody is out of step."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = ranks_of(cuda_device, layer, precision)
    want = ranks.forward(layer)
    assert_y_right(layer, want, precision)
    wrong = layer.rows([slice(None)] * num_ranks)
    wrong.ids[-1] = wrong.ids[-1].clone()
    wrong.ids[-1][7, 2] = bad
    ranks.have_room(layer)
    y = ranks.forward(wrong)
    assert all_nan(y[-1])
    assert_same_bits(y[:-1], want[:-1], "ranks without a bad id")
    message = rf"topk_idx\[7, 2\]: got expert {bad}, want -1 or 0 to {EXPERTS - 1}"
    again = [start(ranks, rank, layer) for rank in range(num_ranks - 1)]
    with pytest.raises(ValueError, match=message):
        start(ranks, num_ranks - 1, layer)  # launched all the same, for those that wait for it
    ranks.check()
    assert_same_bits(again, want[:-1], "the call that raised")
    assert_same_bits(ranks.forward(layer), want, "the call after")
    wrong.ids[-1][TOKENS - 1, 3] = -7
    assert all_nan(ranks.forward(wrong)[-1])
    with pytest.raises(ValueError, match="topk_idx"):
        ranks.kernels[-1].check()
    assert_same_bits(ranks.forward(layer), want, "after check raised")
    ranks.check()


@PRECISIONS
def test_bad_id_of_a_token_without_experts(cuda_device: torch.device, precision: str) -> None:
    """Every row of y is NaN, whoever would have written it."""
    layer = layer_of(cuda_device, 1)
    layer.ids[0][::2] = -1
    ranks = ranks_of(cuda_device, layer, precision)
    ranks.forward(layer)
    layer.ids[0][0, 0] = EXPERTS
    assert all_nan(ranks.forward(layer)[0])
    with pytest.raises(ValueError, match="topk_idx"):
        ranks.kernels[0].check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("told", [TOKENS + 1, 1])
def test_smoke_refused_call(cuda_device: torch.device, precision: str, num_ranks: int, told: int) -> None:
    """Of one rank, for too many tokens or for another reason: the others raise it, and the next call works on all."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = ranks_of(cuda_device, layer, precision)
    want = ranks.forward(layer)
    ranks.have_room(layer)
    for refuses in (0, num_ranks - 1):
        y = {rank: start(ranks, rank, layer) for rank in range(num_ranks) if rank != refuses}
        settle()
        with ranks.on(refuses):
            ranks.kernels[refuses].refuse(told)
        torch.cuda.synchronize()
        reason = f"it had {told} tokens" if told > TOKENS else "its arguments were refused there"
        for rank, own in y.items():
            assert all_nan(own)
            with pytest.raises(PeerError, match=f"was refused by rank {refuses}: {reason}"):
                ranks.kernels[rank].check()
        assert_same_bits(ranks.forward(layer), want, f"after a refusal of rank {refuses}")
        ranks.check()


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_missing_rank(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """The others raise after the arrival limit and name it, the late one learns of it, the buffer is lost, and the
    process goes on with another one."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = ranks_of(cuda_device, layer, precision, arrival=0.5)
    want = ranks.forward(layer)
    ranks.have_room(layer)
    missing = num_ranks - 1
    began = time.monotonic()
    y = [start(ranks, rank, layer) for rank in range(missing)]
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - began < 10
    for rank, own in enumerate(y):
        assert all_nan(own)
        with pytest.raises((RankTimeoutError, PeerError), match=rf"rank {missing} to launch"):
            ranks.kernels[rank].check()
        with pytest.raises(MegaMoEError, match="lost one another"):
            start(ranks, rank, layer)
    began = time.monotonic()
    assert all_nan(start(ranks, missing, layer))
    with pytest.raises(PeerError, match=rf"gave up waiting \(arrival limit\) for rank {missing} to launch"):
        ranks.kernels[missing].check()
    assert time.monotonic() - began < 10
    assert_same_bits(ranks_of(cuda_device, layer, precision).forward(layer), want, "a new buffer")


@PRECISIONS
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rank_that_only_routes(cuda_device: torch.device, precision: str, num_ranks: int) -> None:
    """All are told at once, and by no time limit."""
    layer = layer_of(cuda_device, num_ranks)
    ranks = ranks_of(cuda_device, layer, precision, progress=30.0)
    ranks.forward(layer)
    torch.cuda.synchronize()
    began = time.monotonic()
    y = [start(ranks, rank, layer) for rank in range(num_ranks - 1)]
    settle()
    with ranks.on(num_ranks - 1):
        ranks.kernels[-1].route(layer.ids[-1], layer.weights[-1])
    torch.cuda.synchronize()
    assert time.monotonic() - began < 10
    for rank, own in enumerate(y):
        assert all_nan(own)
        with pytest.raises(PeerError, match="called"):
            ranks.kernels[rank].check()


def test_arguments_are_refused_before_the_launch(cuda_device: torch.device) -> None:
    """By name, got and wanted; the buffer is as before."""
    layer = layer_of(cuda_device, 1)
    ranks = ranks_of(cuda_device, layer, "bf16")
    want = ranks.forward(layer)
    x, ids, weights = layer.x[0], layer.ids[0], layer.weights[0]
    off_by_one = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    for arguments, name in (
        ((x[:, :256].contiguous(), ids, weights, layer.gate_up, layer.down), r"\b(x|w_gate_up)\b"),
        ((x.float(), ids, weights, layer.gate_up, layer.down), r"\b(x|y)\b"),
        ((x, ids.short(), weights, layer.gate_up, layer.down), "topk_idx"),
        ((x, ids[1:], weights, layer.gate_up, layer.down), r"\b(x|topk_idx|topk_weights)\b"),
        ((x, ids, weights.double(), layer.gate_up, layer.down), "topk_weights"),
        ((x, ids, weights, layer.gate_up[:-1], layer.down), "w_gate_up"),
        ((x, ids, weights, layer.gate_up, layer.down[:, :, :128].contiguous()), "w_gate_up|w_down"),
        ((x, ids, weights, layer.gate_up, layer.down.float()), "w_down"),
        (
            (x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1), layer.gate_up, layer.down),
            "number of tokens is 600",
        ),
        ((x.t().contiguous().t(), ids, weights, layer.gate_up, layer.down), r"\b(x|y)\b"),
        ((off_by_one, ids, weights, layer.gate_up, layer.down), r"\bx\b.*16"),
    ):
        with pytest.raises(RuntimeError, match=name):
            ranks.layers[0].forward(LayerInputs(*arguments))
    have = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    ranks.use_sms(have + 2)
    with pytest.raises(RuntimeError, match=f"num_sms is {have + 2}"):
        start(ranks, 0, layer)
    ranks.use_sms(have)
    assert_same_bits(ranks.forward(layer), want, "after refusals")
    ranks.check()


@pytest.mark.parametrize("precision", [FP8])
def test_arguments_of_fp8_are_refused_before_the_launch(cuda_device: torch.device, precision: str) -> None:
    """As above: of the copies and their scales."""
    layer = layer_of(cuda_device, 1)
    ranks = ranks_of(cuda_device, layer, precision)
    want = ranks.forward(layer)
    inputs, copies = inputs_of(layer, 0), ranks.forward_copies(0, layer)
    assert copies is not None
    gate_up, down = copies
    assert gate_up.codes is not None
    assert down.codes is not None
    for x, of_gate_up, of_down, name in (
        (inputs.x[:, :256].contiguous(), gate_up, down, r"\bx\b"),
        (inputs.x.float(), gate_up, down, r"\bx\b.*bfloat16 or float8_e4m3fn"),
        (inputs.x, gate_up._replace(codes=gate_up.codes[:-1]), down, "w_gate_up"),
        (inputs.x, gate_up._replace(codes=layer.gate_up), down, "w_gate_up.*float8_e4m3fn"),
        (inputs.x, gate_up._replace(scales=gate_up.scales[:, 1:]), down, "gate_up_sf"),
        (inputs.x, gate_up, down._replace(scales=down.scales.double()), "down_sf.*float32"),
        (inputs.x, gate_up, down._replace(scales=down.scales.transpose(1, 2)), "down_sf"),
        (inputs.x, gate_up, down._replace(codes=down.codes[:, 1:]), "w_down"),
    ):
        with pytest.raises(RuntimeError, match=name):
            ranks.layers[0].forward(inputs._replace(x=x), copies=(of_gate_up, of_down))
    assert_same_bits(ranks.forward(layer), want, "after refusals")
    ranks.check()
