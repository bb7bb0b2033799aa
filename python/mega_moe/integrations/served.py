"""A switched module: its call, who serves it, and what copying, pickling or a forward of its own do to it."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mega_moe._base.activation import SWIGLU, Activation
from mega_moe.api import moe
from mega_moe.buffer import MoEBuffer
from mega_moe.integrations.adapters import Arguments, ExpertAdapter, Sizes, local
from mega_moe.nn import flat, in_shape_of


class DeviceBuffers:
    """The buffers of one size of layer: one on each device that it is called on, built at the first call there.

    ``build`` takes a device, None for the default one, and the dtype of x, and is collective where the buffers are.
    """

    def __init__(
        self,
        build: Callable[[torch.device | None, torch.dtype], MoEBuffer],
        device: torch.device | None,
        dtype: torch.dtype,
    ) -> None:
        self._build = build
        first = build(device, dtype)
        self.first = first.device
        self._on = {first.device: first}

    def on(self, device: torch.device, dtype: torch.dtype, name: str) -> MoEBuffer:
        """The buffer on ``device``; RuntimeError where one would have to be built while a graph is made."""
        if device not in self._on:
            if making_a_graph():
                raise RuntimeError(
                    f"{name}: was converted on {self.first} and is called on {device} first in a compiled or captured "
                    "graph, where no buffer can be built: run one step outside it, or give convert() the device"
                )
            # A tensor made in inference mode could not be written to in training.
            with torch.inference_mode(False):
                self._on[device] = self._build(device, dtype)
        return self._on[device]

    def __iter__(self) -> Any:
        return iter(self._on.values())

    def destroy(self) -> None:
        for buffer in self:
            buffer.destroy()

    def __deepcopy__(self, memo: dict[int, object]) -> DeviceBuffers:
        # As its buffers: a copied model shares them.
        return self


def making_a_graph() -> bool:
    """Whether torch compiles this call or captures it into a CUDA graph."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute(
    call: Arguments,
    weights: tuple[Tensor, Tensor],
    buffer: MoEBuffer,
    dtype: torch.dtype,
    activation: Activation,
) -> tuple[Tensor, Tensor]:
    """-> y as `mega_moe.moe` returns it, and the ids ``[T, K]``; x and both weights are cast to ``dtype``."""
    x, (gate_up, down) = call.x, weights
    ids, shares = flat(call.topk_idx, x), flat(call.topk_weights, x)
    if shares.dtype not in (torch.float32, torch.bfloat16, dtype):
        shares = shares.float()
    y = moe(
        flat(x, x).to(dtype),
        ids,
        shares,
        gate_up.to(dtype),
        down.to(dtype),
        buffer=buffer,
        activation=activation,
    )
    return y, ids


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast asks of x's device, if it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return None


@dataclasses.dataclass(eq=False)
class Served:
    """What a switched module holds besides its parameters: who serves it, and who watches."""

    adapter: ExpertAdapter
    buffers: DeviceBuffers
    buffer: MoEBuffer
    """Of ``buffers``, the one that served the last call."""
    name: str
    sizes: Sizes
    activation: Activation = SWIGLU
    gradient_scale: float = 1.0
    """What the weights' gradients are multiplied by, where nothing else divides them."""
    called_by_model: bool = True
    """Whether the model itself calls the owner of the parameters, or a switched module above it does."""
    watch: Callable[[Tensor, Tensor], None] | None = None
    """Called with (y, ids) of each call."""
    reached: bool = False
    """Whether the call that runs came here, where a module has a forward of its own around this one."""

    def __deepcopy__(self, memo: dict[int, object]) -> Served:
        # Who watches this layer did not ask for its copy.
        return dataclasses.replace(self, watch=None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing to a pickle: another process has neither the buffers nor the watcher.
        return type(None), ()

    def __call__(self, owner: nn.Module, call: Arguments) -> Tensor:
        x, dtype = call.x, self.adapter.dtype or autocast_dtype(call.x) or call.x.dtype
        if x.device != self.buffer.device:
            self.buffer = self.buffers.on(x.device, dtype, self.name)
        gate_up, down = (local(weight).to(dtype) for weight in self.adapter.weights(owner))
        if self.gradient_scale != 1.0:
            gate_up, down = (_scaled_gradient(w, self.gradient_scale) for w in (gate_up, down))
        y, ids = compute(call, (gate_up, down), self.buffer, dtype, self.activation)
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


# What `switch` leaves in a module's __dict__; `_LAST` after `unswitch`.
_OWN = ("_mega_moe", "_mega_moe_adapter", _LAST := "_mega_moe_last")


def switch(module: nn.Module, served: Served) -> None:
    """Let ``served`` answer the calls of ``module``, in place: parameters, names, hooks and type checks stay."""
    owner = served.adapter.owner(module)
    served.called_by_model = owner is module
    last = owner.__dict__.pop(_LAST, None)
    if last is not None:
        # Whoever watches the layer, and how it is sharded, outlive a switch back and forth.
        served.gradient_scale, served.watch = last.gradient_scale, last.watch
        last.__dict__.update(served.__dict__)
        served = last
    if owner is not module:
        _take(module, outer=True)
        module._mega_moe_adapter = served.adapter  # type: ignore[assignment]
    _take(owner, outer=False)
    owner._mega_moe = served  # type: ignore[assignment]


def unswitch(module: nn.Module, adapter: ExpertAdapter) -> None:
    """Undo `switch`. A class that another library has wrapped round ours stays, and its calls are the module's own."""
    owner = adapter.owner(module)
    owner.__dict__[_LAST] = owner.__dict__.pop("_mega_moe")
    module.__dict__.pop("_mega_moe_adapter", None)
    for part in {module, owner}:
        if type(part) in _plain and not _spread(part):
            _give_class(part, _plain[type(part)])


def served_by(module: nn.Module) -> Served | None:
    """What `switch` gave to a module that owns expert parameters."""
    found = module.__dict__.get("_mega_moe")
    return found if isinstance(found, Served) else None


def forward_fault(module: nn.Module) -> str | None:
    """Why a forward that is set on the instance would hide ours; None where there is none, or it can call ours.

    accelerate's hooks call what they found and keep it as ``_old_forward``, which `switch` then replaces.
    """
    own = module.__dict__.get("forward")
    if own is None or _is_its_class_s(own, module):
        return None
    if "_hf_hook" in module.__dict__ and _is_its_class_s(module.__dict__.get("_old_forward"), module):
        return None
    return (
        f"its forward is set on the instance ({_told(own)}) and would go on calling what it was made of: "
        "convert before whatever sets it (accelerate's hooks, Liger kernels, a compiled forward), or remove it"
    )


def _is_its_class_s(forward: Any, module: nn.Module) -> bool:
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def _told(forward: Any) -> str:
    while isinstance(forward, functools.partial):
        forward = forward.func
    name = getattr(forward, "__qualname__", type(forward).__qualname__)
    return f"{getattr(forward, '__module__', None) or type(forward).__module__}.{name}"


def _take(module: nn.Module, *, outer: bool) -> None:
    """Give ``module`` our class, unless it is under another library's that is made of ours."""
    if not any(kind in _plain for kind in type(module).__mro__):
        _give_class(module, _class_of(type(module), outer=outer))


def _give_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let ``module`` be a ``kind``, where it keeps its class's forward on the instance too."""
    if _is_its_class_s(module.__dict__.get("forward"), module):
        del module.__dict__["forward"]
    hooked = _is_its_class_s(module.__dict__.get("_old_forward"), module)
    module.__class__ = kind
    if hooked:
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[assignment]


_classes: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
_plain: dict[type, type[nn.Module]] = {}
"""Our classes, and what each was made of."""


def _class_of(base: type[nn.Module], *, outer: bool) -> type[nn.Module]:
    # A class and not an instance's forward: a copied module must not go on calling the one it was copied from.
    if (base, outer) not in _classes:
        made = type(f"MegaMoE{base.__name__}", (base,), _methods(base, outer=outer))
        _classes[base, outer] = made
        _plain[made] = base
    return _classes[base, outer]


def _methods(base: type[nn.Module], *, outer: bool) -> dict[str, Any]:
    # Their signature stays the base's: a trainer may look names of arguments up in it.
    @functools.wraps(base.forward)
    def forward_outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = getattr(self, "_mega_moe_adapter", None)
        if adapter is None:
            return _forward_of_base(self, base, args, kwargs)
        owner = adapter.owner(self)
        if "forward" in self.__dict__:
            owner._mega_moe.reached = True
        # Through the call of the owner: a wrapper such as FSDP2 gathers its weights in that call's hooks.
        return owner(*adapter.arguments(self, *args, **kwargs))

    @functools.wraps(base.forward)
    def forward_owner(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody may hold this forward when the switch is undone.
        served: Served | None = getattr(self, "_mega_moe", None)
        if served is None:
            return _forward_of_base(self, base, args, kwargs)
        if "forward" in self.__dict__:
            served.reached = True
        read = served.adapter.arguments if served.called_by_model else _as_they_are
        return served(self, read(self, *args, **kwargs))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        served: Served | None = self._mega_moe
        if outer and self._mega_moe_adapter is not None:
            served = self._mega_moe_adapter.owner(self)._mega_moe
        if served is None or "forward" not in self.__dict__:
            return base.__call__(self, *args, **kwargs)
        # Set after convert(). Round ours it does no harm, instead of ours it would be a layer that we never see.
        served.reached = False
        result = base.__call__(self, *args, **kwargs)
        if not served.reached:
            raise RuntimeError(
                f"{served.name}: its forward was set on the instance after convert() ({_told(self.forward)}) and does "
                "not call the converted layer: take it away, or leave the layer out of DispatchConfig.layers"
            )
        return result

    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        made: Any = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def shallow_copy(self: Any) -> Any:
        made: Any = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def reduce(self: Any, protocol: int) -> Any:
        made: Any = base.__reduce_ex__(self, protocol)
        if type(self) not in _plain or len(made) < 3 or not isinstance(made[2], dict):
            return (
                made  # of another library's class round ours, or of a base that pickles in a way of its own
            )
        if served_by(self) is not None:
            warnings.warn(
                "a module that mega_moe serves is pickled as what it was before convert(): call convert() where "
                "it is loaded",
                UserWarning,
                stacklevel=2,
            )
        plain = {key: value for key, value in made[2].items() if key not in _OWN}
        # A constructor of Python's own: the file can be read where this package is not.
        return copyreg._reconstructor, (_plain[type(self)], object, None), plain  # type: ignore[attr-defined]

    return {
        "forward": forward_outer if outer else forward_owner,
        "__call__": call,
        "__deepcopy__": deep_copy,
        "__copy__": shallow_copy,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "_mega_moe": None,
        "_mega_moe_adapter": None,
    }


def _as_they_are(_: nn.Module, *args: Any) -> Arguments:
    return Arguments(*args)


def _spread(module: nn.Module) -> bool:
    """Whether a parameter of the module itself is a part of a tensor over several ranks."""
    return any(hasattr(parameter, "to_local") for parameter in module.parameters(recurse=False))


def _forward_of_base(module: nn.Module, base: type[nn.Module], args: Any, kwargs: Any) -> Any:
    if _spread(module):
        raise RuntimeError(
            f"{base.__name__}: its experts are spread over ranks and not served since destroy(): call convert() again"
        )
    return base.forward(module, *args, **kwargs)
