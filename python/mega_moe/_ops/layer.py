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

from mega_moe._ops import registry

# Calls that reached a backend, by operator: the lowest place where a repeated forward can be seen.
CALLS: Counter[str] = Counter()

_LAYER = "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"
_CALL = "int handle, float? activation_clamp"
_INTO = "Tensor(a!) grad_gate_up, Tensor(b!) grad_down"
# With a default, so that what a compiler has cached without the last still calls rightly.
_GIVEN = "bool[4] needs, Tensor? saved_gate_up=None"

_library = torch.library.Library("mega_moe", "DEF")
_library.define(f"save({_LAYER}, Tensor? grad_gate_up, Tensor? grad_down, {_CALL}) -> Tensor")
_library.define(f"run(Tensor token, {_LAYER}, {_CALL}) -> Tensor")
_library.define(
    f"run_saving({_LAYER}, Tensor? grad_gate_up, Tensor? grad_down, {_CALL}, SymInt rows) -> (Tensor, Tensor)"
)
_library.define(f"backward(Tensor dy, {_LAYER}, {_CALL}, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"backward_into(Tensor dy, {_LAYER}, {_INTO}, {_CALL}, {_GIVEN}) -> (Tensor, Tensor)")


def _token(x: Tensor) -> Tensor:
    # One element seen T x H times: the token carries a gradient's shape, never a value.
    return x.new_zeros(1, 1).expand(x.shape)


def _save(x: Tensor, *_: Any) -> Tensor:
    return _token(x)


def _plain(device: torch.device) -> Any:
    # A custom op inherits the caller's autocast state; the backends choose every dtype themselves.
    return torch.autocast(device_type=device.type, enabled=False)


def _run(
    token: Tensor,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    handle: int,
    clamp: float | None,
) -> Tensor:
    CALLS["run"] += 1
    with torch.no_grad(), _plain(x.device):
        return registry.get(handle).forward(x, idx, weights, w1, w2, clamp)


def _run_saving(
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    grad_w1: Tensor | None,
    grad_w2: Tensor | None,
    handle: int,
    clamp: float | None,
    rows: int,
) -> tuple[Tensor, Tensor]:
    CALLS["run_saving"] += 1
    with torch.no_grad(), _plain(x.device):
        return registry.get_saver(handle).forward_saving(x, idx, weights, w1, w2, clamp, rows)


def _run_saving_fake(x: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    w1, rows = call[2], call[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty((rows, w1.shape[1]), dtype=x.dtype, device=x.device)


def _backward(dy: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, (handle, clamp, needs, *saved) = list(call[:5]), call[5:]
    return _gradients(dy, inputs, _only(saved), handle, clamp, needs, inputs[3].dtype)


def _only(saved: list[Tensor | None]) -> Tensor | None:
    # The dispatcher leaves out what has its default.
    return saved[0] if saved else None


def _gradients(
    dy: Tensor,
    inputs: list[Tensor],
    saved: Tensor | None,
    handle: int,
    clamp: float | None,
    needs: list[bool],
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    CALLS["backward"] += 1
    need = (needs[0], needs[1], needs[2], needs[3])
    with torch.no_grad(), _plain(dy.device):
        x, idx, weights, w1, w2 = inputs
        if saved is None:
            got = registry.get(handle).backward(dy, x, idx, weights, w1, w2, clamp, need, dw_dtype)
        else:
            saver = registry.get_saver(handle)
            got = saver.backward(dy, x, idx, weights, w1, w2, clamp, need, dw_dtype, saved)
    dx, dtopk, dw1, dw2 = (dy.new_empty(0) if g is None else g for g in got)
    return dx, dtopk, dw1, dw2


def _backward_into(dy: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    inputs, (grad_w1, grad_w2, handle, clamp, needs, *given) = list(call[:5]), call[5:]
    saved = _only(given)
    added = _add_in_kernel(dy, inputs, saved, (grad_w1, grad_w2), handle, clamp, needs)
    if added is not None:
        return added
    # Wide gradients, so that adding into the buffer is their only rounding.
    wide = torch.promote_types(inputs[3].dtype, torch.float32)
    dx, dtopk, dw1, dw2 = _gradients(dy, inputs, saved, handle, clamp, needs, wide)
    for grad, dw, needed in ((grad_w1, dw1, needs[2]), (grad_w2, dw2, needs[3])):
        if needed:
            grad.add_(dw)
    return dx, dtopk


def _add_in_kernel(
    dy: Tensor,
    inputs: list[Tensor],
    saved: Tensor | None,
    into: tuple[Tensor, Tensor],
    handle: int,
    clamp: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor] | None:
    executor = registry.get(handle)
    if not isinstance(executor, registry.Accumulator):
        return None
    need = (needs[0], needs[1], needs[2], needs[3])
    with torch.no_grad(), _plain(dy.device):
        x, idx, weights, w1, w2 = inputs
        got = executor.backward_into(dy, x, idx, weights, w1, w2, clamp, need, into, saved)
    if got is None:
        return None
    CALLS["backward"] += 1
    dx, dtopk = (dy.new_empty(0) if g is None else g for g in got)
    return dx, dtopk


def _backward_fake(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(call[:5], call[7])


def _backward_into_fake(dy: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients_fake(call[:5], call[9])[:2]


def _gradients_fake(inputs: Sequence[Tensor], needs: list[bool]) -> tuple[Tensor, ...]:
    x, _, weights, w1, w2 = inputs
    made = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weights, w1, w2))
    return tuple(m if need else x.new_empty(0) for m, need in zip(made, needs))


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, grad_w1, grad_w2, handle, clamp = inputs
    ctx.save_for_backward(*tensors)
    # Not through save_for_backward: each backward adds into these buffers, which autograd would report as a modified
    # saved tensor for every other micro-batch in flight.
    ctx.into = (grad_w1, grad_w2)
    ctx.call = (handle, clamp)


def _run_saving_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, grad_w1, grad_w2, handle, clamp, _ = inputs
    gate_up = output[1]
    ctx.mark_non_differentiable(gate_up)
    # Else its gradient, which nobody reads, would be zeros of its size.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, gate_up)
    ctx.into = (grad_w1, grad_w2)
    ctx.call = (handle, clamp)


def _run_saving_backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, gate_up = ctx.saved_tensors
    if dy is None:
        # Nobody uses y. The other ranks come to this backward, and wait for this one.
        dy = torch.zeros_like(tensors[0])
    return *_all_gradients(ctx, dy, tensors, gate_up), None


def _save_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _all_gradients(ctx, dy, ctx.saved_tensors, None)


def _all_gradients(
    ctx: Any, dy: Tensor, tensors: Sequence[Tensor], saved: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Of the inputs of `save`, by which those of `run_saving` begin."""
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
    return dx, None, dtopk, dw1, dw2, None, None, None, None


def _run_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _run_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (dy, *(None,) * 7)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "mega_moe.moe: double backward is not supported; differentiate the layer once (no create_graph through it)"
    )


for _name, _impl, _fake in (
    ("save", _save, _save),
    ("run", _run, lambda token, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device)),
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
