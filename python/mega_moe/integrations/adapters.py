"""How a model's own experts are read: the small protocol, and the module's call once it is switched."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from mega_moe.api import moe
from mega_moe.buffer import MoEBuffer
from mega_moe.nn import flat, in_shape_of


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

    def arguments(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """What the model passes to ``module``'s forward."""
        ...

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        """The router's ``output`` with ``topk_idx`` for its ids, and its own weights for them."""
        ...

    def ids(self, output: Any) -> Tensor:
        """The ids in a router's ``output``."""
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
        return []

    def top_k(self, module: nn.Module) -> int:
        return int(module.top_k)  # type: ignore[arg-type]

    def sizes(self, module: nn.Module) -> Sizes:
        gate_up, down = self.weights(module)
        return Sizes(gate_up.shape[0], self.top_k(module), gate_up.shape[2], down.shape[2])

    def owner(self, module: nn.Module) -> nn.Module:
        return module

    def weights(self, owner: nn.Module) -> tuple[Tensor, Tensor]:
        return owner.gate_up_proj, owner.down_proj  # type: ignore[return-value]

    def arguments(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        return Arguments(*args, **kwargs)

    def reroute(self, router: nn.Module, output: Any, topk_idx: Tensor) -> Any:
        raise NotImplementedError(f"{self.family}: this adapter does not say how a router weighs given ids")

    def ids(self, output: Any) -> Tensor:
        raise NotImplementedError(f"{self.family}: this adapter does not say what a router returns")


@dataclass(eq=False)
class Served:
    """What a switched module holds beside its parameters: who serves it, and who watches."""

    adapter: ExpertAdapter
    buffer: MoEBuffer
    name: str
    sizes: Sizes
    activation_clamp: float | None = None
    gradient_scale: float = 1.0
    """What the weights' gradients are multiplied by, where nothing else divides them."""
    called_by_model: bool = True
    """Whether the model itself calls the owner of the parameters, or a switched module above it does."""
    watch: Callable[[Tensor, Tensor], None] | None = None
    """Called with (y, ids) of each call."""

    def __call__(self, owner: nn.Module, call: Arguments) -> Tensor:
        x, dtype = call.x, self.adapter.dtype or call.x.dtype
        if self.adapter.dtype is None and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        gate_up, down = (local(weight).to(dtype) for weight in self.adapter.weights(owner))
        if self.gradient_scale != 1.0:
            gate_up, down = (_scaled_gradient(w, self.gradient_scale) for w in (gate_up, down))
        ids, weights = flat(call.topk_idx, x), flat(call.topk_weights, x)
        if weights.dtype not in (torch.float32, torch.bfloat16, dtype):
            weights = weights.float()
        y = moe(
            flat(x, x).to(dtype),
            ids,
            weights,
            gate_up,
            down,
            buffer=self.buffer,
            activation_clamp=self.activation_clamp,
        )
        if self.watch is not None:
            self.watch(y, ids)
        return in_shape_of(x, y).to(x.dtype)


class _ScaledGradient(torch.autograd.Function):
    """The tensor itself, and its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _scaled_gradient(weight: Tensor, scale: float) -> Tensor:
    result: Tensor = _ScaledGradient.apply(weight, scale)  # type: ignore[no-untyped-call]
    return result


_classes: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def switch(module: nn.Module, served: Served) -> None:
    """Let ``served`` answer the calls of ``module``, in place: parameters, names, hooks and type checks stay."""
    owner = served.adapter.owner(module)
    served.called_by_model = owner is module
    if owner is not module:
        module.__class__ = _class_of(type(module), outer=True)
        module._mega_moe_adapter = served.adapter  # type: ignore[assignment]
    owner.__class__ = _class_of(type(owner), outer=False)
    owner._mega_moe = served  # type: ignore[assignment]


def served_by(module: nn.Module) -> Served | None:
    """What `switch` gave to a module that owns expert parameters."""
    found = module.__dict__.get("_mega_moe")
    return found if isinstance(found, Served) else None


def _class_of(base: type[nn.Module], *, outer: bool) -> type[nn.Module]:
    # A class and not an instance's forward: a copied module must not go on calling the one it was copied from.
    if (base, outer) not in _classes:
        # Their signature stays the base's: a trainer may look names of arguments up in it.
        @functools.wraps(base.forward)
        def forward_outer(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            adapter = self._mega_moe_adapter
            # Through the call of the owner: a wrapper such as FSDP2 gathers its weights in that call's hooks.
            result: Tensor = adapter.owner(self)(*adapter.arguments(self, *args, **kwargs))
            return result

        @functools.wraps(base.forward)
        def forward_owner(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            served: Served = self._mega_moe
            read = served.adapter.arguments if served.called_by_model else _as_they_are
            return served(self, read(self, *args, **kwargs))

        _classes[base, outer] = type(
            f"MegaMoE{base.__name__}",
            (base,),
            {
                "forward": forward_outer if outer else forward_owner,
                "__module__": base.__module__,
                "__copy__": lambda self: _twin(self, dict(self.__dict__)),
                "__deepcopy__": _deep_twin,
                "__reduce_ex__": _refuse_pickling,
            },
        )
    return _classes[base, outer]


def _twin(module: nn.Module, state: dict[str, Any]) -> nn.Module:
    made = type(module).__new__(type(module))
    made.__dict__.update(state)
    return made


def _deep_twin(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made = memo[id(module)] = _twin(module, {})
    made.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return made


def _refuse_pickling(module: nn.Module, _: int) -> NoReturn:
    # Pickle would look the class up by its name, and say only that it is not there.
    raise TypeError(
        f"{type(module).__name__}: a converted model cannot be pickled whole; save model.state_dict(), which also fits "
        "the model that was not converted"
    )


def _as_they_are(_: nn.Module, *args: Any) -> Arguments:
    return Arguments(*args)


def local(weight: Tensor) -> Tensor:
    """The part of an expert parameter that lives here; its gradient becomes one of the whole parameter."""
    return _part(weight) if hasattr(weight, "to_local") else weight


# Not traced: the compiler cannot follow the backward of to_local. FSDP2's own hooks break the graph here in any case.
@_disable_dynamo
def _part(weight: Any) -> Tensor:
    part: Tensor = weight.to_local()
    return part
