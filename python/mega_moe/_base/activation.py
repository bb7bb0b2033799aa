"""What the layer computes between its two projections, as data that every layer of the package passes on."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

# Kinds that are planned and refused by name until kernels and plain backends serve them.
_PLANNED = ("gpt_oss", "geglu_tanh", "relu2")
KINDS = ("swiglu",)


@dataclass(frozen=True)
class Activation:
    """Activation of the experts, between the gate/up projection and the down projection.

    Args:
        kind: "swiglu": ``silu(gate) * up``.
        clamp: c > 0 limits gate to (-inf, c] and up to [-c, c]; gradients are 0 outside. None: no limit.
        alpha: of kinds that have one; swiglu has none.

    Raises:
        ValueError: an unknown kind, a clamp that is not above 0, or a number that the kind does not have.
        TypeError: a clamp or alpha that is not a number.
    """

    kind: str = "swiglu"
    _: KW_ONLY
    clamp: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            planned = ", which this version does not serve yet" if self.kind in _PLANNED else ""
            raise ValueError(f"activation: got kind {self.kind!r}{planned}, want one of {', '.join(KINDS)}")
        for name, value in (("clamp", self.clamp), ("alpha", self.alpha)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(
                    f"activation: got {name} {value!r} ({type(value).__name__}), want None or a number"
                )
        if self.alpha is not None:
            raise ValueError(
                f"activation: got alpha {self.alpha} with kind {self.kind!r}, which has none, want None"
            )
        if self.clamp is not None:
            if not self.clamp > 0:
                raise ValueError(f"activation: got clamp {self.clamp}, want None or a number > 0")
            object.__setattr__(self, "clamp", float(self.clamp))

    def arguments(self) -> tuple[str, float | None, float | None]:
        """As the operators take it: kind, clamp, alpha."""
        return self.kind, self.clamp, self.alpha


SWIGLU = Activation()


def as_activation(
    activation: Activation | None, activation_clamp: float | None = None, default: Activation = SWIGLU
) -> Activation:
    """What the arguments ``activation`` and its short form ``activation_clamp`` of one call mean together."""
    if activation is not None and not isinstance(activation, Activation):
        raise TypeError(f"activation: got {type(activation).__name__}, want a mega_moe.Activation or None")
    if activation_clamp is None:
        return default if activation is None else activation
    if activation is not None:
        raise ValueError(
            f"activation_clamp: got {activation_clamp} alongside activation, want one of them: Activation(clamp=...)"
        )
    if isinstance(activation_clamp, bool) or not isinstance(activation_clamp, (int, float)):
        raise TypeError(f"activation_clamp: got {type(activation_clamp).__name__}, want None or a number > 0")
    if not activation_clamp > 0:
        raise ValueError(f"activation_clamp: got {activation_clamp}, want None or a number > 0")
    return Activation(clamp=activation_clamp)
