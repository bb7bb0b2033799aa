"""transformers' own expert parallelism with the exchange of tokens inside this library's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation

from mega_moe.integrations.adapters import Arguments, local
from mega_moe.integrations.served import autocast_dtype, compute, making_a_graph
from mega_moe.integrations.shared_buffers import SharedBuffer, keep_for_backward, shared_buffer
from mega_moe.integrations.transformers_experts import TransformersExperts
from mega_moe.nn import in_shape_of

_adapter = TransformersExperts()


class ExpertParallel(EPImplementation):  # type: ignore[misc, unused-ignore]
    """``DistributedConfig(ep_implementation="mega_moe")``: one fused call over the ranks that share the experts.

    Ranks that hold the same batch, those of a tensor-parallel group, send each its part of it. The buffer is built in
    the first call, for ``max_tokens_per_rank`` of `mega_moe.integrations.transformers.register` or else for the most
    tokens that a rank has there; ranks cannot see one another's later calls, so it does not grow.

    Raises ValueError when it is built for experts that the layer cannot compute.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if faults := _adapter.layout_faults(experts):
            kind = type(experts).__name__
            raise ValueError(f'{kind}: ep_implementation="mega_moe" cannot serve it: ' + "; ".join(faults))
        self._experts = experts
        self._activation = _adapter.activation(experts)
        self._shared: SharedBuffer | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """This rank's ``[T, H]``, global ids and weights ``[T, K]`` -> ``[T, H]``."""
        together = self.tp_mesh.size() > 1
        call = (hidden_states, top_k_index, top_k_weights)
        x, ids, weights = (self._own_rows(t) for t in call) if together else call
        gate_up, down = (local(weight) for weight in _adapter.weights(self._experts))
        experts = gate_up, down
        dtype = autocast_dtype(x) or experts[0].dtype
        if self._shared is None or not self._shared.fits(0, ids.shape[-1], x.device, dtype):
            self._shared = self._build(x, ids.shape[-1], experts, dtype)
        buffer = self._shared.use()
        try:
            y, _ = compute(Arguments(x, ids, weights), experts, buffer, dtype, self._activation)
        except ValueError as error:
            if len(x) > buffer.max_tokens_per_rank:
                raise ValueError(
                    f"{error}: give register() a DispatchConfig(max_tokens_per_rank=)"
                ) from error
            raise
        keep_for_backward(y, buffer)
        y = in_shape_of(x, y).to(x.dtype)
        return self._all_rows(y, hidden_states) if together else y

    def _build(
        self, x: Tensor, top_k: int, experts: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> SharedBuffer:
        import torch.distributed as dist

        from mega_moe.integrations import transformers as switch

        if making_a_graph():
            raise RuntimeError(
                f"{type(self._experts).__name__}: its first call is in a compiled or captured graph, where no "
                "buffer can be built: make one call outside it"
            )
        group = self.ep_mesh.get_group() if self.ep_mesh.size() > 1 else None
        num_local, _, hidden = experts[0].shape
        sizes = (num_local * self.ep_mesh.size(), top_k, hidden, experts[1].shape[2])
        shared = shared_buffer(sizes, x.device, dtype, switch.settings_of_expert_parallel(), group)
        tokens = shared.config.max_tokens_per_rank
        if tokens is None:
            most = torch.tensor([len(x)], device=x.device)
            if group is not None:
                dist.all_reduce(most, dist.ReduceOp.MAX, group)
            tokens = int(most)
        shared.grow(tokens)
        return shared

    def _own_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks of the group hold; their gradients are put together again."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        spread = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        rows: Tensor = spread.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        return rows

    def _all_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        shape, stride = torch.Size(like.shape), (like.shape[-1], 1)
        spread = DTensor.from_local(rows.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride)
        whole: Tensor = spread.full_tensor()
        return whole
