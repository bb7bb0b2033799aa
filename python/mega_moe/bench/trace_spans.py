"""Arithmetic on spans of time: unions, and how much of one set lies within another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """``start`` and ``end`` int64 ``[N]``, ns, in any order; spans may overlap."""

    start: Tensor
    end: Tensor

    def length(self) -> int:
        """Sum of all lengths; what several spans cover counts several times."""
        return int((self.end - self.start).sum())

    def shifted(self, by: Tensor) -> Spans:
        return Spans(self.start + by, self.end + by)

    def union(self) -> Spans:
        """The covered time as spans that do not touch, ordered."""
        if not len(self.start):
            return self
        order = torch.argsort(self.start)
        start, end = self.start[order], self.end[order].cummax(0).values
        begins = torch.ones_like(start, dtype=torch.bool)
        begins[1:] = start[1:] > end[:-1]
        ends = torch.ones_like(begins)
        ends[:-1] = begins[1:]
        return Spans(start[begins], end[ends])

    def before(self, times: Tensor) -> Tensor:
        """For each time the length of all spans up to it, as `length` counts."""
        return _ramps(self.start, times) - _ramps(self.end, times)

    def within(self, others: Spans) -> Tensor:
        """For each of ``others`` the length of these spans inside it."""
        return self.before(others.end) - self.before(others.start)


def _ramps(points: Tensor, times: Tensor) -> Tensor:
    """For each time t the sum of t - p over the points p before it."""
    points = points.sort().values
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), points.cumsum(0)))
    count = torch.searchsorted(points, times)
    return count * times - sums[count]
