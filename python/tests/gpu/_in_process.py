"""Ranks of the backend dispatched that threads of one process play: in the place of a network, copies on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from mega_moe._backends.build import build_dispatched
from mega_moe._backends.choice.facts import collect
from mega_moe._backends.choice.request import Request
from mega_moe._backends.dispatched.collectives import CollectiveDispatcher
from mega_moe._backends.dispatched.executor import DispatchedExecutor
from mega_moe._backends.group import Control
from mega_moe._base.activation import Activation
from mega_moe._base.layer import Gradients, LayerInputs, Needs

from ._backward_ranks import WITH_DW
from ._forward import Layer

T = TypeVar("T")
SECONDS = 60.0  # that a thread waits for the others


class Meeting:
    """Where threads hand values to one another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._values: list[Any] = [None] * size

    def share(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    def run(self, call: Callable[[int], T]) -> list[T]:
        """``call`` of every rank at once -> results by rank; the error of the first that fails ends all."""

        def guarded(rank: int) -> T:
            try:
                with torch.no_grad():
                    return call(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(guarded, rank) for rank in range(self.size)]
            errors = [f.exception() for f in futures]
            for error in sorted((e for e in errors if e is not None), key=_comes_last):
                raise error
            return [f.result() for f in futures]


def _comes_last(error: BaseException) -> bool:
    return isinstance(error, threading.BrokenBarrierError)


class ThreadControl(Control):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.timeout = rank, meeting.size, SECONDS
        self._meeting = meeting

    def exchange(self, header: Tensor, what: str) -> Tensor:
        return torch.stack(self._meeting.share(self.rank, header))

    def gather(self, value: Any, what: str) -> list[Any]:
        return self._meeting.share(self.rank, value)


class Copies(CollectiveDispatcher):
    """Everything of the engine `nccl` but the all-to-all."""

    def __init__(self, rank: int, num_local_experts: int, meeting: Meeting) -> None:
        super().__init__(rank, num_local_experts, None)
        self._meeting = meeting

    def _travel(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        parts = [theirs[self._rank] for theirs in self._meeting.share(self._rank, rows.split(sent))]
        assert [len(part) for part in parts] == received
        return torch.cat(parts)


class InProcessRanks:
    """An executor for each rank of ``layer``, with memory of its own."""

    def __init__(self, device: torch.device, layer: Layer, precision: str = "bf16") -> None:
        named, wgrad = WITH_DW.get(precision, (precision, "bf16"))
        request = Request(
            layer.num_experts,
            max(1, *map(len, layer.x)),
            layer.ids[0].shape[1],
            layer.gate_up.shape[2],
            layer.down.shape[2],
            named,
            num_ranks=layer.num_ranks,
            dw_precision=wgrad,
        )
        self.meeting = meeting = Meeting(layer.num_ranks)
        facts = [collect(device)] * layer.num_ranks
        self.executors: list[DispatchedExecutor] = [
            build_dispatched(
                request,
                facts,
                device,
                ThreadControl(rank, meeting),
                Copies(rank, request.num_local_experts, meeting),
                10.0,
            )
            for rank in range(layer.num_ranks)
        ]

    def forward(self, layer: Layer) -> list[Tensor]:
        return self.meeting.run(
            lambda rank: self.executors[rank].forward(_inputs(layer, rank), _activation(layer))[0]
        )

    def backward(
        self,
        layer: Layer,
        dy: Sequence[Tensor],
        *,
        needs: Needs = Needs(),  # noqa: B008
        dw_dtype: torch.dtype = torch.bfloat16,
    ) -> list[Gradients]:
        return self.meeting.run(
            lambda rank: self.executors[rank].backward(
                dy[rank], _inputs(layer, rank), _activation(layer), needs, dw_dtype
            )
        )

    def check(self) -> None:
        for executor in self.executors:
            if executor.kernels is not None:
                executor.kernels.check()


def _inputs(layer: Layer, rank: int) -> LayerInputs:
    return LayerInputs(layer.x[rank], layer.ids[rank], layer.weights[rank], *layer.experts(rank))


def _activation(layer: Layer) -> Activation:
    return Activation(clamp=layer.clamp)
