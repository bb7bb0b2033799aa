"""Names and limits that several layers share."""

from __future__ import annotations

PRECISIONS = ("bf16", "fp8", "fp8_bwd", "mxfp8")
DW_PRECISIONS = ("bf16", "fp8")
SCALE_FORMATS = ("fp32", "power_of_two")
# Engines of the backend dispatched by name; all but the first are packages that must be installed.
DISPATCHERS = ("nccl", "deep_ep", "nccl_ep")

# Checked limits: a token index and a rank share 32 bits of a routing entry with the slot, and expert ids travel as
# uint16 with 0xFFFF for a masked slot.
MAX_TOKENS_PER_RANK = (1 << 20) - 1
MAX_TOP_K = 16
MAX_EXPERTS = 2048
MAX_RANKS = 32  # of a kernel that spans ranks

# Length of a 1 x 128 activation block and edge of a 128 x 128 weight block in the fp8 precisions.
SCALE_BLOCK = 128


def check_dw_precision(dw_precision: str, precision: str) -> None:
    """ValueError for a name that is not known, and for one that the layer's ``precision`` has not."""
    _check_fp8_option("dw_precision", dw_precision, DW_PRECISIONS, precision)


def check_scale_format(scale_format: str, precision: str) -> None:
    """ValueError for one that is not known, or that ``precision`` has no scale factors for."""
    _check_fp8_option("scale_format", scale_format, SCALE_FORMATS, precision)


def _check_fp8_option(name: str, value: str, choices: tuple[str, ...], precision: str) -> None:
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, want one of {', '.join(choices)}")
    if value != choices[0] and precision not in ("fp8", "fp8_bwd"):
        raise ValueError(
            f"{name}: got {value!r} with precision {precision!r}, want it with precision fp8 or fp8_bwd"
        )


def positive_int(name: str, value: object, upper: int | None = None, *, zero: bool = False) -> int:
    """``value`` as int when it is one in [1, upper] (or [0, upper] with ``zero``); else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), want an int")
    low = 0 if zero else 1
    if value < low or (upper is not None and value > upper):
        limit = f"in [{low}, {upper}]" if upper is not None else f"at least {low}"
        raise ValueError(f"{name}: got {value}, want {limit}")
    return value
