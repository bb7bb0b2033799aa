"""What an engine gives to the backend `dispatched`: tokens to the ranks of their experts, and sums back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from mega_moe._base.types import DISPATCHERS


class DispatchedTokens(NamedTuple):
    """The N tokens that this rank's experts serve, each once, in an order that depends on the inputs alone.

    A row whose ids are all -1 is padding: it takes memory and no time, and nothing reads what came of it.
    """

    x: Tensor
    """``[N, H]``, as their owners hold them."""
    topk_idx: Tensor
    """``[N, K]`` int32 or int64: local expert ids, 0 to E_local - 1; -1 for a slot of another rank or of none."""
    topk_weights: Tensor
    """``[N, K]``: of the same slots; where the id is -1 anything."""
    route: Any
    """Whatever the engine needs to send rows along the same ways again, or back. Valid until the call ends."""


@runtime_checkable
class Dispatcher(Protocol):
    """An engine for the backend `dispatched`. ``MoEBuffer(dispatcher=...)`` takes a name, or such an object.

    R ranks, of which rank r holds experts r * E / R to (r + 1) * E / R - 1. All ranks make the same calls in the same
    order, on the current stream of the device of the tensors: `dispatch` and `combine` in a forward; `dispatch`,
    `dispatch_again` and, unless only the experts learn, `combine` in a backward. Before the first of them the ranks
    have agreed on the call, so none is made where a rank refuses, disagrees or has not come in time. An error of an
    engine itself may be any exception.
    """

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, sizes: Sequence[Sequence[int]]
    ) -> DispatchedTokens:
        """Send each token to every rank that holds one of its experts, once.

        Args:
            x: ``[T, H]``, contiguous; T may be 0 and differ between ranks.
            topk_idx: ``[T, K]`` int64, global expert ids, -1 for a masked slot, all in range.
            topk_weights: ``[T, K]`` fp32 (fp64 where x is); where the id is -1 anything.
            sizes: ``[R][R]``, equal on all ranks: tokens that rank r sends to rank s. No engine needs to wait for the
                device to know N.
        """
        ...

    def dispatch_again(self, rows: Tensor, route: Any) -> Tensor:
        """Other rows of the same tokens, ``[T, H]`` -> ``[N, H]`` in the order of the dispatch that made ``route``."""
        ...

    def combine(
        self, rows: Tensor | None, weights: Tensor | None, route: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send rows back and add those of a token: ``[N, H]`` -> ``[T, H]``, and ``weights`` ``[N, K]`` -> ``[T, K]``.

        A sum is made in fp32 at least, in one fixed order, and rounded once to the dtype of its rows; a token that was
        sent nowhere gets zeros. Of ``weights``, fp32 (fp64), each slot has a number other than 0 on one rank at most.
        Either is None on all ranks where nobody needs it.
        """
        ...


def dispatcher_name(dispatcher: object) -> str:
    """What ``dispatcher`` is called, in the choice and between ranks: a known name, or the class of an object."""
    if isinstance(dispatcher, str):
        if dispatcher not in DISPATCHERS:
            known = ", ".join(DISPATCHERS)
            raise ValueError(f"dispatcher: got {dispatcher!r}, want {known} or a mega_moe.Dispatcher")
        return dispatcher
    if not isinstance(dispatcher, Dispatcher) or isinstance(dispatcher, type):
        raise TypeError(
            f"dispatcher: got {type(dispatcher).__name__}, want one of {', '.join(DISPATCHERS)} or an object with "
            "dispatch, dispatch_again and combine"
        )
    return type(dispatcher).__qualname__
