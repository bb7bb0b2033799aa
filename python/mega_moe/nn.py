"""The experts of a mixture-of-experts layer as a module; the router stays the model's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mega_moe._base.activation import Activation, as_activation
from mega_moe.api import moe
from mega_moe.buffer import MoEBuffer

__all__ = ["MegaMoE"]


def flat(value: Tensor, x: Tensor) -> Tensor:
    """``value [..., N]`` as ``[T, N]``, for the leading extents of ``x`` alone.

    A transposed batch of equal size must reach the check of `mega_moe.moe` as it is.
    """
    return value.reshape(-1, value.shape[-1]) if value.shape[:-1] == x.shape[:-1] else value


def in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    """``y [T, H]``, which nothing else holds, in the shape of ``x``, and no view to autograd.

    FSDP2 hangs a hook on what a module returns, which a later in-place operation on a view would drop without a word.
    """
    shaped: Tensor = torch.ops.aten._unsafe_view(y, x.shape)
    return shaped


def _after_loading(module: MegaMoE, _: object) -> None:
    # FSDP loads into its shards, and nothing shows that the parameter gathered from them later is another one.
    if module._buffer is not None:
        module._buffer.weights_changed()


class MegaMoE(nn.Module):
    """This rank's experts, without biases.

    Args:
        hidden: H.
        intermediate: I.
        num_local_experts: experts of this rank, E / R.
        buffer: serves the calls; may be attached later, so that a model can be built on the meta device first.
        activation: what stands between the projections; None: the buffer's.
        activation_clamp: short for ``Activation(clamp=...)``; both together are a ValueError.

    Parameters (names of the state dict, natural row order):
        gate_up_proj: ``[E_local, 2I, H]``, I gate rows then I up rows.
        down_proj: ``[E_local, H, I]``.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_local_experts: int,
        *,
        buffer: MoEBuffer | None = None,
        activation: Activation | None = None,
        activation_clamp: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_local_experts = num_local_experts
        given = activation is not None or activation_clamp is not None
        self.activation = as_activation(activation, activation_clamp) if given else None
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_local_experts, 2 * intermediate, hidden, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_local_experts, hidden, intermediate, device=device, dtype=dtype)
        )
        self._buffer: MoEBuffer | None = None
        if buffer is not None:
            self.attach(buffer)
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def attach(self, buffer: MoEBuffer) -> None:
        """Let ``buffer`` serve the calls from now on; ValueError when its sizes are not this module's."""
        for name in ("hidden", "intermediate", "num_local_experts"):
            got, want = getattr(buffer, name), getattr(self, name)
            if got != want:
                raise ValueError(f"buffer: {name} is {got}, this module's is {want}")
        self._buffer = buffer

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Uniform in +-1/sqrt(fan-in), as torch's linear layers; drawn expert by expert."""
        with torch.no_grad():
            for weight, fan_in in ((self.gate_up_proj, self.hidden), (self.down_proj, self.intermediate)):
                bound = 1 / math.sqrt(fan_in)
                for expert in weight:
                    expert.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """``x [..., H]``, ``topk_idx`` and ``topk_weights [..., K]`` -> ``[..., H]``; see `mega_moe.moe`.

        Under autocast x and the weights are cast to the autocast dtype; routing weights keep theirs.
        """
        if self._buffer is None:
            raise RuntimeError("MegaMoE: no buffer attached; build a MoEBuffer and call attach(buffer)")
        gate_up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)

        y = moe(
            flat(x, x),
            flat(topk_idx, x),
            flat(topk_weights, x),
            gate_up,
            down,
            buffer=self._buffer,
            activation=self.activation,
        )
        return in_shape_of(x, y)

    def extra_repr(self) -> str:
        served = "no buffer" if self._buffer is None else self._buffer.backend
        return f"{self.num_local_experts} experts, hidden={self.hidden}, intermediate={self.intermediate}, {served}"
