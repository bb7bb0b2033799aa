"""The choice with its reasons: every backend judged, the one taken, and the warning where it is slow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mega_moe._backends.choice.decide import Verdict, check_name, choose, decide
from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.choice.request import Request
from mega_moe._base import env
from mega_moe._base.errors import BackendRefusedError, FallbackWarning

_warned: set[str] = set()


@dataclass(frozen=True)
class Explanation:
    """Every backend judged for one request, and the choice; ``refusal`` says why there is none."""

    request: Request
    verdicts: tuple[Verdict, ...]
    chosen: str | None
    refusal: str | None = None

    def verdict(self, backend: str) -> Verdict:
        (found,) = (v for v in self.verdicts if v.backend == backend)
        return found

    @property
    def has_fused_backward(self) -> bool:
        """Whether the fused kernels serve both directions."""
        # A note says that something else serves the backward.
        return self.chosen == "fused" and self.verdict("fused").note is None

    @property
    def reason(self) -> str:
        """One line: what was chosen, and why not the fused backend where it is not."""
        if self.chosen is None:
            return f"no backend is chosen: {self.refusal}"
        fused = self.verdict("fused")
        if self.chosen == "fused":
            return "fused" if fused.note is None else f"fused; {fused.note}"
        note = self.verdict(self.chosen).note
        chosen = f"{self.chosen} ({note})" if note else self.chosen
        return chosen if fused.accepted else f"{chosen}, since {fused}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": asdict(self.request),
            "chosen": self.chosen,
            "refusal": self.refusal,
            "verdicts": [v.as_dict() for v in self.verdicts],
        }

    def __str__(self) -> str:
        chosen = self.chosen or f"none: {self.refusal}"
        return "\n".join([*(str(v) for v in self.verdicts), f"chosen: {chosen}"])


def wanted(backend: str) -> str | None:
    """The backend that must be used: the argument's, for 'auto' that of MEGA_MOE_BACKEND; None: the first that fits."""
    named = check_name("backend", backend)
    outside = env.backend()
    return named if named is not None or outside is None else check_name("MEGA_MOE_BACKEND", outside)


def wanted_strict(strict: bool | None) -> bool:
    """Whether falling back is forbidden: the argument, for None MEGA_MOE_STRICT."""
    if strict is None:
        return env.strict()
    if not isinstance(strict, bool):
        raise TypeError(f"strict: got {strict!r} ({type(strict).__name__}), want True, False or None")
    return strict


def explain(
    request: Request, facts: Sequence[RankFacts], named: str | None = None, strict: bool = False
) -> Explanation:
    """Judge and choose; BackendRefusedError when nothing, or not the named backend, can serve the request."""
    verdicts = decide(request, facts, named)
    return Explanation(request, verdicts, choose(verdicts, named, strict).backend)


def forecast(
    request: Request, facts: Sequence[RankFacts], named: str | None = None, strict: bool = False
) -> Explanation:
    """Like `explain`, but ``chosen`` is None where that raises."""
    try:
        return explain(request, facts, named, strict)
    except BackendRefusedError as error:
        # Its first line; the others list the verdicts.
        refusal = str(error).splitlines()[0].rstrip(":")
        return Explanation(request, decide(request, facts, named), None, refusal)


def warn_fallback(explanation: Explanation) -> None:
    """Once per reason and process: the automatic choice is not the fused backend, or its backward is emulated."""
    message = f"mega_moe uses the backend {explanation.reason}"
    emulated = not explanation.has_fused_backward and explanation.request.backward_precision != "bf16"
    if (explanation.chosen != "fused" or emulated) and message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)
