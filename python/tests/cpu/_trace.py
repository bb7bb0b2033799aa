"""Made-up traces: what a kernel would leave behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mega_moe.bench.trace_events import ROLES, Trace, code, read, tile

LOAD, MATH_0, MATH_1, PULL, PUSH = range(len(ROLES))
T0 = 1_700_000_000_000_000_000  # ns, as %globaltimer counts

Rows = Sequence[tuple[int, int, int]]
"""(code, start, end) with times in ns from `T0`."""


def array(lanes: Mapping[tuple[int, int], Rows], ctas: int = 2, capacity: int = 8) -> Tensor:
    """What a kernel of ``ctas`` CTAs would leave behind, from the rows of each (CTA, role)."""
    made = torch.zeros(ctas, len(ROLES), capacity, 3, dtype=torch.int64)
    for (cta, role), rows in lanes.items():
        for at, (word, start, end) in enumerate(rows):
            made[cta, role, at] = torch.tensor([word, T0 + start, T0 + end])
    return made


def two_tiles() -> Tensor:
    """One CTA, 10 us: routing, a gate/up tile, the down tile that reads it, and rows that move meanwhile."""
    return array(
        {
            (0, LOAD): [(code(16), 0, 1000)],
            (0, MATH_0): [
                (code(5, 0, 3), 1000, 2000),
                (code(6, 0, 3, tile(7, 0)), 2000, 5000),
                (code(8, 0, 3, tile(7, 0)), 5000, 6000),
            ],
            (0, MATH_1): [
                (code(5, 0, 3), 1000, 6500),
                (code(7, 0, 3, tile(7, 2)), 6500, 8500),
                (code(9, 0, 3, tile(7, 2)), 8500, 9000),
            ],
            (0, PULL): [(code(10), 1000, 1500), (code(11, 0, 0, 4), 1500, 2500)],
            (0, PUSH): [(code(12), 1000, 8000), (code(13, 0, 0, 9), 8000, 10000)],
        }
    )


ROWS = torch.tensor([[65, 0]])  # of two experts in one chunk; two row blocks
SLOTS = torch.tensor([[128, 256]])
COLUMNS = {"gate/up": range(1), "down": range(2)}


def schedule(*, down: int = 400, columns: Sequence[int] = (0, 1), second_epilogue: int = 390) -> Trace:
    """Row blocks 2 and 3 of expert 0; the down GEMMs begin ``down`` ns after the first event."""
    gate_up = [(code(6, 0, 0, tile(block, 0)), 100 * (block - 2), 100 * (block - 1)) for block in (2, 3)]
    epilogues = [(code(8, 0, 0, tile(2, 0)), 100, 250), (code(8, 0, 0, tile(3, 0)), 200, second_epilogue)]
    tiles = [(block, column) for block in (2, 3) for column in columns]
    products = [(code(7, 0, 0, tile(*at)), down + 10 * n, down + 10 * n + 10) for n, at in enumerate(tiles)]
    return read([array({(0, MATH_0): [*gate_up, *epilogues], (1, MATH_1): products})])
