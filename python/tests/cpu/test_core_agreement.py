"""Agreement at construction, with other ranks' words made up; real processes are in test_core_ep_faults.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from mega_moe import PeerError
from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.group import Control, agree, check_timeout

SETTINGS: dict[str, Any] = {
    "num_experts": 8,
    "max_tokens_per_rank": 64,
    "precision": "bf16",
    "backend": "auto",
    "strict": False,
}
FACTS = RankFacts(package_version="0.1", torch_version="2.13.0", kernels_sha256="abc")


class Told(Control):
    """Control of a group whose other ranks have said ``others``."""

    def __init__(self, *others: Any) -> None:
        self.others = others
        self.said: list[Any] = []
        self.size = 1 + len(others)

    def gather(self, value: Any, what: str) -> list[Any]:
        assert what == "construction of MoEBuffer"
        self.said.append(value)
        return [value, *self.others]

    def exchange(self, header: Tensor, what: str) -> Tensor:
        raise AssertionError("construction sends no header")

    def close(self) -> None:
        raise AssertionError("whoever built the control closes it")


def test_ranks_that_agree_get_the_facts_of_all() -> None:
    other = replace(FACTS, host="node1", device="cpu")
    assert agree(Told(((SETTINGS, other), None)), SETTINGS, FACTS, None) == [FACTS, other]
    assert agree(Control(), SETTINGS, FACTS, None) == [FACTS]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("num_experts", 16),
        ("max_tokens_per_rank", 128),
        ("precision", "fp8"),
        ("backend", "grouped"),
        ("strict", True),
    ],
)
def test_any_setting_that_differs_is_named_with_the_value_of_every_rank(name: str, theirs: Any) -> None:
    others = ((SETTINGS, FACTS), None), (({**SETTINGS, name: theirs}, FACTS), None)
    with pytest.raises(ValueError, match=f"^{name}: ranks disagree") as caught:
        agree(Told(*others), SETTINGS, FACTS, None)
    mine = SETTINGS[name]
    assert f"(rank 0: {mine!r}, rank 1: {mine!r}, rank 2: {theirs!r})" in str(caught.value)


@pytest.mark.parametrize("name", ["package_version", "torch_version", "kernels_sha256"])
def test_versions_that_differ_are_named_with_both_values(name: str) -> None:
    theirs = ((SETTINGS, replace(FACTS, **{name: "other"})), None)
    with pytest.raises(ValueError, match=rf"^{name}: .*rank 0: '{getattr(FACTS, name)}', rank 1: 'other'"):
        agree(Told(theirs), SETTINGS, FACTS, None)


def test_a_rank_without_the_library_is_not_of_the_same_build() -> None:
    with pytest.raises(ValueError, match=r"kernels_sha256: .*rank 1: None"):
        agree(Told(((SETTINGS, replace(FACTS, kernels_sha256=None)), None)), SETTINGS, FACTS, None)


def test_a_cpu_and_a_gpu_in_one_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device type: .*rank 0: 'cpu', rank 1: 'cuda'"):
        agree(Told(((SETTINGS, replace(FACTS, device="cuda:0")), None)), SETTINGS, FACTS, None)


@pytest.mark.parametrize("name", ["host", "device_name", "python_version", "num_sms"])
def test_facts_that_may_differ(name: str) -> None:
    other = replace(FACTS, **{name: "other"})
    assert agree(Told(((SETTINGS, other), None)), SETTINGS, FACTS, None)[1] == other


def test_my_own_error_comes_first_and_is_told() -> None:
    control = Told(((None, None), "ValueError: theirs"))
    with pytest.raises(TypeError, match=r"^mine$"):
        agree(control, SETTINGS, None, TypeError("mine"))
    (((settings, facts), why),) = control.said
    assert (settings, facts, why) == (None, None, "TypeError: mine")


def test_the_error_of_another_rank_is_named_before_any_difference() -> None:
    others = (
        ((SETTINGS, FACTS), None),
        ((None, None), "ValueError: hidden: got 0"),
        ((None, None), "TypeError: b"),
    )
    with pytest.raises(PeerError) as caught:
        agree(Told(*others), {**SETTINGS, "num_experts": 9}, FACTS, None)
    assert str(caught.value) == (
        "rank 0: construction of MoEBuffer was refused by rank 2: ValueError: hidden: got 0; rank 3: TypeError: b"
    )


def test_arrival_timeout() -> None:
    assert check_timeout(None) is None
    assert check_timeout(3) == 3.0
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"arrival_timeout: got .*, want finite seconds > 0"):
            check_timeout(wrong)
    for wrong in ("3", True, [3]):
        with pytest.raises(TypeError, match=r"arrival_timeout: got .*, want seconds or None"):
            check_timeout(wrong)  # type: ignore[arg-type]
