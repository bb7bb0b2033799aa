"""Layers of several ranks for the tests of the fused forward: inputs, what fp64 says of them, and the comparisons.

T tokens of a rank, K slots, E experts of all ranks, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# Relative L2 of bf16 results against fp64 fed the same inputs, over a rank's tokens and over an expert's. Right
# rounding leaves 3.2e-3 to 4.3e-3 there, and up to 7e-3 in a single token of 256 columns. A token is measured by its
# parts, since weights of both signs can make y small next to them.
TOLERANCE = 6e-3
TOKEN_TOLERANCE = 1e-2
SHORT, LONG = 384, 1536  # I: few and many blocks of the shorter contraction
MANY = 64  # tokens from which on TOLERANCE holds: all of a few may be small next to their parts
ROWS_AT_ONCE = 1 << 16  # of an expert in fp64


@dataclass(frozen=True)
class Layer:
    """What all ranks give to one call; rank r holds the r-th share of the experts."""

    x: list[Tensor]  # bf16 [T, H] of each rank
    ids: list[Tensor]  # [T, K]
    weights: list[Tensor]  # [T, K]
    gate_up: Tensor  # bf16 [E, 2I, H]
    down: Tensor  # bf16 [E, H, I]
    clamp: float | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    def experts(self, rank: int) -> tuple[Tensor, Tensor]:
        own = self.num_experts // self.num_ranks
        return self.gate_up[rank * own : (rank + 1) * own], self.down[rank * own : (rank + 1) * own]

    def first(self, tokens: Sequence[int]) -> Layer:
        """The leading tokens of each rank."""
        return self.rows([slice(0, count) for count in tokens])

    def rows(self, which: Sequence[slice | Tensor]) -> Layer:
        def pick(values: list[Tensor]) -> list[Tensor]:
            return [own[rows].contiguous() for own, rows in zip(values, which, strict=True)]

        return replace(self, x=pick(self.x), ids=pick(self.ids), weights=pick(self.weights))

    def as_one_rank(self) -> Layer:
        """The tokens of all ranks as those of one."""
        return replace(
            self,
            x=[torch.cat(self.x)],
            ids=[torch.cat([own.long() for own in self.ids])],
            weights=[torch.cat([own.float() for own in self.weights])],
        )

    def with_own_tokens(self) -> Layer:
        """The same with copies of x, ids and weights, which `take` overwrites in place."""
        x, ids, weights = ([own.clone() for own in part] for part in (self.x, self.ids, self.weights))
        return replace(self, x=x, ids=ids, weights=weights)

    def take(self, rank: int, other: Layer) -> None:
        """x, ids and weights of another layer's rank, on the current stream."""
        for own, theirs in ((self.x, other.x), (self.ids, other.ids), (self.weights, other.weights)):
            own[rank].copy_(theirs[rank])

    def rows_of_experts(self) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """Of one rank: each expert that has rows, with their tokens and slots, so many at once as fit in fp64."""
        (ids,) = self.ids
        token, slot = (ids >= 0).nonzero().unbind(1)
        expert = ids[token, slot]
        counts = expert.bincount(minlength=self.num_experts).tolist()
        for e, rows in enumerate(expert.argsort().split(counts)):
            if len(rows):
                yield e, [(token[part], slot[part]) for part in rows.split(ROWS_AT_ONCE)]

    def copies(self) -> list[Tensor]:
        return [own.clone() for own in self.inputs()]

    def inputs(self) -> list[Tensor]:
        return [*self.x, *self.ids, *self.weights, self.gate_up, self.down]


def random_experts(
    device: torch.device, experts: int, hidden: int, intermediate: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Weights of standard deviation 1/sqrt(fan-in)."""
    made = torch.Generator(device).manual_seed(seed)

    def normal(*extents: int) -> Tensor:
        return torch.randn(*extents, generator=made, device=device, dtype=torch.bfloat16)

    gate_up = normal(experts, 2 * intermediate, hidden).mul_(hidden**-0.5)
    return gate_up, normal(experts, hidden, intermediate).mul_(intermediate**-0.5)


def random_layer(
    ids: Sequence[Tensor],
    experts: tuple[Tensor, Tensor],
    *,
    weights: str = "positive",
    seed: int = 0,
    clamp: float | None = None,
) -> Layer:
    """N(0, 1) tokens for these ids. ``weights``: "positive", "signed" (a tenth is 0), or "bf16", as odd ranks have."""
    gate_up, down = experts
    made = torch.Generator(gate_up.device).manual_seed(1000 + seed)
    xs, factors = [], []
    for rank, own in enumerate(ids):
        extents = own.shape
        x = torch.randn(extents[0], gate_up.shape[2], generator=made, device=own.device, dtype=torch.bfloat16)
        factor = torch.rand(extents, generator=made, device=own.device) + 0.05
        if weights == "signed":
            factor = torch.randn(extents, generator=made, device=own.device)
            factor[torch.rand(extents, generator=made, device=own.device) < 0.1] = 0
        else:
            factor /= factor.sum(1, keepdim=True)
        xs.append(x)
        factors.append(factor.bfloat16() if weights == "bf16" or rank % 2 else factor)
    layer = Layer(xs, list(ids), factors, gate_up, down, clamp)
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)  # launches on other streams read them
    return layer


class Exact(NamedTuple):
    """fp64 results of all ranks, and the size of what each token is summed from: one part for each of its experts."""

    y: list[Tensor]  # [T, H]
    scale: list[Tensor]  # [T]

    def first(self, tokens: Sequence[int]) -> Exact:
        """Of the leading tokens of each rank: a token's values do not depend on the others."""
        return Exact(*([own[:n] for own, n in zip(part, tokens, strict=True)] for part in self))


def exact(layer: Layer) -> Exact:
    """y in fp64, expert by expert on the rows that it has: fast enough for layers of real size."""
    one = layer.as_one_rank()
    x, weights = one.x[0], one.weights[0].double()
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for e, parts in one.rows_of_experts():
        gate_up, down = layer.gate_up[e].double(), layer.down[e].double()
        size = torch.zeros_like(squares)
        for token, slot in parts:
            gate, up = (x[token].double() @ gate_up.T).chunk(2, dim=-1)
            if layer.clamp is not None:
                gate, up = gate.clamp(max=layer.clamp), up.clamp(-layer.clamp, layer.clamp)
            out = (torch.nn.functional.silu(gate) * up) @ down.T
            out *= weights[token, slot, None]
            y.index_add_(0, token, out)
            size.index_add_(0, token, out.norm(dim=1))
        squares += size.square()
    sizes = [len(own) for own in layer.x]
    return Exact(list(y.split(sizes)), list(squares.sqrt().split(sizes)))


def difference(layer: Layer, got: Sequence[Tensor], want: Exact) -> str | None:
    """What is wrong with the results of all ranks; None where they are right.

    A token that fp64 finds not finite must not be finite either, and all others must be.
    """
    for rank, (y, exact_y, scale) in enumerate(zip(got, want.y, want.scale, strict=True)):
        who = f"rank {rank} of {layer.num_ranks}"
        if y.dtype != torch.bfloat16 or y.shape != exact_y.shape:
            return f"{who}: got {y.dtype} {tuple(y.shape)}, want bfloat16 {tuple(exact_y.shape)}"
        if not len(y):
            continue
        finite = exact_y.isfinite().all(1)
        differs = (y.isfinite().all(1) != finite).nonzero()
        if len(differs):
            token = int(differs[0])
            count, wanted = int((~y[token].isfinite()).sum()), int((~exact_y[token].isfinite()).sum())
            return f"{who}: token {token} (of {len(differs)}) has {count} values that are no numbers, want {wanted}"
        squares = (y.double() - exact_y)[finite].square().sum(1)
        size = exact_y[finite].square().sum(1)
        tokens = finite.nonzero()[:, 0]
        error = float((squares.sum() / size.sum().clamp_min(1e-300)).sqrt())
        if len(tokens) >= MANY and not error <= TOLERANCE:
            return f"{who}: relative error {error:.2e} of all tokens"
        # Nothing to sum leaves no error at all: masked tokens are exact zeros.
        errors = squares.sqrt() / scale[finite].clamp_min(1e-300)
        beyond = int((errors > TOKEN_TOLERANCE).sum())
        if beyond:
            worst = int(errors.argmax())
            return f"{who}: token {int(tokens[worst])} (of {beyond}) is off by {float(errors[worst]):.2e} of its parts"
        held = layer.ids[rank][finite].long() + 1
        sums = torch.zeros(2, layer.num_experts + 1, dtype=torch.float64, device=y.device)
        for row, values in zip(sums, (squares, size), strict=True):
            row.index_add_(0, held.reshape(-1), values[:, None].expand(held.shape).reshape(-1))
        many = held.reshape(-1).bincount(minlength=layer.num_experts + 1) >= MANY
        errors = torch.where(many, (sums[0] / sums[1].clamp_min(1e-300)).sqrt(), 0.0)[1:]
        expert = int(errors.argmax())
        if not float(errors[expert]) <= TOLERANCE:
            return f"{who}: relative error {float(errors[expert]):.2e} of the tokens of expert {expert}"
    return None


def assert_right(layer: Layer, got: Sequence[Tensor], want: Exact | None = None) -> None:
    """``got``, the results of all ranks, are those of fp64."""
    where = difference(layer, got, exact(layer) if want is None else want)
    assert where is None, where


def same_bits(got: Tensor, want: Tensor) -> bool:
    """NaNs of equal bits are equal here."""
    return got.shape == want.shape and torch.equal(got.view(torch.int16), want.view(torch.int16))


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"{what}: rank {rank}: got {tuple(a.shape)}, want {tuple(b.shape)}"
        if not same_bits(a, b):
            rows = (a.view(torch.int16) != b.view(torch.int16)).any(1).nonzero()[:, 0]
            token = int(rows[0])
            column = int((a[token].view(torch.int16) != b[token].view(torch.int16)).nonzero()[0])
            raise AssertionError(
                f"{what}: rank {rank}: {len(rows)} of {len(a)} tokens differ, the first is {token}: column {column} "
                f"is {float(a[token, column])!r}, want {float(b[token, column])!r}"
            )
