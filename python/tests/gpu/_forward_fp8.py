"""How results of the forward in fp8 are judged: against fp64, and against an emulation that quantizes where it does.

The emulation is 5 to 7 % from fp64. It sums as the tensor core does and differs in the sigmoid alone, which kernels
approximate. So now and then an h takes the neighbouring code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_moe._backends.choice.facts import variants

from ._emulated import emulated
from ._forward import MANY, Exact, Layer, exact

# Relative L2 of the kernel against the emulation, over a rank's tokens and over an expert's. One such
# code in a token of 64 makes up to 2e-3.
TOLERANCE = 3e-3
# Error against fp64 as a share of the emulation's own.
SHARE = 1.05


def token_tolerance(intermediate: int) -> float:
    """Of one token, by its parts: one turned code of an element eight times the usual changes so much of them."""
    return max(2e-2, 2.0**-3 * 8 / intermediate**0.5)


def why_no_kernel() -> str | None:
    if any(v.op == "forward" and v.precision == "fp8" for v in variants()):
        return None
    return "this wheel holds no fused forward kernel in fp8"


def difference(layer: Layer, got: Sequence[Tensor], want: Exact, emulation: Sequence[Tensor]) -> str | None:
    """What is wrong with the results of all ranks; None where they are right."""
    most = token_tolerance(layer.down.shape[2])
    for rank, (y, like) in enumerate(zip(got, emulation, strict=True)):
        ids, experts = layer.ids[rank], layer.num_experts
        wrong = rank_difference(y, like, want.y[rank], want.scale[rank], ids, experts, most)
        if wrong is not None:
            return f"rank {rank} of {layer.num_ranks}: {wrong}"
    return None


def rank_difference(
    y: Tensor, like: Tensor, exact_y: Tensor, scale: Tensor, ids: Tensor, num_experts: int, most: float
) -> str | None:
    """What is wrong with ``y [T, H]``, as ``like`` emulates it and ``exact_y`` is; ``scale [T]``: size of a token's
    parts, of which it may be off by ``most``.

    A token of the emulation that is not finite must not be finite either, and all others must be.
    """
    if y.dtype != torch.bfloat16 or y.shape != exact_y.shape:
        return f"got {y.dtype} {tuple(y.shape)}, want bfloat16 {tuple(exact_y.shape)}"
    if not len(y):
        return None
    finite = like.isfinite().all(1)
    differs = (y.isfinite().all(1) != finite).nonzero()
    if len(differs):
        return f"token {int(differs[0])} (of {len(differs)}) is finite in one of kernel and emulation alone"
    wide, like_wide, right = y[finite].double(), like[finite].double(), exact_y[finite]
    apart = (wide - like_wide).square().sum(1)
    own, its = (wide - right).square().sum(1), (like_wide - right).square().sum(1)
    errors = apart.sqrt() / scale[finite].clamp_min(1e-300)
    beyond = int((errors > most).sum())
    if beyond:
        token = int(finite.nonzero()[:, 0][int(errors.argmax())])
        return f"token {token} (of {beyond}) is off by {float(errors.max()):.2e} of its parts"
    held = ids[finite].long() + 1
    sums = torch.zeros(4, num_experts + 1, dtype=torch.float64, device=y.device)
    rows = (apart, like_wide.square().sum(1), own, its)
    for total, values in zip(sums, rows, strict=True):
        total.index_add_(0, held.reshape(-1), values[:, None].expand(held.shape).reshape(-1))
    counts = held.reshape(-1).bincount(minlength=num_experts + 1)
    groups = [("all tokens", torch.stack([r.sum() for r in rows]), len(y))]
    groups += [
        (f"the tokens of expert {e - 1}", sums[:, e], int(counts[e])) for e in range(1, num_experts + 1)
    ]
    for name, squares, count in groups:
        wrong = None if count < MANY else too_far(*squares.tolist())
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def too_far(apart: float, size: float, own: float, its: float) -> str | None:
    """What of these is too much, of sums of squares: kernel less emulation, emulation, and the error of either against
    fp64."""
    error = (apart / max(size, 1e-300)) ** 0.5
    if not error <= TOLERANCE:
        return f"{error:.2e} from the emulation"
    ratio = (own / max(its, 1e-300)) ** 0.5
    if its > 0 and not ratio <= SHARE:
        return f"the error against fp64 is {ratio:.3f} times the emulation's"
    return None


class Judge:
    """A layer with what it is measured by; prefixes of its tokens are measured by the same."""

    def __init__(self, layer: Layer, power_of_two: bool = False) -> None:
        self._layer = layer
        self._exact = exact(layer)
        self._emulation = emulated(layer, "fp8", power_of_two)

    def assert_right(self, got: Sequence[Tensor], tokens: Sequence[int] | None = None) -> None:
        layer, want, emulation = self._layer, self._exact, self._emulation
        if tokens is not None:
            layer, want = layer.first(tokens), want.first(tokens)
            emulation = [own[:n] for own, n in zip(emulation, tokens, strict=True)]
        where = difference(layer, got, want, emulation)
        assert where is None, where
