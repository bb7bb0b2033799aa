"""What a buffer needs of the backend that it chose, besides the two directions that the operators call."""

from __future__ import annotations

from typing import Protocol

import torch

from mega_moe._backends.given_codes import GivenCodes
from mega_moe._backends.weight_copies import WeightCopies
from mega_moe._ops import registry


class LayerExecutor(registry.Executor, Protocol):
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of x and the weights."""
        ...

    @property
    def stages_by(self) -> str:
        """'kernel' or 'torch': what brings a call's x, ids and weights into the form that dispatch reads."""
        ...

    @property
    def weight_copies(self) -> WeightCopies | None:
        """Copies that the kernels make of the weights; None where they read the weights themselves."""
        ...

    @property
    def given_codes(self) -> GivenCodes | None:
        """The same layer on operands that the caller has quantized; None where no kernel reads them."""
        ...

    def refuse(self, error: Exception, num_tokens: int) -> None:
        """Let the other ranks raise PeerError for the call that this rank answers with ``error``."""
        ...
