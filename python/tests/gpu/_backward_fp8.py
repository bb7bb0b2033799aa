"""How gradients of the backward in fp8 are judged: against fp64, and against an emulation that quantizes where it does.

The weights' gradients are products of bf16 rows, but these come of gate, up and dh, which are made in e4m3. A form of
the kernel makes them of e4m3 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.choice.facts import variants
from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.plain.arithmetic import Experts
from mega_moe._backends.plain.reference import ReferenceArithmetic
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, Needs
from mega_moe.testing.tables import plain_tables

from ._backward import ExactGradients, exact_gradients
from ._emulated import combined
from ._forward import MANY, Layer
from ._forward_fp8 import TOLERANCE, rank_difference, token_tolerance, too_far
from ._tensor_core import block_product_of

# Relative L2 of a gradient of fewer rows than a group has, where a turned code weighs more: enough for what is not
# written, belongs elsewhere or is a third too large.
OF_FEW = 0.25


def why_no_kernel() -> str | None:
    if any(v.op == "backward" and v.precision == "fp8" for v in variants()):
        return None
    return "this wheel holds no fused backward kernel in fp8"


def why_no_gradients() -> str | None:
    if any(v.op == "backward" and v.wgrad == "fp8" for v in variants()):
        return None
    return "this wheel holds no fused backward kernel with weight gradients in fp8"


class EmulatedGradients(NamedTuple):
    """As `ExactGradients`, and the size of what each token's dx is summed from."""

    dx: list[Tensor]  # bf16 [T, H] of each rank
    scale: list[Tensor]  # [T]
    dtopk: list[Tensor]  # fp32 [T, K]
    dw_gate_up: Tensor  # fp32 [E, 2I, H]
    dw_down: Tensor  # fp32 [E, H, I]


def with_exact_gate_and_up(layer: Layer) -> Layer:
    """The layer with x of -1, 0 and 1, and w_gate_up of as many sixteenths.

    Whether a clamp passes a gradient on is decided by one bit of gate or up, and at values of any size the 14 bits of
    the tensor core's sums turn it now and then. Codes of these are 0 and 448, whose sums have 13 bits, so gate and up
    are the same sixteenths in kernel, emulation and fp64, and many lie right at a clamp.
    """
    made = torch.Generator(layer.device).manual_seed(4000)

    def signs(like: Tensor) -> Tensor:
        return torch.randint(-1, 2, like.shape, generator=made, device=like.device).to(like.dtype)

    exact = replace(layer, x=[signs(own) for own in layer.x], gate_up=signs(layer.gate_up) / 16)
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)  # launches on other streams read them
    return exact


def emulated_gradients(
    layer: Layer,
    dy: Sequence[Tensor],
    shape: Shape | None = None,
    power_of_two: bool = False,
    saved: bool = False,
) -> EmulatedGradients:
    """``shape``: of the buffers, which says of what and in which chunks weights' gradients are made; None: of bf16.

    ``saved``: gate and up of every row are those of a forward in bf16.
    """
    in_fp8 = shape is not None and shape.mode.wgrad == "fp8"
    one = layer.as_one_rank()
    x, ids, weights, all_dy = one.x[0], one.ids[0], one.weights[0], torch.cat(list(dy))
    token, slot = (ids >= 0).nonzero().unbind(1)
    # Of rows by token, source rank and slot, which with dW in fp8 shows in the scales that they share.
    own_token = torch.cat([torch.arange(len(own), device=ids.device) for own in layer.x])
    own_rank = torch.cat(
        [torch.full((len(own),), rank, device=ids.device) for rank, own in enumerate(layer.x)]
    )
    order = torch.argsort(own_token[token] * layer.num_ranks + own_rank[token], stable=True)
    token, slot = token[order], slot[order]
    expert = ids[token, slot]
    order = torch.argsort(expert, stable=True)
    token, slot, expert = token[order], slot[order], expert[order]
    chunk = torch.zeros_like(token)
    if shape is not None and in_fp8:
        chunk = chunk_of_rows(layer, shape, own_token[token], expert)
    clamp = None if layer.clamp is None or math.isinf(layer.clamp) else layer.clamp
    slots = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    dtopk = torch.zeros(ids.shape, dtype=torch.float32, device=x.device)
    dw_gate_up = torch.zeros(layer.gate_up.shape, dtype=torch.float32, device=x.device)
    dw_down = torch.zeros(layer.down.shape, dtype=torch.float32, device=x.device)
    for number in chunk.unique().tolist():
        rows = chunk == number
        at, of = token[rows], slot[rows]
        counts = expert[rows].bincount(minlength=layer.num_experts).tolist()
        arithmetic = ReferenceArithmetic(
            "fp8",
            "fp8" if in_fp8 else "bf16",
            power_of_two=power_of_two,
            block_gemm=block_product_of(layer.device),
            recompute="bf16" if saved else None,
        )
        got = arithmetic.backward(
            x[at],
            all_dy[at],
            weights[at, of],
            Experts(layer.gate_up, layer.down, counts, Activation(clamp=clamp)),
            Needs(),
            torch.float32,
        )
        assert got.dx is not None
        assert got.dtopk is not None
        assert got.dw_gate_up is not None
        assert got.dw_down is not None
        slots[at, of], dtopk[at, of] = got.dx, got.dtopk
        dw_gate_up += got.dw_gate_up
        dw_down += got.dw_down
    sizes = [len(own) for own in layer.x]
    parts = list(slots.split(sizes))
    scale = [own.double().square().sum((1, 2)).sqrt() for own in parts]
    return EmulatedGradients(combined(layer, parts), scale, list(dtopk.split(sizes)), dw_gate_up, dw_down)


def chunk_of_rows(layer: Layer, shape: Shape, token: Tensor, expert: Tensor) -> Tensor:
    """In which chunk of its expert's rank each row lies; ``token``: as its own rank counts."""
    local = layer.num_experts // layer.num_ranks
    chunk = torch.empty_like(token)
    for rank in range(layer.num_ranks):
        tables = plain_tables(layer.ids, rank, layer.num_experts, *shape.chunk_limits())
        here = expert // local == rank
        ends = tables.chunks[:, 1].to(token)
        chunk[here] = torch.bucketize(token[here], ends, right=True).clamp(max=len(ends) - 1)
    return chunk


def difference(
    layer: Layer,
    got: Sequence[Gradients],
    want: ExactGradients,
    emulation: EmulatedGradients,
) -> str | None:
    """What is wrong with the gradients of all ranks; None where they are right. What was not asked for is skipped."""
    local = layer.num_experts // layer.num_ranks
    ids_of_all = torch.cat([ids.reshape(-1) for ids in layer.ids])
    counts = ids_of_all[ids_of_all >= 0].bincount(minlength=layer.num_experts)
    most = token_tolerance(layer.down.shape[2])
    for rank, own in enumerate(got):
        who = f"rank {rank} of {layer.num_ranks}"
        ids, here = layer.ids[rank], slice(rank * local, (rank + 1) * local)
        if own.dx is not None:
            wrong = rank_difference(
                own.dx,
                emulation.dx[rank],
                want.dx[rank],
                emulation.scale[rank],
                ids,
                layer.num_experts,
                most,
            )
            if wrong is not None:
                return f"{who}: dx: {wrong}"
            if torch.count_nonzero(own.dx[(ids < 0).all(1)]):
                return f"{who}: dx of tokens without an expert is not zero"
        if own.dtopk is not None:
            if torch.count_nonzero(own.dtopk[ids < 0]):
                return f"{who}: dtopk of masked slots is not zero"
            wrong = _compared(own.dtopk, emulation.dtopk[rank], want.dtopk[rank], len(ids))
            if wrong is not None:
                return f"{who}: dtopk: {wrong}"
        for name in ("dw_gate_up", "dw_down"):
            value: Tensor | None = getattr(own, name)
            if value is None:
                continue
            like, exact = getattr(emulation, name)[here], getattr(want, name)[here]
            wrong = _compared(value, like, exact, int(counts[here].sum()))
            for e in range(local):
                count = int(counts[here][e])
                if count == 0 and torch.count_nonzero(value[e]):
                    return f"{who}: {name} of expert {rank * local + e}, which has no rows, is not zero"
                wrong = wrong or _compared(value[e], like[e], exact[e], count)
            if wrong is not None:
                return f"{who}: {name}: {wrong}"
    return None


def _compared(value: Tensor, like: Tensor, exact: Tensor, rows: int) -> str | None:
    """What is wrong with a gradient that is a sum over ``rows``, or has one for each."""
    if value.shape != exact.shape or not bool(value.isfinite().all()):
        return f"has shape {tuple(value.shape)}, or values that are no numbers"
    if rows == 0:
        return None
    # Rounded as the value is: where gate and up are exact, that is as much as all else.
    wide, like = value.double(), like.to(value.dtype).double()
    squares = [float(part.square().sum()) for part in (wide - like, like, wide - exact, like - exact)]
    if rows >= MANY:
        return too_far(*squares)
    error = (squares[0] / max(squares[1], 1e-300)) ** 0.5
    return None if error <= OF_FEW else f"{error:.2e} from the emulation, of {rows} rows"


class Judge:
    """A layer and the gradients of its results with what they are measured by; ``shape``, ``saved``: as
    `emulated_gradients` has them."""

    def __init__(
        self,
        layer: Layer,
        dy: Sequence[Tensor],
        shape: Shape | None = None,
        power_of_two: bool = False,
        saved: bool = False,
    ) -> None:
        self._layer = layer
        self._exact = exact_gradients(layer, dy)
        self._emulation = emulated_gradients(layer, dy, shape, power_of_two, saved)

    def assert_right(self, got: Sequence[Gradients]) -> None:
        where = difference(self._layer, got, self._exact, self._emulation)
        assert where is None, where


__all__ = [
    "TOLERANCE",
    "EmulatedGradients",
    "Judge",
    "difference",
    "emulated_gradients",
    "why_no_gradients",
    "why_no_kernel",
    "with_exact_gate_and_up",
]
