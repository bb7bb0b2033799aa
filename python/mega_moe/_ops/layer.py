"""The layer as torch operators: `save` and `run`, or `run_saving`; `backward` and `backward_into` behind them.

Autograd is two nodes. `save` keeps the inputs and returns a token shaped like y; `run` computes y, keeps nothing, and
its gradient hands dy to `save`. Activation checkpointing therefore stops its recomputation after `save`, before the
layer itself runs a second time. `run_saving` is one node: what it keeps, gate and up among it, only the layer makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, LayerInputs, Needs
from mega_moe._ops import registry

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

_NUM_INPUTS = len(LayerInputs._fields)
_NUM_CALL = 4  # arguments of _CALL


def _token(x: Tensor) -> Tensor:
    # One element seen T x H times: the token carries a gradient's shape, never a value.
    return x.new_zeros(1, 1).expand(x.shape)


def _save(x: Tensor, *_: Any) -> Tensor:
    return _token(x)


def _plain(device: torch.device) -> Any:
    # A custom op inherits the caller's autocast state; the backends choose every dtype themselves.
    return torch.autocast(device_type=device.type, enabled=False)


def _activation(kind: str, clamp: float | None, alpha: float | None) -> Activation:
    return Activation(kind, clamp=clamp, alpha=alpha)


def _run(token: Tensor, *call: Any) -> Tensor:
    inputs, (handle, *activation) = LayerInputs(*call[:_NUM_INPUTS]), call[_NUM_INPUTS:]
    CALLS["run"] += 1
    with torch.no_grad(), _plain(inputs.x.device):
        return registry.get(handle).forward(inputs, _activation(*activation))[0]


def _run_fake(token: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_saving(*call: Any) -> tuple[Tensor, Tensor]:
    inputs, (_, _, handle, *activation, rows) = LayerInputs(*call[:_NUM_INPUTS]), call[_NUM_INPUTS:]
    CALLS["run_saving"] += 1
    with torch.no_grad(), _plain(inputs.x.device):
        y, saved = registry.get(handle).forward(inputs, _activation(*activation), rows)
    assert saved is not None
    return y, saved


def _run_saving_fake(x: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    w_gate_up, rows = call[2], call[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty((rows, w_gate_up.shape[1]), dtype=x.dtype, device=x.device)


def _backward(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients(dy, call[:_NUM_INPUTS], None, *call[_NUM_INPUTS:])


def _backward_into(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    into, rest = call[_NUM_INPUTS : _NUM_INPUTS + 2], call[_NUM_INPUTS + 2 :]
    return _gradients(dy, call[:_NUM_INPUTS], into, *rest)[:2]


def _gradients(
    dy: Tensor,
    inputs: Sequence[Tensor],
    into: tuple[Tensor, Tensor] | None,
    handle: int,
    kind: str,
    clamp: float | None,
    alpha: float | None,
    needs: Sequence[bool],
    saved: Tensor | None,
) -> tuple[Tensor, ...]:
    CALLS["backward"] += 1
    given = LayerInputs(*inputs)
    # Into a buffer go wide gradients, so that adding them is their only rounding.
    dtype = given.w_gate_up.dtype
    dw_dtype = dtype if into is None else torch.promote_types(dtype, torch.float32)
    with torch.no_grad(), _plain(dy.device):
        got: Gradients = registry.get(handle).backward(
            dy,
            given,
            _activation(kind, clamp, alpha),
            Needs(*needs),
            dw_dtype,
            saved_gate_up=saved,
            into=into,
        )
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in got)


def _backward_fake(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(LayerInputs(*call[:_NUM_INPUTS]), call[_NUM_INPUTS + _NUM_CALL])


def _backward_into_fake(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(LayerInputs(*call[:_NUM_INPUTS]), call[_NUM_INPUTS + 2 + _NUM_CALL])[:2]


def _gradients_fake(inputs: LayerInputs, needs: list[bool]) -> tuple[Tensor, ...]:
    x, _, *others = inputs
    made = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, *others))
    return tuple(m if need else x.new_empty(0) for m, need in zip(made, needs))


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_INPUTS])
    _keep_call(ctx, inputs)


def _run_saving_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gate_up = output[1]
    ctx.mark_non_differentiable(gate_up)
    # Else its gradient, which nobody reads, would be zeros of its size.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_INPUTS], gate_up)
    _keep_call(ctx, inputs)


def _keep_call(ctx: Any, inputs: tuple[Any, ...]) -> None:
    # Not through save_for_backward: each backward adds into these buffers, which autograd would report as a modified
    # saved tensor for every other micro-batch in flight.
    ctx.into = inputs[_NUM_INPUTS : _NUM_INPUTS + 2]
    ctx.call = inputs[_NUM_INPUTS + 2 : _NUM_INPUTS + 2 + _NUM_CALL]
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
    """Of the inputs of `save` or `run_saving`."""
    needed = ctx.needs_input_grad
    needs = [needed[0], needed[2], needed[3], needed[4]]
    into = ctx.into
    ops = torch.ops.mega_moe
    # A gradient can be an expanded or transposed view; the backends read dense rows.
    dy = dy.contiguous()
    if into[0] is None:
        grads = ops.backward(dy, *tensors, *ctx.call, needs, saved)
    else:
        if torch.is_grad_enabled():
            # An operator that writes into its arguments cannot carry an autograd formula that refuses later.
            _no_double_backward(ctx)
        dx, dtopk = ops.backward_into(dy, *tensors, *into, *ctx.call, needs, saved)
        # The weights' gradients are in the buffers; a zero of stride 0 keeps their hooks firing and adds nothing.
        grads = (dx, dtopk, *(w.new_zeros(1, 1, 1).expand(w.shape) for w in tensors[3:]))
    dx, dtopk, dw1, dw2 = (g if need else None for g, need in zip(grads, needs))
    return dx, None, dtopk, dw1, dw2, *(None,) * (ctx.num_inputs - _NUM_INPUTS)


def _run_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_inputs = len(inputs)


def _run_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (dy, *(None,) * (ctx.num_inputs - 1))


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
torch.library.register_autograd(
    "mega_moe::backward", _no_double_backward, setup_context=_run_context, lib=_library
)
