"""Layer shapes that are measured, and the work that one call of such a layer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARTS = ("ceilings", "layer")
"""What one run measures unless told; "host" besides."""

DIRECTIONS = ("forward", "backward", "forward_backward")
"""What one timed call does: the layer's output, its gradients from a kept graph, or both."""

# GEMMs of one routed row, in units of H * I multiply-adds counted as two FLOPs:
_FORWARD = 6  # gate and up 4, down 2
_RECOMPUTE = 4  # gate and up again, because the forward keeps x, ids and weights only
_HIDDEN_GRADIENT = 2  # dh
_INPUT_GRADIENT = 4  # dx
_WEIGHT_GRADIENT = 6  # dW1 4, dW2 2


@dataclass(frozen=True)
class Shape:
    """One MoE layer: hidden size, FFN size of an expert, number of experts, experts per token."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    default_tokens: int
    """Tokens per rank of one call where the user names none."""

    def sizes(self) -> dict[str, Any]:
        """As `mega_moe.explain` and `mega_moe.MoEBuffer` take them."""
        return {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
        }


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("tiny", 256, 128, 8, 2, 256),
        Shape("30B", 2048, 768, 128, 8, 16384),
        Shape("235B", 4096, 1536, 128, 8, 16384),
        Shape("DeepSeek-V3", 7168, 2048, 256, 8, 8192),
    )
}


def find_shape(name: str) -> Shape:
    """The shape of that name, in any case. Raises ValueError that lists the known ones."""
    for known, shape in SHAPES.items():
        if known.lower() == name.lower():
            return shape
    raise ValueError(f"shape: got {name!r}, wanted one of {', '.join(SHAPES)}")


@dataclass(frozen=True)
class Work:
    """FLOPs of one call on one rank, split by the element type that the GEMMs read, and the rule in words."""

    flops: dict[str, float]
    rule: str

    @property
    def total(self) -> float:
        return sum(self.flops.values())


def layer_work(
    shape: Shape,
    tokens: int,
    direction: str,
    *,
    precision: str,
    dtype: str,
    recompute: bool = True,
    dw_precision: str = "bf16",
) -> Work:
    """FLOPs of `tokens` tokens in one direction; routing is taken as balanced, so every rank does T * K rows.

    `precision` and `dw_precision` are the buffer's; `dtype` the tensors' (bfloat16, float32), in which every product
    runs that is not fp8: in the fp8 modes that of the weight gradients, unless `dw_precision` is fp8 too. `recompute`
    says whether the backward computes gate and up again. Raises ValueError for an unknown direction or precision.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}, wanted one of {', '.join(DIRECTIONS)}")
    fp8_passes = {"bf16": (False, False), "fp8": (True, True), "fp8_bwd": (False, True)}
    if precision not in fp8_passes:
        raise ValueError(f"precision: got {precision!r}, wanted one of {', '.join(fp8_passes)}")
    forward_fp8, backward_fp8 = fp8_passes[precision]
    units: dict[str, int] = {}

    def add(count: int, fp8: bool) -> None:
        element = "float8_e4m3fn" if fp8 else dtype
        units[element] = units.get(element, 0) + count

    if direction != "backward":
        add(_FORWARD, forward_fp8)
    if direction != "forward":
        add(_HIDDEN_GRADIENT + _INPUT_GRADIENT + (_RECOMPUTE if recompute else 0), backward_fp8)
        add(_WEIGHT_GRADIENT, dw_precision == "fp8")
    rule = f"{sum(units.values())}*T*K*H*I"
    if direction != "forward":
        rule += ", gate and up recomputed" if recompute else ", nothing recomputed"
    rows = tokens * shape.top_k * shape.hidden * shape.intermediate
    return Work({element: float(count * rows) for element, count in units.items()}, rule)


def backward_flops(shape: Shape, tokens: int, *, dx: bool, dw: bool) -> float:
    """FLOPs of a backward that recomputes gate and up and is asked for dx, the weights' gradients, or both."""
    units = _RECOMPUTE + _HIDDEN_GRADIENT + (_INPUT_GRADIENT if dx else 0) + (_WEIGHT_GRADIENT if dw else 0)
    return float(units * tokens * shape.top_k * shape.hidden * shape.intermediate)
