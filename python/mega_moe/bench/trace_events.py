"""The events of one device, read from the arrays that its ranks' kernels wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_moe.bench.trace_kinds import CHUNK, EXPERT, INDEX, KIND, KINDS, ROLES, WORDS, Field, Kind, State


@dataclass(frozen=True)
class Trace:
    """Columns of N events, int64, ordered by start. Times are in ns from the first event of all."""

    cta: Tensor  # position in ``ctas``
    role: Tensor
    kind: Tensor
    chunk: Tensor
    expert: Tensor
    index: Tensor
    start: Tensor
    end: Tensor
    ctas: tuple[tuple[int, int], ...]
    """(rank, CTA) of every CTA that recorded anything; the others were not launched."""
    num_ranks: int
    full_lanes: tuple[tuple[int, int, int], ...]
    """(rank, CTA, role) of lanes without a free row: what came after was dropped."""
    malformed: int
    """Rows of an unknown kind or with an end before the start; they are no events."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def span(self) -> int:
        """ns from the first start to the last end."""
        return int(self.end.max()) if len(self) else 0

    def where(self, kinds: Sequence[Kind], role: int | None = None) -> Tensor:
        """Mask of the events of some kinds, of one role or of all."""
        wanted = torch.tensor([kind.number for kind in kinds], dtype=torch.int64)
        mask = torch.isin(self.kind, wanted)
        return mask if role is None else mask & (self.role == role)


def kinds_in(state: State, part: str | None = None) -> list[Kind]:
    """Rows of the table in a state, of one part or of all."""
    return [kind for kind in KINDS.values() if kind.state is state and part in (None, kind.part)]


def read(arrays: Sequence[Tensor]) -> Trace:
    """Events of the ranks on one device, from one int64 ``[ctas, roles, events, 3]`` per rank, in any order of rows.

    Raises ValueError for an array of another dtype or shape.
    """
    columns: list[Tensor] = []
    ctas: list[tuple[int, int]] = []
    full: list[tuple[int, int, int]] = []
    for rank, given in enumerate(arrays):
        if given.dtype != torch.int64 or given.dim() != 4 or given.shape[1::2] != (len(ROLES), WORDS):
            wanted = f"torch.int64 [ctas, {len(ROLES)}, events, {WORDS}]"
            raise ValueError(f"trace: got {given.dtype} {list(given.shape)}, wanted {wanted}")
        rows = given.cpu()
        used = rows[..., 0] != 0
        launched = used.flatten(1).any(1)
        # Number of each launched CTA among all of the device.
        number = len(ctas) + launched.cumsum(0) - 1
        ctas += [(rank, cta) for cta in launched.nonzero().flatten().tolist()]
        full += [(rank, cta, role) for cta, role in used.all(2).nonzero().tolist() if rows.shape[2]]
        cta, role, _ = used.nonzero().unbind(1)
        columns.append(torch.cat((torch.stack((number[cta], role), 1), rows[used]), 1))
    table = torch.cat(columns) if columns else torch.empty(0, 2 + WORDS, dtype=torch.int64)
    cta, role, codes, start, end = table.unbind(1)
    kind = bits(codes, KIND)
    valid = torch.isin(kind, torch.tensor(list(KINDS))) & (end >= start)
    order = torch.argsort(start[valid], stable=True)
    first = int(start[valid].min()) if len(order) else 0

    def column(values: Tensor) -> Tensor:
        return values[valid][order]

    return Trace(
        cta=column(cta),
        role=column(role),
        kind=column(kind),
        chunk=column(bits(codes, CHUNK)),
        expert=column(bits(codes, EXPERT)),
        index=column(bits(codes, INDEX)),
        start=column(start) - first,
        end=column(end) - first,
        ctas=tuple(ctas),
        num_ranks=len(arrays),
        full_lanes=tuple(full),
        malformed=int((~valid).sum()),
    )


def bits(words: Tensor, field: Field) -> Tensor:
    """The field of each word."""
    # The shift carries the sign along; the mask takes it off again.
    return words >> field.shift & field.mask
