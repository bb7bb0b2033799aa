"""What judges the backward in fp8 on a GPU: it takes the emulation and small errors, and refuses each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.plain import quantize
from mega_moe._backends.plain.quantize import wgrad_gemm
from mega_moe._base.layer import Gradients
from mega_moe._base.mode import Mode

# What is tested here lies alongside the GPU tests that use it.
from ..gpu import _backward_fp8, _forward, _tensor_core  # noqa: TID252
from ..gpu._backward import random_dy  # noqa: TID252
from ..gpu._forward_ranks import shape_of  # noqa: TID252
from ..gpu._virtual import random_ids  # noqa: TID252

CPU = torch.device("cpu")
EXPERTS, RANKS = 6, 2


@pytest.fixture(scope="module")
def layer() -> _forward.Layer:
    ids = random_ids("masked", [300, 250], 3, EXPERTS, CPU)
    return _forward.random_layer(ids, _forward.random_experts(CPU, EXPERTS, 512, 256), weights="signed")


@pytest.fixture(scope="module")
def dy(layer: _forward.Layer) -> list[Tensor]:
    return random_dy(layer)


@pytest.fixture(scope="module")
def judge(layer: _forward.Layer, dy: list[Tensor]) -> _backward_fp8.Judge:
    return _backward_fp8.Judge(layer, dy)


def emulated(layer: _forward.Layer, dy: list[Tensor], shape: Shape | None = None) -> list[Gradients]:
    """As the ranks' kernels would give it."""
    got, own = _backward_fp8.emulated_gradients(layer, dy, shape), EXPERTS // RANKS
    return [
        Gradients(
            got.dx[rank].clone(),
            got.dtopk[rank].clone(),
            got.dw_gate_up[rank * own : (rank + 1) * own].bfloat16(),
            got.dw_down[rank * own : (rank + 1) * own].bfloat16(),
        )
        for rank in range(RANKS)
    ]


def test_the_emulation_passes(layer: _forward.Layer, dy: list[Tensor], judge: _backward_fp8.Judge) -> None:
    got = emulated(layer, dy)
    judge.assert_right(got)
    judge.assert_right([own._replace(dx=None, dw_down=None) for own in got])


def test_an_error_of_half_the_tolerance_passes(
    layer: _forward.Layer, dy: list[Tensor], judge: _backward_fp8.Judge
) -> None:
    """1.5e-2 of one element in a hundred: bf16 holds no smaller one."""
    made = torch.Generator().manual_seed(1)

    def noisy(value: Tensor | None) -> Tensor:
        assert value is not None
        some = torch.rand(value.shape, generator=made) < 0.01
        return (value.float() * (1 + 1.5e-2 * torch.randn(value.shape, generator=made) * some)).to(
            value.dtype
        )

    judge.assert_right([Gradients(*map(noisy, own)) for own in emulated(layer, dy)])


@pytest.mark.parametrize("name", ["dtopk", "dw_gate_up", "dw_down"])
def test_gradients_of_few_rows_are_judged_too(name: str) -> None:
    ids = random_ids("random", [7, 3], 2, EXPERTS, CPU)
    few = _forward.random_layer(ids, _forward.random_experts(CPU, EXPERTS, 512, 256), weights="signed")
    dy = random_dy(few)
    judge = _backward_fp8.Judge(few, dy)
    got = emulated(few, dy)
    judge.assert_right(got)
    part(getattr(got[0], name)).mul_(1.3)
    with pytest.raises(AssertionError, match=f"{name}: .* rows"):
        judge.assert_right(got)


def part(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def other_weights(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    """Of a third of the experts, scales of w_down that are a little off."""
    down = layer.down.clone()
    down[:2] *= 1 + 2.0**-6
    got[:] = emulated(replace(layer, down=down), dy)


def swapped_halves(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    """Gate and up change places in the gradient of their weight."""
    gate, up = part(got[0].dw_gate_up).chunk(2, 1)
    got[0] = got[0]._replace(dw_gate_up=torch.cat((up, gate), 1))


def unweighted(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    got[:] = emulated(replace(layer, weights=[own.abs() for own in layer.weights]), dy)


def one_token(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    part(got[1].dx)[40] *= 1.2


def one_slot(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    part(got[0].dtopk)[:, 1] *= 1.05


def a_lost_row(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    """One row of one expert is missing in its dW."""
    at = int((layer.ids[0] >= 0).any(1).nonzero()[0])
    ids = [own.clone() for own in layer.ids]
    ids[0][at] = -1
    other = emulated(replace(layer, ids=ids), dy)
    got[:] = [a._replace(dw_gate_up=b.dw_gate_up, dw_down=b.dw_down) for a, b in zip(got, other)]


def a_masked_slot(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    part(got[0].dtopk)[(layer.ids[0] < 0)] = 1e-3


def a_nan(layer: _forward.Layer, dy: list[Tensor], got: list[Gradients]) -> None:
    part(got[1].dw_down)[2, 3, 4] = torch.nan


@pytest.mark.parametrize(
    "fault",
    [
        other_weights,
        swapped_halves,
        unweighted,
        one_token,
        one_slot,
        a_lost_row,
        a_masked_slot,
        a_nan,
    ],
)
def test_a_fault_is_refused(
    layer: _forward.Layer,
    dy: list[Tensor],
    judge: _backward_fp8.Judge,
    fault: Callable[[_forward.Layer, list[Tensor], list[Gradients]], None],
) -> None:
    got = emulated(layer, dy)
    fault(layer, dy, got)
    with pytest.raises(AssertionError, match="rank"):
        judge.assert_right(got)


@pytest.fixture(scope="module")
def in_fp8(layer: _forward.Layer) -> Shape:
    """Of buffers whose weights' gradients are of e4m3 operands too."""
    return shape_of(layer, mode=Mode("fp8", "fp8", "fp8"))


@pytest.fixture(scope="module")
def judge_of_fp8(layer: _forward.Layer, dy: list[Tensor], in_fp8: Shape) -> _backward_fp8.Judge:
    return _backward_fp8.Judge(layer, dy, in_fp8)


def with_noise(got: list[Gradients], size: float) -> list[Gradients]:
    """On the weights' gradients."""
    made = torch.Generator().manual_seed(1)

    def noisy(value: Tensor | None) -> Tensor:
        of_one = 1 + size * torch.randn(part(value).shape, generator=made)
        return (part(value).float() * of_one).to(part(value).dtype)

    return [own._replace(dw_gate_up=noisy(own.dw_gate_up), dw_down=noisy(own.dw_down)) for own in got]


def test_noise_on_weights_gradients_is_refused_in_either_form(
    layer: _forward.Layer,
    dy: list[Tensor],
    judge: _backward_fp8.Judge,
    judge_of_fp8: _backward_fp8.Judge,
    in_fp8: Shape,
) -> None:
    for own, got in ((judge, emulated(layer, dy)), (judge_of_fp8, emulated(layer, dy, in_fp8))):
        own.assert_right(with_noise(got, 1e-3))
        with pytest.raises(AssertionError, match=r"dw_gate_up: [45]\..*e-03 from the emulation"):
            own.assert_right(with_noise(got, 4e-3))


def test_other_sums_than_the_tensor_cores_are_refused(
    layer: _forward.Layer, dy: list[Tensor], judge: _backward_fp8.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backward_fp8, "block_product_of", lambda device: _tensor_core.in_torch)
    got = emulated(layer, dy)
    with pytest.raises(AssertionError, match=r"dx: .* from the emulation"):
        judge.assert_right(got)
    _backward_fp8.Judge(layer, dy).assert_right(got)


def scales_of_the_other(left: Tensor, right: Tensor, *how: Any) -> Tensor:
    """Of single columns for x and h, and of 128 for dz and dy."""
    return wgrad_gemm(right, left, *how).T


def blocks_begin_elsewhere(left: Tensor, right: Tensor, *how: Any) -> Tensor:
    """64 rows later."""
    return wgrad_gemm(*(pad(value, (0, 0, 64, 0)) for value in (left, right)), *how)


def of_bf16(left: Tensor, right: Tensor, *how: Any) -> Tensor:
    return (left.double().T @ right.double()).float()


@pytest.mark.parametrize("fault", [scales_of_the_other, blocks_begin_elsewhere, of_bf16])
@pytest.mark.parametrize("name", ["dw_gate_up", "dw_down"])
def test_a_fault_of_gradients_in_fp8_is_refused(
    layer: _forward.Layer,
    dy: list[Tensor],
    judge_of_fp8: _backward_fp8.Judge,
    in_fp8: Shape,
    fault: Callable[..., Tensor],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantize, "wgrad_gemm", fault)
    nothing = Gradients(None, None, None, None)
    alone = [nothing._replace(**{name: getattr(own, name)}) for own in emulated(layer, dy, in_fp8)]
    with pytest.raises(AssertionError, match=f"{name}: .* from the emulation"):
        judge_of_fp8.assert_right(alone)


@pytest.mark.parametrize("clamp", [0.5, 2.0])
@pytest.mark.parametrize("taken", ["none", "a little less", "a little more", "the same"])
def test_a_clamp_that_is_not_the_layers_is_refused(clamp: float, taken: str) -> None:
    """Next to it no gate and no up lies, but many right at it, so the least step turns what passes."""
    ids = random_ids("masked", [300, 250], 3, EXPERTS, CPU)
    random = _forward.random_layer(ids, _forward.random_experts(CPU, EXPERTS, 512, 256), weights="signed")
    layer = replace(_backward_fp8.with_exact_gate_and_up(random), clamp=clamp)
    dy = random_dy(layer)
    other = {
        "none": None,
        "a little less": clamp - 1 / 16,
        "a little more": clamp + 1 / 16,
        "the same": clamp,
    }
    got = emulated(replace(layer, clamp=other[taken]), dy)
    judge = _backward_fp8.Judge(layer, dy)
    if taken == "the same":
        judge.assert_right(got)
        return
    with pytest.raises(AssertionError, match="rank"):
        judge.assert_right(got)
    with pytest.raises(AssertionError, match="dw_gate_up"):
        judge.assert_right([own._replace(dx=None, dtopk=None, dw_down=None) for own in got])


def test_gate_and_up_are_exact_where_they_are_said_to_be() -> None:
    """Sums of codes within 14 bits, whatever their order, and sixteenths that bf16 holds."""
    ids = random_ids("random", [64], 2, EXPERTS, CPU)
    random = _forward.random_layer(ids, _forward.random_experts(CPU, EXPERTS, 512, 256))
    layer = _backward_fp8.with_exact_gate_and_up(random)
    sixteenths = layer.x[0].double() @ layer.gate_up.double().flatten(0, 1).T * 16
    assert bool((sixteenths == sixteenths.round()).all())
    assert int(sixteenths.abs().max()) <= 256
    at_clamp = (sixteenths.abs() == 8).double().mean()
    assert 0.01 < float(at_clamp) < 0.2
    assert 128 * (448 * 448 >> 12) < 2**14
