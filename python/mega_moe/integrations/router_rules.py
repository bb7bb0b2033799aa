"""By which rule a router turns its logits into routing weights: found by comparing with the weights that it gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Rule = tuple[str, bool, float]
"""How scores come of logits, whether they are divided by the sum over a token's slots, and what they are times.

Plain data, since it is kept with the router, which may be pickled and read where this package is not.
"""
# Under which name a router keeps its own function from logits to scores,
_SCORES = ("score_fn", "scoring_function")
# what its weights are multiplied by,
_FACTORS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
# and a further number for each expert.
_PER_EXPERT = "per_expert_scale"


def weights_of(router: nn.Module, rule: Rule, logits: Tensor, ids: Tensor) -> Tensor:
    """``logits [T, C]``, ids ``[T, K]`` -> ``[T, K]``, 0 where the id is no class, such as -1."""
    name, divided, factor = rule
    if name == "softmax":
        scores = logits.softmax(-1, dtype=torch.float32)
    elif name == "sigmoid":
        scores = logits.float().sigmoid()
    elif name == "logits":
        scores = logits.float()
    else:
        scores = getattr(router, name)(logits)
    masked = (ids < 0) | (ids >= logits.shape[-1])
    # A GPU ends the process for a gather out of range.
    known = ids.masked_fill(masked, 0)
    weights = scores.gather(-1, known).masked_fill(masked, 0.0)
    if divided:
        total = weights.sum(-1, keepdim=True)
        # A token without any expert has none, and NaN would be its gradient.
        weights = weights / total.masked_fill(masked.all(-1, keepdim=True), 1.0)
    if factor != 1.0:
        weights = weights * factor
    per_expert = getattr(router, _PER_EXPERT, None)
    return weights if per_expert is None else weights * per_expert[known]


def rule_of(router: nn.Module, logits: Tensor, weights: Tensor, ids: Tensor) -> Rule:
    """The rule that gives the router's ``weights`` for its own ``ids``; ValueError where none does.

    Kept with the router once no other rule could have given them, so that later calls do not wait for the device.
    """
    known = router.__dict__.get("_mega_moe_rule")
    if known is not None:
        return known  # type: ignore[no-any-return]
    tolerance = 1e-2 if weights.dtype != torch.float32 else 1e-4
    fits: list[tuple[float, Rule]] = []
    with torch.no_grad():
        for rule in _rules(router):
            got = weights_of(router, rule, logits, ids).float()
            if torch.allclose(got, weights.float(), rtol=tolerance, atol=tolerance * 0.1):
                fits.append((float((got - weights.float()).abs().sum()), rule))
    if not fits:
        raise ValueError(
            f"{type(router).__name__}: its weights are neither softmax nor sigmoid of its logits, normalized or not, "
            f"with or without {', '.join(_FACTORS)}; give an adapter with a reroute() of its own"
        )
    best = min(fits)[1]
    if len(fits) == 1:
        router.__dict__["_mega_moe_rule"] = best
    return best


def _rules(router: nn.Module) -> Iterator[Rule]:
    own = [name for name in _SCORES if callable(getattr(router, name, None))]
    factors = [float(f) for name in _FACTORS if isinstance(f := getattr(router, name, None), (int, float))]
    # The router's own probabilities may come in place of its logits.
    for score in own or ("softmax", "sigmoid", "logits"):
        for divided in (False, True):
            for factor in dict.fromkeys((1.0, *factors)):
                yield score, divided, factor
