"""What the ranks agree on before a call whose rows travel by collectives: which call, and how many rows go where."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mega_moe._backends.group import Control
from mega_moe._base.activation import Activation
from mega_moe._base.errors import MegaMoEError, PeerError
from mega_moe._base.layer import LayerInputs

if TYPE_CHECKING:
    from mega_moe._backends.choice.request import Request


class Call(NamedTuple):
    """What the ranks have agreed on. Expert ids int64, -1 for masked; ``counts [R, C]`` of every rank, on the CPU."""

    topk_idx: Tensor
    counts: Tensor
    needs: int  # of any rank


@dataclass
class Agreement:
    """Every method is collective over ``control``. ``count``: checked ids ``[T, K]`` -> the ``width`` = C counts."""

    request: Request
    control: Control
    width: int
    count: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        self._call = 0

    def begin(
        self,
        phase: str,
        inputs: LayerInputs,
        activation: Activation,
        needs: int,
        refusal: Exception | None = None,
    ) -> Call:
        """Raises this rank's own refusal, PeerError for another rank's, and where ranks run different calls."""
        x, topk_idx = inputs[:2]
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise MegaMoEError(
                "this backend sizes its exchange on the host and cannot be captured into a CUDA graph; "
                "only the forward of the fused backend can"
            )
        experts, most = self.request.num_experts, self.request.max_tokens_per_rank
        ids = topk_idx.to(torch.int64)
        wrong = (ids < -1) | (ids >= experts)
        ids = ids.masked_fill(wrong, -1)
        # The only wait for the device.
        *totals, num_wrong = torch.cat((self.count(ids), wrong.sum()[None])).tolist()
        if x.shape[0] > most:
            refusal = ValueError(
                f"x: got {x.shape[0]} tokens, the buffer was built for max_tokens_per_rank={most}"
            )
        elif num_wrong:
            token, slot = wrong.nonzero()[0].tolist()
            refusal = ValueError(
                f"topk_idx[{token}, {slot}]: got expert {int(topk_idx[token, slot])}, want -1 or 0 to {experts - 1}"
            )
        call = {"phase": phase, "dtype": x.dtype, "activation": activation.kind}
        call |= {"clamp": activation.clamp, "alpha": activation.alpha}
        everyone, union = self._agree(call, needs, torch.tensor(totals, device="cpu"), refusal)
        return Call(ids, everyone, union)

    def refuse(self, error: Exception) -> None:
        """Let the other ranks, which are at or on their way to this call, raise PeerError with ``error``."""
        if self.control.size > 1:
            self._agree({"phase": "forward"}, 0, torch.zeros(self.width, device="cpu"), error)

    def _agree(
        self, call: dict[str, Any], needs: int, counts: Tensor, refusal: Exception | None
    ) -> tuple[Tensor, int]:
        """Counts by rank, and the union of needs; raises where a rank refuses or runs another call."""
        self._call += 1
        what = f"{call['phase']} call {self._call}"
        call["call"] = self._call
        digest = int.from_bytes(hashlib.sha256(repr(call).encode()).digest()[:7], "big")
        head = torch.tensor([int(refusal is not None), digest, needs], device="cpu")
        row = torch.cat((head, counts.to(torch.int64)))
        rows = self.control.exchange(row, what)
        refused, digests, everyones_needs = rows[:, :3].T.tolist()
        if any(refused):
            self.control.gather_errors(refusal, what)
        if len(set(digests)) > 1:
            calls = self.control.gather(call, what)
            name = next(name for name in call if len({other[name] for other in calls}) > 1)
            got = ", ".join(f"rank {rank}: {other[name]}" for rank, other in enumerate(calls))
            raise PeerError(f"rank {self.control.rank}: ranks disagree on the {name} of {what}: {got}")
        return rows[:, 3:], functools.reduce(operator.or_, everyones_needs)
