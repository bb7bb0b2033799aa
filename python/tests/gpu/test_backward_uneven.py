"""The fused backward where some experts get many times the rows of others: values alone, no times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ._backward import assert_right, assert_same_bits, exact_gradients, random_dy
from ._backward_ranks import new_backward_ranks
from ._forward import Layer, random_experts, random_layer
from ._forward_ranks import pool_of, shape_of

pytestmark = pytest.mark.timeout(120, method="thread")

MOST, EXPERTS, TOP_K = 2000, 16, 4

# Share of each expert before the slots of a token are made distinct, by expert.
LOADS = {
    "four times on one": [4.0 if expert == 5 else 1.0 for expert in range(EXPERTS)],
    "falling as 1/n": [1.0 / (1 + expert) for expert in range(EXPERTS)],
    "half of them empty": [float(expert % 2) for expert in range(EXPERTS)],
    "all on the last four": [float(expert >= EXPERTS - TOP_K) for expert in range(EXPERTS)],
    "two rows alongside the rest": [1.0 if expert < TOP_K else 1e-3 for expert in range(EXPERTS)],
}


def uneven_ids(load: str, tokens: list[int], device: torch.device) -> list[Tensor]:
    """Distinct experts for each token, drawn with these shares; int64, or int32 on odd ranks."""
    made = torch.Generator(device).manual_seed(len(load))
    shares = torch.tensor(LOADS[load], device=device)
    ids = []
    for rank, count in enumerate(tokens):
        # The largest of log(share) + Gumbel noise are draws without replacement.
        noise = -torch.empty(count, EXPERTS, device=device).exponential_(generator=made).log()
        own = (shares.log() + noise).topk(TOP_K, dim=1).indices
        ids.append(own.to(torch.int32 if rank % 2 else torch.int64).contiguous())
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # launches on other streams read them
    return ids


def uneven_layer(load: str, num_ranks: int, device: torch.device) -> Layer:
    tokens = [MOST // num_ranks - 9 * rank for rank in range(num_ranks)]
    return random_layer(
        uneven_ids(load, tokens, device), random_experts(device, EXPERTS, 512, 384), weights="signed"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("chunks", ["one chunk", "many chunks"])
@pytest.mark.parametrize("load", LOADS)
def test_uneven_loads(cuda_device: torch.device, load: str, chunks: str, num_ranks: int) -> None:
    """Both dtypes of the weights' gradients, the same bits on few SMs."""
    layer = uneven_layer(load, num_ranks, cuda_device)
    dy = random_dy(layer)
    want = exact_gradients(layer, dy)
    pool = pool_of(chunks, shape_of(layer))
    ranks = new_backward_ranks(cuda_device, layer, pool_rows=pool)
    wide = ranks.backward(layer, dy, dw_dtype=torch.float32)
    assert_right(layer, dy, wide, want)
    got = ranks.backward(layer, dy)
    assert_right(layer, dy, got, want)
    for own, other in zip(got, wide):
        for narrow, sums in zip(own[2:], other[2:]):
            # The sums of both are the same ones: bf16 is rounded from them once.
            assert torch.equal(narrow, sums.bfloat16())
    ranks.use_sms(6)
    assert_same_bits(ranks.backward(layer, dy), got, "on 6 SMs")
    ranks.check()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_more_rows_than_a_part_beside_few(cuda_device: torch.device, share: float) -> None:
    """One expert of a rank has several parts of 16384 rows, the others a few rows each, or an even rest."""
    tokens = 20000
    made = torch.Generator(cuda_device).manual_seed(1)
    ids = torch.randint(0, 8, (tokens, 2), generator=made, device=cuda_device)
    hot = torch.rand(tokens, generator=made, device=cuda_device) < share
    ids[hot] = 3
    ids[:40, 1] = torch.arange(40, device=cuda_device) % 8
    layer = random_layer([ids], random_experts(cuda_device, 8, 512, 256), weights="signed")
    assert int((ids == 3).sum()) > 16384
    dy = random_dy(layer)
    want = exact_gradients(layer, dy)
    ranks = new_backward_ranks(cuda_device, layer)
    for dtype in (torch.bfloat16, torch.float32):
        assert_right(layer, dy, ranks.backward(layer, dy, dw_dtype=dtype), want)
    ranks.check()
