"""How a model's own experts are read: the small protocol between a family of modules and the layer."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mega_moe._base.activation import SWIGLU, Activation


class Sizes(NamedTuple):
    """The static part of one layer; layers with equal sizes share a buffer."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int


class Arguments(NamedTuple):
    """``x [..., H]``, global expert ids ``[..., K]`` and routing weights ``[..., K]`` of one call."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


class ExpertAdapter(Protocol):
    """One family of expert modules. Every method is about a module that ``matches`` accepted.

    ``parameters`` are the names, below `owner`, of the weights whose first dimension counts the experts. ``dtype`` is
    what the experts compute in, whatever they are given; None: the dtype of x, or autocast's.
    """

    family: str
    parameters: tuple[str, ...]
    dtype: torch.dtype | None

    def matches(self, module: nn.Module) -> bool:
        """Whether this is an expert module of the family."""
        ...

    def refusals(self, module: nn.Module) -> list[str]:
        """Why the module cannot be switched; empty when it can."""
        ...

    def sizes(self, module: nn.Module) -> Sizes: ...

    def owner(self, module: nn.Module) -> nn.Module:
        """The module that owns the parameters and whose hooks must fire: ``module`` itself, or one below it."""
        ...

    def weights(self, owner: nn.Module) -> tuple[Tensor, Tensor]:
        """``[E, 2I, H]`` with I gate rows then I up rows, and ``[E, H, I]``."""
        ...

    def activation(self, module: nn.Module) -> Activation:
        """What the experts compute between their projections."""
        ...

    def arguments(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """What the model passes to ``module``'s forward."""
        ...

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        """The router's ``output`` with ``topk_idx`` for its ids, and its own weights for them; -1 masks a slot."""
        ...

    def ids(self, output: Any) -> Tensor:
        """The ids in a router's ``output``; -1 in a slot that the router gives to no expert."""
        ...


class PackedExperts:
    """Modules that hold ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]`` and are called with (x, ids, weights).

    A subclass says in ``matches`` which modules it means, and where `top_k` is found.
    """

    family = "packed experts"
    parameters: tuple[str, ...] = ("gate_up_proj", "down_proj")
    dtype: torch.dtype | None = None

    def matches(self, module: nn.Module) -> bool:
        return False

    def refusals(self, module: nn.Module) -> list[str]:
        return packed_faults(self.weights(module), self.parameters)

    def top_k(self, module: nn.Module) -> int:
        return int(module.top_k)  # type: ignore[arg-type]

    def sizes(self, module: nn.Module) -> Sizes:
        gate_up, down = self.weights(module)
        return Sizes(gate_up.shape[0], self.top_k(module), gate_up.shape[2], down.shape[2])

    def owner(self, module: nn.Module) -> nn.Module:
        return module

    def weights(self, owner: nn.Module) -> tuple[Tensor, Tensor]:
        return owner.gate_up_proj, owner.down_proj  # type: ignore[return-value]

    def activation(self, module: nn.Module) -> Activation:
        return SWIGLU

    def arguments(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        return Arguments(*args, **kwargs)

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        raise NotImplementedError(f"{self.family}: this adapter does not say how a router weighs given ids")

    def ids(self, output: Any) -> Tensor:
        raise NotImplementedError(f"{self.family}: this adapter does not say what a router returns")


def packed_faults(weights: tuple[Tensor, Tensor], names: tuple[str, ...]) -> list[str]:
    """What keeps two parameters from being ``[E, 2I, H]`` and ``[E, H, I]`` of plain numbers."""
    faults = []
    for name, weight, want in zip(names, weights, ("[E, 2I, H]", "[E, H, I]")):
        kind = type(weight)
        if kind not in (Tensor, nn.Parameter) and not hasattr(weight, "to_local"):
            faults.append(
                f"{name} is a {kind.__name__}, want a plain tensor: quantized experts are not served"
            )
        elif weight.dtype.itemsize < 2 or not weight.dtype.is_floating_point:
            dtype = str(weight.dtype).removeprefix("torch.")
            faults.append(
                f"{name} is {dtype} {list(weight.shape)}, want bf16 or fp32 {want}: "
                "packed or quantized experts are not served, load them unquantized"
            )
        elif weight.dim() != 3:
            faults.append(f"{name} has shape {list(weight.shape)}, want {want}")
    if not faults:
        (experts, rows, hidden), down = weights[0].shape, weights[1].shape
        if rows % 2 or tuple(down) != (experts, hidden, rows // 2):
            faults.append(
                f"{names[0]} is {list(weights[0].shape)} and {names[1]} {list(down)}, want [E, 2I, H] and [E, H, I]"
            )
    return faults


_IN_A_CHECKPOINT = (
    "a block that is compiled and activation-checkpointed runs eagerly where its experts are sharded: this torch "
    "cannot keep a DTensor's mesh for the backward of such a graph. Compile the block first and checkpoint it as a "
    "whole, or do one of the two"
)


def local(weight: Tensor) -> Tensor:
    """The part of an expert parameter that lives here; its gradient becomes one of the whole parameter.

    Traced like any operation, but for a checkpointed region, where the compiler gets a graph break with its reason.
    """
    from torch.distributed.tensor import DTensor  # hasattr does not find to_local while the compiler traces

    if not isinstance(weight, DTensor):
        return weight
    if torch.compiler.is_compiling() and _in_a_checkpoint():
        stopped: Tensor = _part(weight)
        return stopped
    part: Tensor = weight.to_local()
    return part


# Runs while the compiler traces, which is when the block falls back.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _in_a_checkpoint() -> bool:
    """Whether the compiler traces the body of another operation, as it does a checkpointed region; warns once then."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        inside = InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except AttributeError:  # a torch whose compiler keeps this elsewhere: eager is always right
        inside = True
    if inside:
        _warn_of_eager()
    return inside


@functools.cache
def _warn_of_eager() -> None:
    warnings.warn(f"mega_moe: {_IN_A_CHECKPOINT}", UserWarning, stacklevel=2)


@torch.compiler.disable(reason=_IN_A_CHECKPOINT)  # type: ignore[untyped-decorator, unused-ignore]
def _part(weight: Any) -> Tensor:
    part: Tensor = weight.to_local()
    return part
