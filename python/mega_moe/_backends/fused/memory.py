"""Memory of the kernels that span ranks, as the library lays it out: the part that peers reach, and the workspace."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mega_moe._backends.group import Control
from mega_moe._base.errors import MegaMoEError
from mega_moe._base.mode import Mode
from mega_moe._ops import library

BLOCK_TOKENS = 128  # tokens of all ranks between which a chunk may end
PAD_ROWS = 128  # an expert's rows in a chunk start on a multiple of this
CANARY = 0xC5
_ALIGNMENT = 256  # bytes; of the parts of a buffer
_TENSOR_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Shape:
    """What both layouts depend on; equal on all ranks.

    ``intermediate`` is 0 where ``mode`` has no forward: tables only, no pools. ``pool_rows`` 0: one chunk holds any
    routing.
    """

    max_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int = field(default=0, kw_only=True)
    num_ranks: int
    pool_rows: int = 0
    mode: Mode = field(default=Mode(), kw_only=True)
    canaries: bool = False

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def chunk_limits(self) -> tuple[int, int]:
        """Rows of a chunk at most, and rows that are one chunk in any case.

        The rule is that of kernels/layout/workspace.h: one chunk may take both pools.
        """
        every = self.max_tokens * self.num_ranks * self.top_k
        if not self.pool_rows:
            return every, every
        padding = self.num_local_experts * (PAD_ROWS - 1)
        limit = self.pool_rows - padding
        two_pools = every > limit and self.max_tokens > BLOCK_TOKENS
        smallest = min(self.max_tokens, BLOCK_TOKENS) * self.num_ranks * self.top_k + padding
        joined = two_pools and self.pool_rows >= smallest + PAD_ROWS
        return limit, 2 * self.pool_rows - padding if joined else limit

    def words(self) -> list[int]:
        """As the library unpacks them (kernels/binding/rank.h)."""
        return [
            self.max_tokens,
            self.top_k,
            self.num_experts,
            self.hidden,
            self.intermediate,
            self.num_ranks,
            self.pool_rows,
            *self.mode.words(),
            int(self.canaries),
        ]


@dataclass(frozen=True)
class Layout:
    """Parts of one buffer by name: ``(offset, bytes)``; ``total`` bytes in all."""

    parts: dict[str, tuple[int, int]]
    total: int

    def view(self, memory: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """A part of ``memory`` (uint8) as a flat tensor."""
        start, size = self.parts[name]
        return memory[start : start + size].view(dtype)

    def gaps(self) -> list[tuple[int, int]]:
        """``(start, end)`` of the bytes between parts, which a layout with canaries has."""
        edges, at = [], 0
        for start, size in self.parts.values():
            edges.append((at, start))
            at = start + size
        return [gap for gap in [*edges, (at, self.total)] if gap[0] < gap[1]]


@functools.cache
def symmetric_layout(shape: Shape) -> Layout:
    ops = library.require()
    return _layout(ops.symmetric_parts(), ops.symmetric_layout(shape.words()))


@functools.cache
def workspace_layout(shape: Shape) -> Layout:
    ops = library.require()
    return _layout(ops.workspace_parts(), ops.workspace_layout(shape.words()))


def _layout(names: str, numbers: list[int]) -> Layout:
    pairs = zip(numbers[0:-1:2], numbers[1:-1:2], strict=True)
    return Layout(dict(zip(names.split(), pairs, strict=True)), numbers[-1])


@dataclass(frozen=True)
class SymmetricMemory:
    """This rank's part as a tensor, and the addresses by which it reaches the parts of all ranks."""

    memory: Tensor  # uint8, zero at first
    addresses: list[int]
    keep: Any = None  # what must live as long as the addresses


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes; OutOfMemoryError that says what was needed where the device has too little."""
    try:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"the buffer needs {nbytes} bytes on {device}: {error}") from error
    if memory.data_ptr() % _ALIGNMENT:
        raise MegaMoEError(f"the allocator of {device} gave memory that is not aligned to {_ALIGNMENT} bytes")
    return memory


def of_virtual_ranks(nbytes: int, device: torch.device, num_ranks: int) -> list[SymmetricMemory]:
    """The parts of ``num_ranks`` ranks that one process plays on one GPU: one, or several in a test or a benchmark."""
    parts = [allocate(nbytes, device) for _ in range(num_ranks)]
    addresses = [part.data_ptr() for part in parts]
    return [SymmetricMemory(part, addresses, parts) for part in parts]


def of_group(nbytes: int, device: torch.device, group: Any, control: Control) -> SymmetricMemory:
    """Collective over ``group``: torch's symmetric memory, which maps every rank's part into this process."""
    import torch.distributed._symmetric_memory as symm_mem

    error: Exception | None = None
    bases, offset = [0] * control.size, 0
    try:
        memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(memory, group)
        bases = [int(address) for address in handle.buffer_ptrs]
        # The tensor may start inside the memory that was mapped; peers see it at the same distance or not at all.
        offset = memory.data_ptr() - bases[control.rank]
        memory.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as failed:
        error = failed
    # No rank writes into another's part before that is zero, nor one that failed.
    gathered = control.gather((offset, bases, error and str(error)), "allocation of symmetric memory")
    if error is not None:
        raise error
    listed = "; ".join(
        f"rank {r}: offset {o}, addresses {b}, {e or 'mapped'}" for r, (o, b, e) in enumerate(gathered)
    )
    if any(o != offset or e or not all(b) for o, b, e in gathered) or offset % _ALIGNMENT:
        raise MegaMoEError(f"symmetric memory: want every rank reachable at one aligned offset, got {listed}")
    return SymmetricMemory(memory, [base + offset for base in bases], handle)


def dense(value: Tensor) -> Tensor:
    """``value`` itself where it is contiguous and starts as the kernels' bulk copies need it, else a copy."""
    value = value.contiguous()
    return value.clone() if value.data_ptr() % _TENSOR_ALIGNMENT else value


def writable(gradients: Sequence[Tensor]) -> bool:
    """Whether a kernel can write results of one dtype as these lie in memory."""
    return all(
        g.is_contiguous()
        and g.data_ptr() % _TENSOR_ALIGNMENT == 0
        and g.dtype in (torch.bfloat16, torch.float32)
        and g.dtype == gradients[0].dtype
        for g in gradients
    )


def as_written(*results: Tensor, read: Iterable[Tensor | None]) -> list[Tensor]:
    """Where a kernel writes ``results``, in the widest of their dtypes: themselves where it can, else new memory.

    It cannot write one that lies otherwise, is narrower, or shares memory with what it ``read``s while it writes.
    """
    dtype = functools.reduce(torch.promote_types, (result.dtype for result in results))
    taken = [(tensor.data_ptr(), tensor.nbytes) for tensor in read if tensor is not None]

    def can(result: Tensor) -> bool:
        at, size = result.data_ptr(), result.nbytes
        apart = all(at + size <= other or other + room <= at for other, room in taken)
        return apart and result.dtype == dtype and writable([result])

    return [
        result if can(result) else torch.empty(result.shape, dtype=dtype, device=result.device)
        for result in results
    ]


def write_canaries(memory: Tensor, layout: Layout) -> None:
    for start, end in layout.gaps():
        memory[start:end] = CANARY


def broken_canaries(memory: Tensor, layout: Layout) -> list[tuple[int, int]]:
    """Gaps of ``layout`` that something wrote into. Synchronizes with the device."""
    return [(a, b) for a, b in layout.gaps() if not bool((memory[a:b] == CANARY).all())]
