"""The layer as a function, and the answer to which backend would serve it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mega_moe._backends.choice.decide import check_name
from mega_moe._backends.choice.explanation import Explanation, forecast, wanted, wanted_strict
from mega_moe._backends.choice.facts import as_device, collect, default_device
from mega_moe._backends.choice.request import Request
from mega_moe._backends.dispatched.protocol import Dispatcher, dispatcher_name
from mega_moe._backends.routing import Routing
from mega_moe._base.activation import Activation, as_activation
from mega_moe._base.layer import LayerInputs
from mega_moe._ops import layer
from mega_moe.buffer import MoEBuffer


def moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    buffer: MoEBuffer,
    activation: Activation | None = None,
    activation_clamp: float | None = None,
    backend: str = "auto",
    grad_buffers: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """A mixture-of-experts layer: dispatch, gate/up projection, activation, down projection, combine. Collective.

    Args:
        x: tokens ``[T, H]``, T <= max_tokens_per_rank; T may be 0 and may differ between ranks.
        topk_idx: global expert ids ``[T, K]``, int32 or int64; -1 masks a slot.
        topk_weights: routing weights ``[T, K]``, fp32 or bf16 (or x's dtype); used as given, never normalized.
        w_gate_up: ``[E_local, 2I, H]`` in x's dtype: I gate rows, then I up rows, of this rank's experts.
        w_down: ``[E_local, H, I]`` in x's dtype.
        buffer: built once for this shape; its backend serves the call.
        activation: of the kind that the buffer was built for; None: the buffer's.
        activation_clamp: short for ``Activation(clamp=...)``; both together are a ValueError.
        backend: asserts the buffer's backend; "auto" accepts any.
        grad_buffers: ``(dw_gate_up, dw_down)`` into which backward adds the weights' gradients (fp32 or bf16, or x's
            dtype); the weights' own .grad then receives zeros.

    Returns:
        y ``[T, H]`` in x's dtype: sum over slots of weight * expert(x), summed in slot order.

    Differentiable once in x, topk_weights, w_gate_up and w_down; what needs no gradient is not computed. dW holds the
    sum over the tokens of all ranks. x needs a gradient on all ranks or on none, and topk_weights likewise; the experts
    may be frozen on some ranks only.

    Raises:
        ValueError, TypeError: a bad argument on this rank, before anything runs; the other ranks raise PeerError.
        NotImplementedError: inside a transform of torch.func, or for tangents of forward-mode differentiation; and from
            a second derivative.
        PeerError: another rank refused its call or runs another one. To the fused backend a backward with x or
            topk_weights frozen on some ranks only is another one; other backends compute the gradients for all ranks.

    The fused backend does not wait for the device. A fault found there (an expert id out of range, a rank that refuses,
    runs another call or does not arrive) makes the call's results NaN and raises in the next call on this buffer,
    backward included, or in ``buffer.check()``; with MEGA_MOE_DEBUG=1 a bad id raises in this call. Ranks whose calls
    differ fail at once, not after a time limit; like one that lost a rank, their buffer serves no further call.
    """
    inputs = LayerInputs(x, topk_idx, topk_weights, w_gate_up, w_down)
    try:
        if not torch.compiler.is_compiling():
            _refuse_transforms(inputs)
        act = _check(inputs, buffer, activation, activation_clamp, backend, grad_buffers)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not torch.compiler.is_compiling() and isinstance(buffer, MoEBuffer):
            buffer._refuse(error, x.shape[0] if isinstance(x, Tensor) and x.dim() else 0)
        raise
    into = (None, None) if grad_buffers is None else grad_buffers
    session = buffer._live()
    rows = session.saved_rows.slots(x.shape[0]) if session.saved_rows.parts else 0
    return layer.call(inputs, into, (session.handle, *act.arguments()), rows)


def route(topk_idx: Tensor, topk_weights: Tensor | None = None, *, buffer: MoEBuffer) -> Routing:
    """Load statistics of a routing, before or without the layer itself. Collective; never waits for the device.

    Args:
        topk_idx: global expert ids ``[T, K]``, int32 or int64; -1 masks a slot. T may be 0 or differ between ranks.
        topk_weights: routing weights ``[T, K]``, fp32 or bf16, on all ranks or on none; only kept with the tables.
        buffer: its ``router`` says whether a kernel or plain operators serve the call.

    Returns:
        Routing: int32 tensors on the buffer's device, of this rank's experts over the tokens of all ranks.

    Raises:
        ValueError, TypeError: a bad argument on this rank, before anything runs; the other ranks raise PeerError in
            their next call or in ``buffer.check()``. An expert id out of range raises ValueError there too, or in this
            call where plain operators route or MEGA_MOE_DEBUG=1.
        RankTimeoutError: a rank did not reach a past call in time; the buffer is lost.
    """
    if not isinstance(buffer, MoEBuffer):
        raise TypeError(f"buffer: got {type(buffer).__name__}, want MoEBuffer")
    try:
        _check_routing(topk_idx, topk_weights, buffer)
    except (ValueError, TypeError) as error:
        buffer._live().refuse_routing(
            error, len(topk_idx) if isinstance(topk_idx, Tensor) and topk_idx.dim() else 0
        )
        raise
    return buffer._live().router.route(topk_idx, topk_weights)


def explain(
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    precision: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    num_ranks: int = 1,
    num_reserved_sms: int = 0,
    dw_precision: str = "bf16",
    scale_format: str = "fp32",
    activation: Activation | None = None,
    backend: str = "auto",
    dispatcher: str | Dispatcher = "nccl",
    device: torch.device | str | None = None,
) -> Explanation:
    """Which backend would serve such a buffer on this machine, and why not the others. Builds nothing.

    Where building it would be refused, ``chosen`` is None. MEGA_MOE_BACKEND and MEGA_MOE_STRICT count as they do for a
    buffer. The ranks of a group are taken to be like this one; a real group is judged when its buffer is built.
    """
    request = Request(
        num_experts,
        max_tokens_per_rank,
        top_k,
        hidden,
        intermediate,
        precision,
        str(dtype).removeprefix("torch."),
        num_ranks,
        num_reserved_sms,
        dw_precision,
        scale_format,
        as_activation(activation).kind,
        dispatcher_name(dispatcher),
    )
    where = default_device(None) if device is None else as_device(device)
    return forecast(request, [collect(where, None, request.dispatcher)], wanted(backend), wanted_strict(None))


def _refuse_transforms(inputs: LayerInputs) -> None:
    # Without these the operators would see the transform's wrappers, and a tangent would be zero without a word.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "mega_moe.moe: transforms of torch.func (grad, vjp, jvp, vmap and the like) are not supported; use "
            "torch.autograd, one backward a call"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in inputs):
        raise NotImplementedError(
            "mega_moe.moe: forward-mode differentiation is not supported; use torch.autograd, one backward a call"
        )


def _check(
    inputs: LayerInputs,
    buffer: MoEBuffer,
    activation: Activation | None,
    activation_clamp: float | None,
    backend: str,
    grad_buffers: tuple[Tensor, Tensor] | None,
) -> Activation:
    x, topk_idx, topk_weights, w_gate_up, w_down = inputs
    if not isinstance(buffer, MoEBuffer):
        raise TypeError(f"buffer: got {type(buffer).__name__}, want MoEBuffer")
    named = check_name("backend", backend)
    if named not in (None, buffer.backend):
        raise ValueError(f"backend: got {backend!r}, the buffer was built for {buffer.backend!r}")
    act = as_activation(activation, activation_clamp, buffer.activation)
    if act.kind != buffer.activation.kind:
        raise ValueError(
            f"activation: got kind {act.kind!r}, the buffer was built for {buffer.activation.kind!r}"
        )
    hidden, inner, experts = buffer.hidden, buffer.intermediate, buffer.num_local_experts
    dtypes = buffer.dtypes
    for name, tensor in (("x", x), ("w_gate_up", w_gate_up), ("w_down", w_down)):
        _tensor(name, tensor, buffer, dtypes)
    _shape("x", x, (None, hidden))
    tokens = x.shape[0]
    routing_dtypes = (torch.float32, torch.bfloat16, x.dtype)
    _tensor("topk_idx", topk_idx, buffer, (torch.int32, torch.int64))
    _tensor("topk_weights", topk_weights, buffer, routing_dtypes)
    _shape("topk_idx", topk_idx, (tokens, buffer.top_k))
    _shape("topk_weights", topk_weights, (tokens, buffer.top_k))
    _shape("w_gate_up", w_gate_up, (experts, 2 * inner, hidden))
    _shape("w_down", w_down, (experts, hidden, inner))
    for name, tensor in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"{name}: got {tensor.dtype}, want x's dtype {x.dtype} (nn.MegaMoE casts under autocast)"
            )
    _capacity("x", tokens, buffer)
    if grad_buffers is not None:
        if not isinstance(grad_buffers, tuple) or len(grad_buffers) != 2:
            raise TypeError(
                f"grad_buffers: got {type(grad_buffers).__name__}, want a tuple of two tensors (dw_gate_up, dw_down)"
            )
        for name, grad, weight in zip(("[0]", "[1]"), grad_buffers, (w_gate_up, w_down)):
            _tensor(f"grad_buffers{name}", grad, buffer, routing_dtypes)
            _shape(f"grad_buffers{name}", grad, tuple(weight.shape))
            if grad.requires_grad:
                raise ValueError(f"grad_buffers{name}: requires grad, want a plain buffer")
    return act


def _check_routing(topk_idx: Tensor, topk_weights: Tensor | None, buffer: MoEBuffer) -> None:
    _tensor("topk_idx", topk_idx, buffer, (torch.int32, torch.int64))
    _shape("topk_idx", topk_idx, (None, buffer.top_k))
    if topk_weights is not None:
        _tensor("topk_weights", topk_weights, buffer, (torch.float32, torch.bfloat16))
        _shape("topk_weights", topk_weights, tuple(topk_idx.shape))
    _capacity("topk_idx", len(topk_idx), buffer)


def _tensor(name: str, value: Tensor, buffer: MoEBuffer, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want a Tensor")
    if type(value) is not Tensor and not torch.compiler.is_compiling() and hasattr(value, "to_local"):
        raise TypeError(
            f"{name}: got {type(value).__name__}, want this rank's plain tensor: pass {name}.to_local()"
        )
    if value.dtype not in dtypes:
        listed = ", ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        raise TypeError(f"{name}: got {value.dtype}, want one of {listed} (backend {buffer.backend})")
    if value.device != buffer.device:
        raise ValueError(f"{name}: got a tensor on {value.device}, the buffer is on {buffer.device}")


def _capacity(name: str, tokens: int, buffer: MoEBuffer) -> None:
    if tokens > buffer.max_tokens_per_rank:
        raise ValueError(
            f"{name}: got {tokens} tokens, the buffer was built for {buffer.max_tokens_per_rank} per rank"
        )


def _shape(name: str, value: Tensor, want: tuple[int | None, ...]) -> None:
    got = value.shape
    if got == want:
        return
    if len(got) != len(want) or any(w is not None and g != w for g, w in zip(got, want)):
        shown = ", ".join("T" if w is None else str(w) for w in want)
        raise ValueError(f"{name}: got shape {tuple(got)}, want ({shown})")
