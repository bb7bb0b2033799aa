"""`mega_moe.route` on a CPU: values, refusals, and ranks that disagree."""

from __future__ import annotations

import pytest
import torch

import mega_moe
from mega_moe._backends.choice.decide import why_no_kernel_router
from mega_moe._backends.choice.facts import RankFacts, Variant
from mega_moe._backends.choice.request import Request

SIZES = dict(num_experts=8, max_tokens_per_rank=16, top_k=3, hidden=64, intermediate=32)


@pytest.fixture
def buffer() -> mega_moe.MoEBuffer:
    return mega_moe.MoEBuffer(**SIZES, device="cpu", backend="reference")


def test_statistics_of_one_rank(buffer: mega_moe.MoEBuffer) -> None:
    ids = torch.tensor([[0, 5, -1], [5, 7, 0], [-1, -1, -1], [5, 5, 5]])
    got = mega_moe.route(ids, buffer=buffer)
    assert buffer.router == "torch"
    assert buffer.router_reason
    assert got.tokens_per_expert.tolist() == [2, 0, 0, 0, 0, 5, 0, 1]
    assert got.tokens_per_rank.tolist() == [4]
    assert got.residents_by_first.tolist() == [2, 0, 0, 0, 0, 1, 0, 0]
    assert got.residents_by_last.tolist() == [0, 0, 0, 0, 0, 2, 0, 1]
    assert (int(got.num_rows), int(got.num_residents), int(got.num_chunks), int(got.status)) == (8, 3, 1, 0)
    assert all(part.dtype == torch.int32 for part in got)


def test_no_tokens(buffer: mega_moe.MoEBuffer) -> None:
    got = mega_moe.route(torch.empty(0, 3, dtype=torch.int32), buffer=buffer)
    assert got.tokens_per_expert.tolist() == [0] * 8
    assert int(got.num_chunks) == 1


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (torch.zeros(2, 3), None, TypeError, "topk_idx: got torch.float32, want one of int32, int64"),
        (
            torch.zeros(2, 4, dtype=torch.int64),
            None,
            ValueError,
            r"topk_idx: got shape \(2, 4\), want \(T, 3\)",
        ),
        (
            torch.zeros(17, 3, dtype=torch.int64),
            None,
            ValueError,
            "got 17 tokens, the buffer was built for 16",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(2, 3, dtype=torch.float64),
            TypeError,
            "topk_weights",
        ),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 3), ValueError, "topk_weights: got shape"),
        (torch.full((2, 3), 8), None, ValueError, r"topk_idx\[0, 0\]: got expert 8, want -1 or 0 to 7"),
        (torch.full((2, 3), -2), None, ValueError, r"got expert -2"),
    ],
)
def test_bad_arguments_are_named(
    buffer: mega_moe.MoEBuffer,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        mega_moe.route(ids, weights, buffer=buffer)
    assert int(mega_moe.route(torch.zeros(2, 3, dtype=torch.int64), buffer=buffer).num_rows) == 6


def test_destroyed_buffer_refuses(buffer: mega_moe.MoEBuffer) -> None:
    buffer.destroy()
    with pytest.raises(mega_moe.MegaMoEError, match="destroyed"):
        mega_moe.route(torch.zeros(2, 3, dtype=torch.int64), buffer=buffer)


def test_buffer_is_checked() -> None:
    with pytest.raises(TypeError, match="buffer: got int, want MoEBuffer"):
        mega_moe.route(torch.zeros(2, 3, dtype=torch.int64), buffer=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (True, TypeError), (None, TypeError), (float("inf"), ValueError)]
)
def test_progress_timeout_is_checked(value: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="progress_timeout"):
        mega_moe.MoEBuffer(**SIZES, device="cpu", backend="reference", progress_timeout=value)


def hopper(**changes: object) -> RankFacts:
    known: dict[str, object] = dict(
        device="cuda:0",
        compute_capability=(9, 0),
        num_sms=132,
        library_loaded=True,
        variants=(Variant("route", "90a", "none"),),
    )
    return RankFacts(**(known | changes))  # type: ignore[arg-type]


def request(hidden: int = 2048, num_ranks: int = 1, num_reserved_sms: int = 0) -> Request:
    return Request(8, 16, 2, hidden, 128, num_ranks=num_ranks, num_reserved_sms=num_reserved_sms)


@pytest.mark.parametrize(
    ("wanted", "facts", "reason"),
    [
        (request(), [hopper()], None),
        (request(hidden=100), [hopper()], "hidden is 100, must be a multiple of 8"),
        (request(), [hopper(compute_capability=(8, 0))], "no routing kernel for sm_80"),
        (
            request(),
            [hopper(device="cpu", compute_capability=None)],
            "needs an NVIDIA GPU, the device is cpu",
        ),
        (request(), [hopper(library_loaded=False, library_reason="gone")], "not loaded: gone"),
        (request(num_reserved_sms=132), [hopper()], "leaves none of 132 SMs"),
        (
            request(num_ranks=2),
            [hopper(machine="a"), hopper(machine="b")],
            "the group spans 2 hosts",
        ),
        (
            request(num_ranks=2),
            [hopper(device_uuid="a", peer_access=(("b", False),)), hopper(device_uuid="b", device="cuda:1")],
            "no peer access between cuda:0 and cuda:1",
        ),
    ],
)
def test_kernel_router_is_refused_with_a_reason(
    wanted: Request, facts: list[RankFacts], reason: str | None
) -> None:
    reasons = why_no_kernel_router(wanted, facts)
    assert (reasons == []) if reason is None else any(reason in text for text in reasons), reasons
