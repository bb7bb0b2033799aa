"""What fp64 says of the gradients of a layer of several ranks, and the comparison with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mega_moe._base.layer import Gradients

from ._forward import MANY, Layer

TOLERANCE = 6e-3


class ExactGradients(NamedTuple):
    """fp64: of the tokens of each rank, and of the weights of all experts."""

    dx: list[Tensor]  # [T, H]
    dtopk: list[Tensor]  # [T, K]
    dw_gate_up: Tensor  # [E, 2I, H]
    dw_down: Tensor  # [E, H, I]


def random_dy(layer: Layer, seed: int = 0) -> list[Tensor]:
    made = torch.Generator(layer.device).manual_seed(7000 + seed)
    dy = [torch.randn(own.shape, generator=made, device=own.device, dtype=torch.bfloat16) for own in layer.x]
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)  # launches on other streams read them
    return dy


def exact_gradients(layer: Layer, dy: Sequence[Tensor]) -> ExactGradients:
    """Expert by expert on the rows that it has: fast enough for layers of real size."""
    one = layer.as_one_rank()
    x, weights = one.x[0], one.weights[0].double()
    all_dy = torch.cat(list(dy))
    dx = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    dtopk = torch.zeros(weights.shape, dtype=torch.float64, device=x.device)
    dw_gate_up = torch.zeros(layer.gate_up.shape, dtype=torch.float64, device=x.device)
    dw_down = torch.zeros(layer.down.shape, dtype=torch.float64, device=x.device)
    for e, parts in one.rows_of_experts():
        gate_up, down = layer.gate_up[e].double(), layer.down[e].double()
        for t, k in parts:
            x_rows, dy_rows, w = x[t].double(), all_dy[t].double(), weights[t, k, None]
            gate_in, up_in = (x_rows @ gate_up.T).chunk(2, dim=-1)
            gate, up = gate_in, up_in
            if layer.clamp is not None:
                gate, up = gate.clamp(max=layer.clamp), up.clamp(-layer.clamp, layer.clamp)
            share = gate.sigmoid()
            a = gate * share * up
            dh = dy_rows @ down
            dtopk[t, k] = (dh * a).sum(1)
            da = dh * w
            dgate = da * up * share * (1 + gate * (1 - share))
            dup = da * gate * share
            if layer.clamp is not None:
                # Gate and up are rounded before they are clamped: some beyond it round to it and count as inside.
                dgate = torch.where(gate_in.bfloat16() <= layer.clamp, dgate, 0)
                dup = torch.where(up_in.bfloat16().abs() <= layer.clamp, dup, 0)
            dz = torch.cat((dgate, dup), dim=1)
            dx.index_add_(0, t, dz @ gate_up)
            dw_gate_up[e] += dz.T @ x_rows
            dw_down[e] += dy_rows.T @ (a * w)
    sizes = [len(own) for own in layer.x]
    return ExactGradients(list(dx.split(sizes)), list(dtopk.split(sizes)), dw_gate_up, dw_down)


def _error(got: Tensor, want: Tensor) -> float:
    size = want.norm()
    return float((got.double() - want).norm() / size) if size > 0 else float(torch.count_nonzero(got))


def difference(layer: Layer, got: Sequence[Gradients], want: ExactGradients) -> str | None:
    """What is wrong with the gradients of all ranks; None where they are right. What was not asked for is skipped."""
    for rank, own in enumerate(got):
        who = f"rank {rank} of {layer.num_ranks}"
        for name, value, exact in (("dx", own.dx, want.dx[rank]), ("dtopk", own.dtopk, want.dtopk[rank])):
            if value is None:
                continue
            if value.shape != exact.shape or not bool(value.isfinite().all()):
                return f"{who}: {name} has shape {tuple(value.shape)}, or values that are no numbers"
            if len(value) >= MANY and not _error(value, exact) <= TOLERANCE:
                return f"{who}: relative error {_error(value, exact):.2e} of {name}"
            none = (layer.ids[rank] < 0).all(1) if name == "dx" else layer.ids[rank] < 0
            if torch.count_nonzero(value[none]):
                return f"{who}: {name} of masked slots is not zero"
        share = layer.num_experts // layer.num_ranks
        all_ids = torch.cat([ids.reshape(-1) for ids in layer.ids])
        counts = (all_ids[all_ids >= 0]).bincount(minlength=layer.num_experts)
        for name, value, exact in (
            ("dw_gate_up", own.dw_gate_up, want.dw_gate_up),
            ("dw_down", own.dw_down, want.dw_down),
        ):
            if value is None:
                continue
            for e in range(share):
                expert = rank * share + e
                if not bool(value[e].isfinite().all()):
                    return f"{who}: {name} of expert {expert} has values that are no numbers"
                if counts[expert] == 0 and torch.count_nonzero(value[e]):
                    return f"{who}: {name} of expert {expert}, which has no rows, is not zero"
                if counts[expert] and not _error(value[e], exact[expert]) <= 2 * TOLERANCE:
                    return f"{who}: relative error {_error(value[e], exact[expert]):.2e} of {name} of expert {expert}"
            whole = exact[rank * share : (rank + 1) * share]
            if (
                int(counts[rank * share : (rank + 1) * share].sum()) >= MANY
                and not _error(value, whole) <= TOLERANCE
            ):
                return f"{who}: relative error {_error(value, whole):.2e} of {name}"
    return None


def assert_right(
    layer: Layer, dy: Sequence[Tensor], got: Sequence[Gradients], want: ExactGradients | None = None
) -> None:
    where = difference(layer, got, exact_gradients(layer, dy) if want is None else want)
    assert where is None, where


def assert_same_bits(got: Sequence[Gradients], want: Sequence[Gradients], what: str) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        for name, left, right in zip(a._fields, a, b, strict=True):
            assert (left is None) == (right is None), f"{what}: rank {rank}: {name}"
            if left is None or right is None:
                continue
            kind = torch.int16 if left.element_size() == 2 else torch.int32
            wrong = int((left.view(kind) != right.view(kind)).sum())
            assert wrong == 0, f"{what}: rank {rank}: {wrong} values of {name} have other bits"
