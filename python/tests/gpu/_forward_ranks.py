"""The fused forward of ranks that one process plays on one GPU."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mega_moe._backends.fused.layer import Copies, KernelLayer
from mega_moe._backends.fused.memory import Shape
from mega_moe._backends.fused.weight_copies import WeightCopies
from mega_moe._backends.routing import Routing
from mega_moe._base.activation import Activation
from mega_moe._base.layer import LayerInputs
from mega_moe._base.mode import Mode

from ._forward import Layer
from ._virtual import NAN, VirtualRanks

FORWARD = Mode("bf16")


def shape_of(
    layer: Layer, *, max_tokens: int | None = None, pool_rows: int = 0, mode: Mode = FORWARD
) -> Shape:
    """The smallest buffer that holds ``layer``, with canaries. ``pool_rows`` 0: every call is one chunk."""
    return Shape(
        max_tokens=max(*(len(own) for own in layer.x), 1) if max_tokens is None else max_tokens,
        top_k=layer.ids[0].shape[1],
        num_experts=layer.num_experts,
        hidden=layer.gate_up.shape[2],
        intermediate=layer.down.shape[2],
        num_ranks=layer.num_ranks,
        pool_rows=pool_rows,
        mode=mode,
        canaries=True,
    )


def inputs_of(layer: Layer, rank: int) -> LayerInputs:
    return LayerInputs(layer.x[rank], layer.ids[rank], layer.weights[rank], *layer.experts(rank))


def smallest_pool(shape: Shape) -> int:
    """Rows that a chunk must hold: a block of 128 tokens of each rank is never split."""
    rows = min(shape.max_tokens, 128) * shape.num_ranks * shape.top_k + 127 * shape.num_local_experts
    return (rows + 127) // 128 * 128


def shared_pool(shape: Shape) -> int:
    """Rows of a chunk such that any routing fits into both pools together, and few into one."""
    every = shape.max_tokens * shape.num_ranks * shape.top_k + 127 * shape.num_local_experts
    return min(max((every + 255) // 256 * 128, smallest_pool(shape) + 128), (every + 127) // 128 * 128)


def pool_of(chunks: str, shape: Shape) -> int:
    """``pool_rows`` for "one chunk", "both pools" as one chunk, or "many chunks"."""
    if chunks == "one chunk":
        return 0
    return shared_pool(shape) if chunks == "both pools" else smallest_pool(shape)


class ForwardRanks(VirtualRanks):
    """``shape.num_ranks`` ranks with the forward alongside the routing; all memory but the state starts as NaN."""

    def __init__(
        self,
        device: torch.device,
        shape: Shape,
        *,
        num_sms: int | None = None,
        arrival: float = 5.0,
        progress: float = 5.0,
        poison: int = NAN,
        first_lane: int = 0,
    ) -> None:
        super().__init__(
            device,
            shape,
            num_sms=num_sms,
            arrival=arrival,
            progress=progress,
            poison=poison,
            first_lane=first_lane,
        )
        self.layers = [KernelLayer(kernels) for kernels in self.kernels]
        self._copies: dict[tuple[int, int], Copies] = {}

    def on(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """The stream of one rank as the current one."""
        return torch.cuda.stream(self.streams[rank])

    def use_sms(self, num_sms: int) -> None:
        """For each rank, from the next launch on."""
        for kernels in self.kernels:
            kernels.num_sms = num_sms

    def start(
        self, rank: int, layer: Layer, *, delay_seed: int = 0, trace: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """One rank's launch on its stream, or on the one that captures."""
        y, summary = self.layers[rank].forward(
            inputs_of(layer, rank),
            Activation(clamp=layer.clamp),
            copies=self.forward_copies(rank, layer),
            delay_seed=delay_seed,
            trace=trace,
        )
        return y, self.kernels[rank].routing(summary)

    def forward_copies(self, rank: int, layer: Layer) -> Copies | None:
        """Of one rank's weights as the forward in fp8 reads them, made once; None in bf16."""
        if self.shape.mode.forward != "fp8":
            return None
        key = (rank, layer.gate_up.data_ptr())
        if key not in self._copies:
            made = WeightCopies(backward=False, power_of_two=self.shape.mode.power_of_two)
            gate_up, down = (made.of(w, codes=True, transposed=False) for w in layer.experts(rank))
            self._copies[key] = (gate_up, down)
        return self._copies[key]

    def start_all(self, layer: Layer, *, delay_seed: int = 0) -> list[Tensor]:
        """One call of every rank, from the last to the first, each on its stream; waits for nothing."""
        results: dict[int, Tensor] = {}
        for rank in reversed(range(layer.num_ranks)):
            with self.on(rank):
                results[rank], _ = self.start(rank, layer, delay_seed=delay_seed)
        return [results[rank] for rank in range(layer.num_ranks)]

    def forward(self, layer: Layer, *, delay_seed: int = 0) -> list[Tensor]:
        """y of each rank; the inputs are on the device, and so are the results when this returns."""
        self.have_room(layer)
        results = self.start_all(layer, delay_seed=delay_seed)
        torch.cuda.synchronize(self.device)
        return results

    def have_room(self, layer: Layer) -> None:
        """Allocate what the launches will: between them an allocation could wait for a launch that waits."""
        for rank in range(layer.num_ranks):
            self.forward_copies(rank, layer)
            with self.on(rank):
                # The allocator keeps blocks of up to 1 MiB apart from larger ones.
                spare = [torch.empty_like(layer.x[rank]) for _ in range(3)]
                spare += [torch.empty(1 << 18, device=self.device) for _ in range(4)]
            del spare
        torch.cuda.synchronize(self.device)

    def fill_results(self, layer: Layer, word: int) -> None:
        """Leave ``word`` in the memory that y of the next call will be given."""
        self.synchronize()
        for rank, own in enumerate(layer.x):
            with self.on(rank):
                spare = torch.empty_like(own).view(torch.int16).fill_(word - (word >> 15 << 16))
            del spare
        self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def new_ranks(
    device: torch.device,
    layer: Layer,
    *,
    max_tokens: int | None = None,
    pool_rows: int = 0,
    num_sms: int | None = None,
    limit: float = 5.0,
    precision: str = "bf16",
    power_of_two: bool = False,
) -> ForwardRanks:
    """Ranks on a buffer that just holds ``layer``; ``limit``: seconds that a rank waits for another, or within."""
    mode = Mode(precision, scale_format="power_of_two" if power_of_two else "fp32")
    shape = shape_of(layer, max_tokens=max_tokens, pool_rows=pool_rows, mode=mode)
    return ForwardRanks(device, shape, num_sms=num_sms, arrival=limit, progress=limit)
