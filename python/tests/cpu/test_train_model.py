"""The language model of the demonstration job against definitions written out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mega_moe import MoEBuffer
from mega_moe.demo.config import Config
from mega_moe.demo.model import (
    Attention,
    LanguageModel,
    Router,
    balance_loss,
    initialize,
    rotary_table,
    rotate,
)

from ._train import small

CONFIG = small()


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    made = LanguageModel(CONFIG, CONFIG.num_experts)
    initialize(made, seed=0, first_expert=0)
    torch.nn.init.normal_(made.head.weight)  # it starts at zero, where every prediction is alike
    with MoEBuffer(
        None,
        num_experts=CONFIG.num_experts,
        max_tokens_per_rank=1024,
        top_k=CONFIG.top_k,
        hidden=CONFIG.hidden,
        intermediate=CONFIG.intermediate,
        backend="grouped",
        dtype=torch.float32,
        device="cpu",
    ) as buffer:
        for block in made.layers():
            block.experts.attach(buffer)
        yield made


def random_bytes(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_shapes(model: LanguageModel) -> None:
    out = model(random_bytes(3, 17))
    assert out.logits_BSV.shape == (3, 17, 256)
    assert out.mean_prob_LE.shape == out.load_LE.shape == (CONFIG.num_layers, CONFIG.num_experts)
    torch.testing.assert_close(out.load_LE.sum(dim=1), torch.full((2,), 3.0 * 17 * CONFIG.top_k))
    torch.testing.assert_close(out.mean_prob_LE.sum(dim=1), torch.ones(2))
    assert not out.load_LE.requires_grad


def test_future_bytes_never_influence_a_prediction(model: LanguageModel) -> None:
    tokens = random_bytes(1, 32)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 7) % 256
    before, after = model(tokens).logits_BSV, model(changed).logits_BSV
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-5)
    # The change does reach what may see it, so the test above can fail.
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=-1).min() > 1e-2


def test_past_bytes_do_influence_a_prediction(model: LanguageModel) -> None:
    tokens = random_bytes(1, 32)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 7) % 256
    assert (model(tokens).logits_BSV[:, 31] - model(changed).logits_BSV[:, 31]).abs().max() > 1e-5


def test_rotary_embedding_turns_pairs_by_position_times_frequency() -> None:
    config = small(head_dim=8)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate(x, *(t.double() for t in rotary_table(5, config, torch.device("cpu"))))
    for position in range(5):
        for i in range(4):
            angle = torch.tensor(position * config.rope_theta ** (-2 * i / 8), dtype=torch.float64)
            pair = torch.complex(x[position, i], x[position, i + 4]) * torch.polar(
                torch.ones_like(angle), angle
            )
            want = torch.stack((pair.real, pair.imag))
            torch.testing.assert_close(turned[position, [i, i + 4]], want, rtol=1e-5, atol=1e-5)


def test_attention_equals_a_loop_over_heads_and_positions() -> None:
    torch.manual_seed(0)
    attention = Attention(CONFIG).double()
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
    length, size = 9, CONFIG.head_dim
    x = torch.randn(1, length, CONFIG.hidden, dtype=torch.float64)
    cos, sin = (t.double() for t in rotary_table(length, CONFIG, x.device))

    def normalized(v: Tensor, gain: Tensor) -> Tensor:
        return v / (v.square().mean(dim=-1, keepdim=True) + CONFIG.norm_eps).sqrt() * gain

    heads = []
    for head in range(CONFIG.num_heads):
        shared = head // (CONFIG.num_heads // CONFIG.num_kv_heads)  # the key/value head of this query head
        mine, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
        q = rotate(normalized(x[0] @ attention.q_proj.weight[mine].T, attention.q_norm.weight), cos, sin)
        k = rotate(normalized(x[0] @ attention.k_proj.weight[theirs].T, attention.k_norm.weight), cos, sin)
        v = x[0] @ attention.v_proj.weight[theirs].T
        rows = [(q[s] @ k[: s + 1].T / size**0.5).softmax(dim=0) @ v[: s + 1] for s in range(length)]
        heads.append(torch.stack(rows))
    want = torch.cat(heads, dim=-1) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(x, cos, sin)[0], want, rtol=1e-9, atol=1e-9)


def test_router_takes_the_most_probable_experts_and_normalises_their_weights() -> None:
    router = Router(small(num_experts=4, top_k=2, hidden=4))
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 4.0], [9.0, 0.0, 0.0, 8.0]])
    routing = router(logits)
    assert routing.expert_idx_TK.tolist() == [[1, 2], [2, 3], [0, 3]]
    first = 1 / (1 + torch.exp(torch.tensor(-1.0)))  # each pair of logits differs by one
    torch.testing.assert_close(routing.weights_TK, torch.stack((first, 1 - first)).expand(3, 2))
    assert routing.load_E.tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(routing.mean_prob_E, logits.softmax(dim=1).mean(dim=0))


def test_router_learns_from_the_weights_of_its_choice() -> None:
    router = Router(CONFIG)
    torch.nn.init.normal_(router.weight)
    routing = router(torch.randn(16, CONFIG.hidden))
    routing.weights_TK[:, 0].sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.norm() > 1e-2


def test_balance_loss_by_hand() -> None:
    load = torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
    # Layer 0: 4 * (0.75 * 0.5 + 0.25 * 0.25) = 1.75; layer 1 is even: 1.
    assert balance_loss(probs, load).item() == pytest.approx((1.75 + 1) / 2)


def test_balance_loss_is_one_where_even_and_e_where_one_expert_has_all() -> None:
    even = torch.full((1, 8), 1 / 8)
    assert balance_loss(even, torch.full((1, 8), 5.0)).item() == pytest.approx(1)
    alone = torch.zeros(1, 8)
    alone[0, 3] = 1
    assert balance_loss(alone, 40 * alone).item() == pytest.approx(8)


def test_weights_do_not_depend_on_how_the_experts_are_spread() -> None:
    def built(num_local_experts: int, first_expert: int, seed: int = 3) -> LanguageModel:
        made = LanguageModel(CONFIG, num_local_experts)
        initialize(made, seed, first_expert)
        return made

    whole, upper, other = built(8, 0), built(4, 4), built(8, 0, seed=4)
    for name, parameter in upper.named_parameters():
        mine = whole.get_parameter(name)
        assert torch.equal(parameter, mine[4:] if ".experts." in name else mine), name
    assert not torch.equal(whole.blocks[0].experts.down_proj, other.blocks[0].experts.down_proj)
    first, second = whole.blocks[0].experts.gate_up_proj[:2]
    assert (first - second).abs().mean() > 1e-2


def test_first_prediction_is_uniform() -> None:
    made = LanguageModel(CONFIG, CONFIG.num_experts)
    initialize(made, seed=0, first_expert=0)
    assert not made.head.weight.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads is 4, must be a multiple of num_kv_heads = 3"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"top_k": 9}, "top_k is 9, must be at most num_experts = 8"),
        ({"steps": 0}, "steps is 0, must be positive"),
        ({"minutes": -1}, "minutes is -1, must not be negative"),
    ],
)
def test_config_refuses_fields_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_default_sizes_fit_the_fused_kernels() -> None:
    assert Config().hidden % 256 == 0
    assert Config().intermediate % 128 == 0
