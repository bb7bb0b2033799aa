"""Every rounding of bf16 with a clamp, fp8 and fp8_bwd against a second implementation, row by row from the definition.

The second implementation rounds with its own tables, dequantizes each block with loops and sums in fp64. The two differ
where fp32 sums round another way, which flips a bf16 or e4m3 rounding here and there; a rounding left out, added or
put in another place costs five times `SAME` or more, as the planted faults below show.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mega_moe._backends.plain import quantize
from mega_moe.testing import Gradients, Problem, random_problem, relative_l2

from ._layer import assert_close, assert_same_bits, exact, make_buffer, results

SAME = 2e-4
BLOCK = 128
# e4m3 without infinities: sign, 4 bits of exponent (bias 7), 3 bits of mantissa, 0x7F is NaN; non-negative values.
E4M3 = np.array(
    [(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
)


def round_e4m3(value: np.ndarray) -> np.ndarray:
    """Nearest e4m3 number, ties to the even code; beyond the largest: the largest."""
    size = np.abs(value)
    high = np.searchsorted(E4M3, size).clip(1, 126)
    low = high - 1
    up, down = E4M3[high] - size, size - E4M3[low]
    code = np.where((up < down) | ((up == down) & (high % 2 == 0)), high, low)
    return np.copysign(E4M3[code], value)


def round_bf16(value: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even."""
    whole = np.asarray(value, np.float32).view(np.uint32).astype(np.uint64)
    return (
        ((whole + 0x7FFF + ((whole >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)
    )


def dequantized(block: np.ndarray, power_of_two: bool = False, by_reciprocal: bool = False) -> np.ndarray:
    """A block with one scale, through e4m3 and back: what the product sees."""
    amax = np.abs(np.asarray(block, np.float32)).max()
    scale = np.float32(amax / np.float32(448)) or np.float32(1)
    if power_of_two:
        scale = np.float32(2.0 ** np.ceil(np.log2(float(scale))))
    block = np.asarray(block, np.float32)
    quotient = block * (np.float32(1) / scale) if by_reciprocal else block / scale
    return round_e4m3(quotient.astype(float)) * float(scale)


def through_rows(row: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    parts = [dequantized(row[start : start + BLOCK], power_of_two) for start in range(0, len(row), BLOCK)]
    return np.concatenate(parts)


def through_weight(weight: np.ndarray, power_of_two: bool) -> np.ndarray:
    out = np.empty(weight.shape)
    for i in range(0, weight.shape[0], BLOCK):
        for j in range(0, weight.shape[1], BLOCK):
            out[i : i + BLOCK, j : j + BLOCK] = dequantized(
                weight[i : i + BLOCK, j : j + BLOCK], power_of_two
            )
    return out


def through_blocks(rows: np.ndarray, *how: bool) -> np.ndarray:
    """Rows of one block, 128 columns a scale."""
    starts = range(0, rows.shape[1], BLOCK)
    return np.concatenate([dequantized(rows[:, at : at + BLOCK], *how) for at in starts], 1)


@dataclass(frozen=True)
class Emulation:
    """The roundings of one precision; each field that is not its default plants one fault."""

    fp8_forward: bool
    fp8_backward: bool
    clamp: float | None = None
    power_of_two: bool = False
    round_z: bool = True
    round_slots: bool = True
    quantize_dz: bool = True
    quantize_weights: bool = True
    gradient_at_the_clamp: bool = True
    fp8_dw: bool = False
    dz_of_dw_rounded: bool = False
    scale_of_each_column: bool = True
    power_of_two_dw: bool = True  # as all else is
    reciprocals_of_dw: bool = True

    def product(self, weight: np.ndarray, row: np.ndarray, fp8: bool) -> np.ndarray:
        """``weight [N, K]`` times ``row [K]``, in fp32."""
        if fp8:
            row = through_rows(row, self.power_of_two)
            weight = through_weight(weight, self.power_of_two) if self.quantize_weights else weight
        return (weight @ row).astype(np.float32).astype(float)

    def activation(self, z: np.ndarray) -> tuple[np.ndarray, ...]:
        """z -> gate, up, sigmoid(gate) in fp32, and where gradients pass.

        fp32 as the definition says: with a clamp many values of a block are equal but for the 8 bits of the other
        factor, and lie on ties of e4m3 that the last bit of fp32 decides.
        """
        gate, up = np.split(z, 2)
        passes = np.ones(len(gate), bool), np.ones(len(up), bool)
        if self.clamp is not None:
            c = self.clamp
            passes = (
                (gate <= c, np.abs(up) <= c) if self.gradient_at_the_clamp else (gate < c, np.abs(up) < c)
            )
            gate, up = np.minimum(gate, c), np.clip(up, -c, c)
        sigmoid = (1 / (1 + np.exp(-gate))).astype(np.float32)
        return gate.astype(np.float32), up.astype(np.float32), sigmoid, *passes

    def z(self, x: np.ndarray, w1: np.ndarray, fp8: bool) -> np.ndarray:
        z = self.product(w1, x, fp8)
        return round_bf16(z) if self.round_z else z

    def outer(self, rows: list[np.ndarray], columns: list[np.ndarray]) -> np.ndarray:
        """Sum of the outer products of an expert's rows."""
        a, b = np.array(rows), np.array(columns)
        if not self.fp8_dw:
            return a.T @ b
        total = np.zeros((a.shape[1], b.shape[1]))
        how = self.power_of_two and self.power_of_two_dw, self.reciprocals_of_dw
        for start in range(0, len(a), BLOCK):
            left, right = a[start : start + BLOCK], b[start : start + BLOCK]
            if self.scale_of_each_column:
                left = np.stack([dequantized(column, *how) for column in left.T])
            else:
                left = through_blocks(left, *how).T
            total += left @ through_blocks(right, *how)
        return total

    def layer(self, problem: Problem) -> Gradients:
        x, weights, w1, w2, dy = (
            t.double().numpy()
            for t in (problem.x, problem.topk_weights, problem.w_gate_up, problem.w_down, problem.dy)
        )
        y, dx = np.zeros_like(x), np.zeros_like(x)
        dtopk, dw1, dw2 = np.zeros_like(weights), np.zeros_like(w1), np.zeros_like(w2)
        end = round_bf16 if self.round_slots else np.asarray
        # Of each expert: rows of dz, x, dy and h, by token and slot.
        kept: dict[int, tuple[list[np.ndarray], ...]] = {}
        for t, slots in enumerate(problem.topk_idx.tolist()):
            for k, e in enumerate(slots):
                if e < 0:
                    continue
                w = np.float32(weights[t, k])
                gate, up, sigmoid, *_ = self.activation(self.z(x[t], w1[e], self.fp8_forward))
                h = gate * sigmoid * up * w
                y[t] += end(self.product(w2[e], h if self.fp8_forward else round_bf16(h), self.fp8_forward))

                fp8 = self.fp8_backward
                gate, up, sigmoid, pass_gate, pass_up = self.activation(self.z(x[t], w1[e], fp8))
                a = gate * sigmoid * up
                dh = self.product(w2[e].T, dy[t], fp8).astype(np.float32)
                dtopk[t, k] = dh @ a
                dgate = w * dh * up * sigmoid * (1 + gate * (1 - sigmoid)) * pass_gate
                dz = np.concatenate((dgate, w * dh * gate * sigmoid * pass_up))
                narrow = fp8 and self.quantize_dz
                dx[t] += end(self.product(w1[e].T, dz if narrow else round_bf16(dz), narrow))
                wide = self.fp8_dw and not self.dz_of_dw_rounded
                rows = dz if wide else round_bf16(dz), x[t], dy[t], round_bf16(a * w)
                for of_all, row in zip(kept.setdefault(e, ([], [], [], [])), rows):
                    of_all.append(row)
        for e, (dzs, xs, dys, hs) in kept.items():
            dw1[e], dw2[e] = self.outer(dzs, xs), self.outer(dys, hs)
        made = (round_bf16(y), round_bf16(dx), dtopk, round_bf16(dw1), round_bf16(dw2))
        return Gradients(*(torch.from_numpy(value) for value in made))


PRECISIONS = {
    "bf16": Emulation(False, False),
    "fp8": Emulation(True, True),
    "fp8_bwd": Emulation(False, True),
    "fp8, dW fp8": Emulation(True, True, fp8_dw=True),
    "fp8_bwd, dW fp8": Emulation(False, True, fp8_dw=True),
}


def settings(name: str) -> dict[str, str]:
    precision, _, dw = name.partition(", dW ")
    return {"precision": precision, "dw_precision": dw or "bf16"}


def small_problem() -> Problem:
    problem = random_problem(24, 256, 128, 4, 3, masked=0.2, seed=2)
    problem.topk_weights[:, 1] *= -1
    problem.topk_weights[3, 0] = 0
    # Exactly on the edge of the clamp below: gate = up = 1.
    problem.x[5] = 0
    problem.x[5, 0] = 1
    problem.w_gate_up[:, :, 0] = 1
    return problem


@functools.cache
def emulated(emulation: Emulation) -> Gradients:
    return emulation.layer(small_problem())


@functools.cache
def computed(precision: str, clamp: float | None, scale_format: str = "fp32") -> Gradients:
    problem = small_problem()
    with make_buffer(problem, **settings(precision), scale_format=scale_format) as buffer:
        return results(problem, buffer, clamp)


def distances(got: Gradients, want: Gradients) -> dict[str, float]:
    return {name: relative_l2(a, b) for name, a, b in zip(want._fields, got, want)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("clamp", [None, 1.0])
def test_reference_is_the_emulation(precision: str, clamp: float | None) -> None:
    want = emulated(replace(PRECISIONS[precision], clamp=clamp))
    found = distances(computed(precision, clamp), want)
    assert all(distance <= SAME for distance in found.values()), found


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "fp8, dW fp8", "fp8_bwd, dW fp8"])
def test_reference_is_the_emulation_with_power_of_two_scales(precision: str) -> None:
    want = emulated(replace(PRECISIONS[precision], power_of_two=True))
    got = computed(precision, None, "power_of_two")
    found = distances(got, want)
    assert all(distance <= SAME for distance in found.values()), found
    # And no other format is.
    apart = distances(computed(precision, None), want)
    assert all(distance > 5 * SAME for name, distance in apart.items() if name != "y"), apart
    assert (apart["y"] > 5 * SAME) == PRECISIONS[precision].fp8_forward
    if PRECISIONS[precision].fp8_dw:
        wrong = emulated(replace(PRECISIONS[precision], power_of_two=True, power_of_two_dw=False))
        apart = distances(got, wrong)
        assert all((distance > 5 * SAME) == name.startswith("dw_") for name, distance in apart.items()), apart


@pytest.mark.parametrize(
    ("precision", "fault", "shows"),
    [
        ("bf16", {"round_z": False}, "y"),
        ("bf16", {"round_slots": False}, "dx"),
        ("bf16", {"gradient_at_the_clamp": False, "clamp": 1.0}, "dw_gate_up"),
        ("fp8", {"round_z": False}, "y"),
        ("fp8", {"quantize_weights": False}, "y"),
        ("fp8", {"fp8_backward": False}, "dx"),
        ("fp8", {"quantize_dz": False}, "dx"),
        ("fp8_bwd", {"fp8_forward": True}, "y"),
        ("fp8_bwd", {"fp8_backward": False}, "dtopk"),
        ("fp8_bwd", {"quantize_dz": False}, "dx"),
        ("fp8, dW fp8", {"fp8_dw": False}, "dw_down"),
        ("fp8, dW fp8", {"dz_of_dw_rounded": True}, "dw_gate_up"),
        ("fp8, dW fp8", {"scale_of_each_column": False}, "dw_gate_up"),
        ("fp8, dW fp8", {"reciprocals_of_dw": False}, "dw_down"),
        ("fp8_bwd, dW fp8", {"scale_of_each_column": False}, "dw_down"),
    ],
    ids=str,
)
def test_a_misplaced_rounding_shows(precision: str, fault: dict[str, bool], shows: str) -> None:
    wrong = dataclasses.replace(PRECISIONS[precision], **fault)
    assert distances(computed(precision, wrong.clamp), emulated(wrong))[shows] > 5 * SAME


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "fp8, dW fp8", "fp8_bwd, dW fp8"])
def test_distance_of_fp8_from_fp64(precision: str) -> None:
    problem = random_problem(128, 512, 256, 8, 4)
    with make_buffer(problem, **settings(precision)) as buffer:
        found = distances(results(problem, buffer), exact(problem))
    low, high = (
        0.02,
        0.08,
    )  # e4m3 keeps 3 bits: each operand is 2.5 % off, the products in a row add up to 5 to 7 %
    assert found["y"] <= 6e-3 if precision.startswith("fp8_bwd") else low <= found["y"] <= high
    for name in ("dx", "dtopk", "dw_gate_up", "dw_down"):
        assert low <= found[name] <= high, found


def test_grouped_and_reference_agree_with_a_clamp() -> None:
    problem = small_problem()
    with make_buffer(problem, "grouped") as buffer:
        found = distances(results(problem, buffer, 1.0), computed("bf16", 1.0))
    # The grouped products give dh in bf16, hence not the emulation's bits.
    assert all(distance <= 6e-3 for distance in found.values()), found


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "fp8, dW fp8"])
def test_counts_that_fill_no_block(precision: str) -> None:
    problem = random_problem(hidden=256, intermediate=128, counts=[1, 7, 31, 33, 127, 129, 0, 44])
    with make_buffer(problem, **settings(precision)) as buffer:
        got = results(problem, buffer)
    assert_close(got, exact(problem), 0.12)  # of the worst token and expert
    for dw in (got.dw_gate_up, got.dw_down):
        assert torch.count_nonzero(dw[6]) == 0


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "fp8, dW fp8"])
def test_blocks_of_zeros(precision: str) -> None:
    problem = random_problem(24, 256, 128, 4, 2)
    problem.x[:, :128] = 0
    problem.x[5] = 0
    problem.dy[6] = 0
    problem.w_gate_up[1] = problem.w_down[1] = 0
    with make_buffer(problem, **settings(precision)) as buffer:
        got = results(problem, buffer)
    found = distances(got, PRECISIONS[precision].layer(problem))
    assert all(distance <= SAME for distance in found.values()), found
    for value in (got.y[5], got.dx[6], got.dw_gate_up[:, :, :128]):
        assert torch.count_nonzero(value) == 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [1e-38, 1e-40, -3e38], ids=str)
def test_numbers_at_the_ends_of_the_range(precision: str, value: float) -> None:
    problem = random_problem(24, 256, 128, 4, 2)
    with make_buffer(problem, **settings(precision)) as buffer:
        clean = results(problem, buffer)
        extreme = replace(problem, x=problem.x.clone())
        extreme.x[5, 130:200] = value
        got = results(extreme, buffer)
    others = torch.arange(24) != 5
    for name in ("y", "dx", "dtopk"):
        assert torch.equal(getattr(got, name)[others], getattr(clean, name)[others]), name
    if value > 0:
        assert all(part.isfinite().all() for part in got)
        if precision == "bf16":
            assert_close(got, exact(extreme), 6e-3)


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_number_stays_in_its_token(precision: str, value: float) -> None:
    problem = random_problem(24, 256, 128, 8, 2)
    with make_buffer(problem, **settings(precision)) as buffer:
        clean = results(problem, buffer)
        x, dy = problem.x.clone(), problem.dy.clone()
        x[5, 3] = dy[9, 200] = value
        got = results(replace(problem, x=x, dy=dy), buffer)
    for name, bad in (("y", [5]), ("dx", [5, 9]), ("dtopk", [5, 9])):
        others = [t for t in range(24) if t not in bad]
        assert torch.equal(getattr(got, name)[others], getattr(clean, name)[others]), name
        assert not getattr(got, name)[bad].isfinite().any(), name
    untouched = sorted(set(range(8)) - set(problem.topk_idx[[5, 9]].flatten().tolist()))
    assert untouched
    for name in ("dw_gate_up", "dw_down"):
        assert torch.equal(getattr(got, name)[untouched], getattr(clean, name)[untouched]), name


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_a_token_does_not_see_its_batch_and_bits_repeat(precision: str) -> None:
    problem = random_problem(130, 256, 128, 4, 2)
    with make_buffer(problem, **settings(precision)) as buffer:
        full = results(problem, buffer)
        assert_same_bits(results(problem, buffer), full)
        order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
        for rows in (slice(7, 8), slice(3, 100), order):
            part = results(problem.tokens(rows), buffer)  # type: ignore[arg-type]
            for name in ("y", "dx", "dtopk"):
                assert torch.equal(getattr(part, name), getattr(full, name)[rows]), name


def test_the_second_implementation_quantizes_as_the_first() -> None:
    problem = random_problem(24, 256, 128, 4, 2)
    codes, scales = quantize.quantize_rows(problem.x)
    back = codes.double().view(24, 2, BLOCK) * scales.double()[..., None]
    want = np.stack([through_rows(row) for row in problem.x.double().numpy()])
    assert torch.equal(back.view(24, 256), torch.from_numpy(want))


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_a_routing_weight_below_any_scale_gives_zero(precision: str) -> None:
    problem = random_problem(24, 256, 128, 4, 2)
    problem.topk_weights[5] = 2e-44  # what a softmax leaves of a hopeless expert
    with make_buffer(problem, **settings(precision)) as buffer:
        got = results(problem, buffer)
    assert torch.count_nonzero(got.y[5]) == torch.count_nonzero(got.dx[5]) == 0
    assert all(part.isfinite().all() for part in got)
