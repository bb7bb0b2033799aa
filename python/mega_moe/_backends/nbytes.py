"""What the kernels hold for one request: the shape of their memory, and its bytes."""

from __future__ import annotations

from mega_moe._backends.choice.decide import holds_backward, why_no_fused_shape
from mega_moe._backends.choice.facts import variants
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.memory import Shape, symmetric_layout, workspace_layout
from mega_moe._backends.fused.rows import expert_pool_rows, pool_rows
from mega_moe._backends.fused.weight_copies import copies_nbytes
from mega_moe._base import env
from mega_moe._base.errors import BackendRefusedError
from mega_moe._base.mode import Mode
from mega_moe._base.types import MAX_RANKS, MAX_TOKENS_PER_RANK


def kernel_shape(request: Request, fused: bool, backward: bool = False) -> Shape:
    """What both layouts depend on; ``fused``: with what the fused kernels need; ``backward``: of both directions."""
    return Shape(
        request.max_tokens_per_rank,
        request.top_k,
        request.num_experts,
        request.hidden,
        request.num_ranks,
        intermediate=request.intermediate if fused else 0,
        pool_rows=pool_rows(request) if fused else 0,
        mode=request.mode(backward=backward) if fused else Mode(),
        canaries=env.debug(),
    )


def expert_tokens(request: Request) -> int:
    """Tokens that the experts behind a dispatcher serve in one call: as many as a balanced routing can bring."""
    most = request.max_tokens_per_rank * min(request.num_ranks, request.top_k)
    return min(most, MAX_TOKENS_PER_RANK)


def expert_shape(request: Request, backward: bool) -> Shape:
    """What both layouts depend on where the fused kernels serve one rank's experts behind a dispatcher (EP=1)."""
    tokens = expert_tokens(request)
    return Shape(
        tokens,
        request.top_k,
        request.num_local_experts,
        request.hidden,
        1,
        intermediate=request.intermediate,
        pool_rows=expert_pool_rows(request, tokens),
        mode=request.mode(backward=backward),
        canaries=env.debug(),
    )


def buffer_nbytes(request: Request, backend: str | None = None, training: bool = True) -> int:
    """Bytes that a buffer holds on a GPU that runs the kernels; ``backend``: the user's wish.

    ``training``: with what the backward kernel needs, where the wheel holds one.

    Raises BackendRefusedError where the fused backend is wished for and no device could serve the request.
    """
    held = variants()
    wished = backend in (None, "fused", "dispatched")
    alone = backend == "dispatched"
    reasons = why_no_fused_shape(request, held, alone=alone) if wished else ["not wished for"]
    if backend == "fused" and reasons:
        raise BackendRefusedError(f"backend 'fused' cannot serve this request: {'; '.join(reasons)}")
    backward = training and holds_backward(request, held)
    copies = 0 if reasons else _copies_nbytes(request, backward)
    shapes = [expert_shape(request, backward)] if alone and not reasons else []
    # At the least the routing's, which is a kernel for so many ranks.
    if request.num_ranks <= MAX_RANKS:
        shapes.append(kernel_shape(request, not reasons and not alone, backward))
    return copies + sum(symmetric_layout(s).total + workspace_layout(s).total for s in shapes)


def _copies_nbytes(request: Request, backward: bool) -> int:
    """Bytes of the e4m3 weights that one call of the fused kernels makes: the larger of both directions."""
    experts, hidden, inner = request.num_local_experts, request.hidden, request.intermediate

    def both_weights(of_gate_up: int, of_down: int) -> int:
        return copies_nbytes(experts, 2 * inner, hidden, copies=of_gate_up) + copies_nbytes(
            experts, hidden, inner, copies=of_down
        )

    forward = both_weights(1, 1) if request.forward_precision == "fp8" else 0
    # The recompute of gate and up, the dgrad of x, and that of h.
    return max(forward, both_weights(2, 1)) if backward and request.backward_precision == "fp8" else forward
