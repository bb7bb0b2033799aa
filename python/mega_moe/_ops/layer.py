"""The layer as torch operators: `save` and `run`, or `run_saving`; `backward` and `backward_into` behind them.

`run_out` and `backward_out` overwrite the caller's tensors and have no gradients.

Autograd is two nodes. `save` keeps the inputs and returns a token shaped like y; `run` computes y, keeps nothing, and
its gradient hands dy to `save`. Activation checkpointing therefore stops its recomputation after `save`, before the
layer itself runs a second time. `run_saving` is one node: what it keeps, gate and up among it, only the layer makes.

Registered operators cost the host several times what the rest of a call does. `call` therefore takes them only where
somebody may watch or rewrite operators, and else plain nodes of autograd, which keep and compute the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, LayerInputs, Needs
from mega_moe._ops import flops, registry

# Calls that reached a backend, by operator: the lowest place where a repeated forward can be seen.
CALLS: Counter[str] = Counter()

_INPUTS = "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"
_CALL = "int handle, str activation, float? clamp, float? alpha"
_INTO = "Tensor? grad_gate_up, Tensor? grad_down"
_GIVEN = "bool[4] needs, Tensor? saved_gate_up"

_library = torch.library.Library("mega_moe", "DEF")
_library.define(f"save({_INPUTS}, {_INTO}, {_CALL}) -> Tensor")
_library.define(f"run(Tensor token, {_INPUTS}, {_CALL}) -> Tensor")
_library.define(f"run_saving({_INPUTS}, {_INTO}, {_CALL}, SymInt rows) -> (Tensor, Tensor)")
_library.define(f"backward(Tensor dy, {_INPUTS}, {_CALL}, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"backward_into(Tensor dy, {_INPUTS}, Tensor(a!) grad_gate_up, Tensor(b!) grad_down, {_CALL}, {_GIVEN})"
    " -> (Tensor, Tensor)"
)
_library.define(f"run_out({_INPUTS}, Tensor(a!) y, Tensor(b!)? received, {_CALL}) -> ()")
_library.define(
    f"backward_out(Tensor dy, {_INPUTS}, Tensor(a!) dx, Tensor(b!) dtopk, Tensor(c!) grad_gate_up, "
    f"Tensor(d!) grad_down, {_CALL}) -> ()"
)

_CallArguments = tuple[int, str, float | None, float | None]
_INPUT = slice(0, 5)
_BUFFERS = slice(5, 7)  # of an operator with _INTO


class _Call(NamedTuple):
    """Arguments of _CALL."""

    handle: int
    kind: str
    clamp: float | None
    alpha: float | None

    @property
    def executor(self) -> registry.Executor:
        return registry.get(self.handle)

    @property
    def activation(self) -> Activation:
        return Activation(self.kind, clamp=self.clamp, alpha=self.alpha)


def _counted(name: str, device: torch.device) -> AbstractContextManager[None]:
    CALLS[name] += 1
    # The caller's autocast state is inherited; the backends choose every dtype themselves.
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return _without_modes(device)
    return nullcontext()


@contextmanager
def _without_modes(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device_type=device.type, enabled=False):
        yield


def _save(x: Tensor, *_: Any) -> Tensor:
    # One element seen T x H times: the token carries a gradient's shape, never a value.
    return x.new_zeros(1, 1).expand(x.shape)


def _run(token: Tensor, *args: Any) -> Tensor:
    inputs, call = LayerInputs(*args[_INPUT]), _Call(*args[5:])
    with _counted("run", inputs.x.device):
        return call.executor.forward(inputs, call.activation)[0]


def _run_fake(token: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_saving(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, call, rows = LayerInputs(*args[_INPUT]), _Call(*args[7:-1]), args[-1]
    with _counted("run_saving", inputs.x.device):
        y, saved = call.executor.forward(inputs, call.activation, rows)
    assert saved is not None
    return y, saved


def _run_saving_fake(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    w_gate_up, rows = others[2], others[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty((rows, w_gate_up.shape[1]), dtype=x.dtype, device=x.device)


def _backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    got = _gradients(dy, LayerInputs(*args[_INPUT]), None, _Call(*args[5:-2]), *args[-2:])
    return _filled(dy, got)


def _backward_into(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs, into, call = LayerInputs(*args[_INPUT]), args[_BUFFERS], _Call(*args[7:-2])
    return _filled(dy, _gradients(dy, inputs, into, call, *args[-2:])[:2])


def _filled(dy: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    # An operator returns no None.
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _run_out(*args: Any) -> None:
    inputs, (y, received), call = LayerInputs(*args[_INPUT]), args[5:7], _Call(*args[7:])
    with _counted("run", y.device):
        call.executor.forward(inputs, call.activation, out=y, received=received)
    torch.autograd.graph.increment_version([y] if received is None else [y, received])


def _backward_out(dy: Tensor, *args: Any) -> None:
    inputs, out, call = LayerInputs(*args[_INPUT]), args[5:9], _Call(*args[9:])
    dw_dtype = torch.promote_types(out[2].dtype, out[3].dtype)
    with _counted("backward", dy.device):
        call.executor.backward(dy, inputs, call.activation, Needs(), dw_dtype, out=out)
    torch.autograd.graph.increment_version(out)


def _gradients(
    dy: Tensor,
    inputs: LayerInputs,
    into: tuple[Tensor, Tensor] | None,
    call: _Call,
    needs: Sequence[bool],
    saved: Tensor | None,
) -> Gradients:
    # Into a buffer go wide gradients, so that adding them is their only rounding.
    dtype = inputs.w_gate_up.dtype
    dw_dtype = dtype if into is None else torch.promote_types(dtype, torch.float32)
    with _counted("backward", dy.device):
        return call.executor.backward(
            dy, inputs, call.activation, Needs(*needs), dw_dtype, saved_gate_up=saved, into=into
        )


def _backward_fake(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    (x, _, *others), needs = args[_INPUT], args[-2]
    made = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, *others))
    return tuple(m if need else x.new_empty(0) for m, need in zip(made, needs))


def _backward_into_fake(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _backward_fake(dy, *args)[:2]


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[_INPUT])
    _keep_call(ctx, inputs)


def _run_saving_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gate_up = output[1]
    ctx.mark_non_differentiable(gate_up)
    # Else its gradient, which nobody reads, would be zeros of its size.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[_INPUT], gate_up)
    _keep_call(ctx, inputs)


def _keep_call(ctx: Any, inputs: tuple[Any, ...]) -> None:
    # Not through save_for_backward: each backward adds into these buffers, which autograd would report as a modified
    # saved tensor for every other micro-batch in flight.
    ctx.into = inputs[_BUFFERS]
    ctx.call = inputs[7:11]
    ctx.num_inputs = len(inputs)


def _run_saving_backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, gate_up = ctx.saved_tensors
    if dy is None:
        # Nobody uses y. The other ranks come to this backward, and wait for this one.
        dy = torch.zeros_like(tensors[0])
    return _all_gradients(ctx, dy, tensors, gate_up)


def _save_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _all_gradients(ctx, dy, ctx.saved_tensors, None)


def _all_gradients(
    ctx: Any, dy: Tensor, tensors: Sequence[Tensor], saved: Tensor | None
) -> tuple[Tensor | None, ...]:
    """For every input of `save`, `run_saving` or a plain node."""
    needs = [_is_asked_for(ctx, i) for i in (0, 2, 3, 4)]
    into = ctx.into
    ops = torch.ops.mega_moe
    # A gradient can be an expanded or transposed view; the backends read dense rows.
    dy = dy.contiguous()
    grads: Sequence[Tensor | None]
    if not torch.is_grad_enabled() and _is_plain((dy, *tensors)):
        buffers = None if into[0] is None else into
        grads = _gradients(dy, LayerInputs(*tensors), buffers, _Call(*ctx.call), needs, saved)
        if buffers is not None:
            grads = (*grads[:2], *_zeros(tensors))
        return (grads[0], None, *grads[1:], *(None,) * (ctx.num_inputs - 5))
    if not torch.compiler.is_compiling():
        flops.register()
    if into[0] is None:
        grads = ops.backward(dy, *tensors, *ctx.call, needs, saved)
    else:
        if torch.is_grad_enabled():
            # An operator that writes into its arguments cannot carry an autograd formula that refuses later.
            _no_double_backward(ctx)
        dx, dtopk = ops.backward_into(dy, *tensors, *into, *ctx.call, needs, saved)
        grads = (dx, dtopk, *_zeros(tensors))
    dx, dtopk, dw1, dw2 = (g if need else None for g, need in zip(grads, needs))
    return dx, None, dtopk, dw1, dw2, *(None,) * (ctx.num_inputs - 5)


def _zeros(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    # The weights' gradients are in the buffers; a zero of stride 0 keeps their hooks firing and adds nothing.
    return (w.new_zeros(1, 1, 1).expand(w.shape) for w in tensors[3:])


def _is_asked_for(ctx: Any, i: int) -> bool:
    """Whether this pass computes the gradient of input ``i``: a pass for some inputs only leaves the others out."""
    if not ctx.needs_input_grad[i]:
        return False
    # The engine's own answer has no public name. needs_input_grad says what a whole backward would need.
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None or torch.compiler.is_compiling():
        return True
    try:
        return bool(ask(ctx.next_functions[i][0]))
    except RuntimeError:  # a leaf that torch.autograd.grad was given: the engine answers for others only
        return True


def _run_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_inputs = len(inputs)
    ctx.shapes = [(i, t.shape, t.dtype) for i, t in enumerate(inputs) if i and isinstance(t, Tensor)]


def _run_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [dy, *[None] * (ctx.num_inputs - 1)]
    if _in_compiled_autograd():
        # It adds up what the two nodes say of an input, and takes no None for nothing.
        for i, shape, dtype in ctx.shapes:
            if ctx.needs_input_grad[i]:
                grads[i] = dy.new_zeros([1] * len(shape), dtype=dtype).expand(shape)
    return tuple(grads)


def _in_compiled_autograd() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(
        compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
    )


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "mega_moe.moe: double backward is not supported; differentiate the layer once (no create_graph through it)"
    )


for _name, _impl, _fake in (
    ("save", _save, _save),
    ("run", _run, _run_fake),
    ("run_saving", _run_saving, _run_saving_fake),
    ("backward", _backward, _backward_fake),
    ("backward_into", _backward_into, _backward_into_fake),
    ("run_out", _run_out, lambda *_: None),
    ("backward_out", _backward_out, lambda *_: None),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mega_moe::{_name}", _fake, lib=_library)
    # Every rank of a group must make every call, so none may be removed because its result is unused here.
    torch.fx.node.has_side_effect(getattr(torch.ops.mega_moe, _name).default)

torch.library.register_autograd("mega_moe::save", _save_backward, setup_context=_save_context, lib=_library)
torch.library.register_autograd("mega_moe::run", _run_backward, setup_context=_run_context, lib=_library)
torch.library.register_autograd(
    "mega_moe::run_saving", _run_saving_backward, setup_context=_run_saving_context, lib=_library
)
torch.library.register_autograd("mega_moe::backward", _no_double_backward, lib=_library)


class MoELayer(torch.autograd.Function):
    """The whole layer as one node: keeps the inputs and, with rows, gate and up."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs, (into, call, rows) = LayerInputs(*args[_INPUT]), args[5:]
        y, saved = _forward(inputs, call, rows)
        ctx.save_for_backward(*inputs, saved)
        ctx.into, ctx.call, ctx.num_inputs = into, call, len(args)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, saved = ctx.saved_tensors
        return _all_gradients(ctx, grads[0], tensors, saved)


class MoESave(torch.autograd.Function):
    """As `save`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*args[_INPUT])
        ctx.into, ctx.call, ctx.num_inputs = args[5], args[6], len(args)
        return args[0].detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _save_backward(ctx, grads[0])


class MoERun(torch.autograd.Function):
    """As `run`; the inputs come in a tuple, so that autograd sees the token alone."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, inputs: LayerInputs, call: _CallArguments) -> Tensor:
        return _forward(inputs, call, 0)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _forward(inputs: LayerInputs, arguments: _CallArguments, rows: int) -> tuple[Tensor, Tensor | None]:
    call = _Call(*arguments)
    with _counted("run_saving" if rows else "run", inputs.x.device):
        return call.executor.forward(inputs, call.activation, rows or None)


def _is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd alone sees torch's operators: no mode, transform, tracer, compiler or class of tensors."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or _in_compiled_autograd()
    ) and all(type(t) is Tensor or type(t) is Parameter for t in tensors)


def call(
    inputs: LayerInputs, into: tuple[Tensor | None, Tensor | None], arguments: _CallArguments, rows: int
) -> Tensor:
    """y of checked ``inputs``; ``rows`` above 0: a forward that autograd records keeps gate and up, in so many rows."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if _is_plain(inputs):
        if not recorded:
            return _forward(inputs, arguments, 0)[0]
        if rows or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            return MoELayer.apply(*inputs, into, arguments, rows)  # type: ignore[no-any-return, no-untyped-call]
        # The hooks may be those of checkpointing, which stops once everything is saved.
        token = MoESave.apply(*inputs, into, arguments)  # type: ignore[no-untyped-call]
        return MoERun.apply(token, inputs, arguments)  # type: ignore[no-any-return, no-untyped-call]
    if not torch.compiler.is_compiling():
        flops.register()
    ops = torch.ops.mega_moe
    if rows and recorded:
        return ops.run_saving(*inputs, *into, *arguments, rows)[0]  # type: ignore[no-any-return]
    token = ops.save(*inputs, *into, *arguments)
    return ops.run(token, *inputs, *arguments)  # type: ignore[no-any-return]
