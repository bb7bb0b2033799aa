"""Which kernels a buffer's memory is laid out for: one name a question, as kernels/include/mega_moe/mode.h has them."""

from __future__ import annotations

from typing import NamedTuple

# In the order of the enums there.
_PRECISIONS = ("none", "bf16", "fp8")
_SCALE_FORMATS = ("fp32", "power_of_two")


class Mode(NamedTuple):
    """Precisions of the GEMMs of a buffer's kernels. Equal on all ranks."""

    forward: str = "none"  # "none": routing tables alone
    backward: str = "none"  # dgrad and the recomputation of gate and up; "none": no backward kernel
    wgrad: str = "none"  # "fp8" only where backward is
    scale_format: str = "fp32"  # of fp8

    def words(self) -> tuple[int, int, int, int]:
        """As the library unpacks them (kernels/binding/rank.h)."""
        forward, backward, wgrad = map(_PRECISIONS.index, self[:3])
        return forward, backward, wgrad, _SCALE_FORMATS.index(self.scale_format)

    @property
    def power_of_two(self) -> bool:
        """Whether scale factors are rounded up to powers of two."""
        return self.scale_format == "power_of_two"

    @property
    def has_backward(self) -> bool:
        return self.backward != "none"

    @property
    def reads_fp8_weights(self) -> bool:
        return "fp8" in (self.forward, self.backward)
