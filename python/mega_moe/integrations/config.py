"""The trainer's switch: one table of a TOML file, checked key by key when it is read, before any model exists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mega_moe._backends.choice.decide import BACKENDS
from mega_moe._backends.fused.rows import check_share
from mega_moe._base.types import (
    MAX_TOKENS_PER_RANK,
    PRECISIONS,
    check_dw_precision,
    check_scale_format,
    positive_int,
)

TABLE = "trainer.model.moe.dispatch"
TYPE = "mega_moe"


@dataclass(frozen=True)
class DispatchConfig:
    """How a trainer's MoE layers are served.

    Attributes:
        precision: "bf16", "fp8", "fp8_bwd" or "mxfp8", as of `mega_moe.MoEBuffer`.
        max_tokens_per_rank: largest number of tokens of one call on any rank; None takes the sequence length.
        num_reserved_sms: SMs that the fused kernels leave to NCCL, which runs alongside them in a trainer.
        backend: "auto" or the name of a backend.
        strict: True forbids falling back from the fused backend; None leaves it to MEGA_MOE_STRICT.
        layers: which MoE layers are switched, counted from 0 among the MoE layers of the model: "all", a percentage
            such as "50%" (spread evenly over the depth), or a list of numbers.
        save_gate_up: as of `mega_moe.MoEBuffer`: memory for a shorter backward; 0 computes gate and up again.
        dw_precision: "bf16" or "fp8", as of `mega_moe.MoEBuffer`: of the products that the weights' gradients are.
        scale_format: "fp32" or, with the fp8 precisions, "power_of_two", as of `mega_moe.MoEBuffer`.

    Raises ValueError or TypeError that names the key, what it holds and what it may hold.
    """

    precision: str = "bf16"
    max_tokens_per_rank: int | None = None
    num_reserved_sms: int = 16
    backend: str = "auto"
    strict: bool | None = None
    layers: str | tuple[int, ...] = "all"
    save_gate_up: float = 0.0
    dw_precision: str = "bf16"
    scale_format: str = "fp32"

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        check_dw_precision(self.dw_precision, self.precision)
        _one_of("backend", self.backend, ("auto", *BACKENDS))
        if self.max_tokens_per_rank is not None:
            positive_int("max_tokens_per_rank", self.max_tokens_per_rank, MAX_TOKENS_PER_RANK)
        positive_int("num_reserved_sms", self.num_reserved_sms, zero=True)
        check_share(self.save_gate_up)
        check_scale_format(self.scale_format, self.precision)
        if self.strict is not None and not isinstance(self.strict, bool):
            raise TypeError(f"strict: got {self.strict!r}, want true or false")
        if isinstance(self.layers, str):
            _share(self.layers)
        else:
            if not self.layers:
                raise ValueError(
                    'layers: got an empty list, want "all", a percentage or numbers of MoE layers'
                )
            for number in self.layers:
                positive_int("layers", number, zero=True)
            object.__setattr__(self, "layers", tuple(dict.fromkeys(self.layers)))

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = TABLE) -> DispatchConfig:
        """From the keys of one TOML table; ``where`` is its name in the errors."""
        if not isinstance(table, Mapping):
            raise TypeError(f"{where}: got {table!r}, want a table")
        known = ("type", *(field.name for field in fields(cls)))
        for key in table:
            if key not in known:
                raise ValueError(f"{where}.{key}: no such key, want {', '.join(known)}")
        kind = table.get("type")
        if kind != TYPE:
            raise ValueError(f"{where}.type: got {kind!r}, want {TYPE!r}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        del values["type"]
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}.{error}") from None

    def select(self, num_layers: int) -> tuple[int, ...]:
        """The numbers of the layers to switch, of a model with ``num_layers`` MoE layers, ascending."""
        if not isinstance(self.layers, str):
            beyond = [number for number in self.layers if number >= num_layers]
            if beyond:
                raise ValueError(f"layers: got {beyond}, want 0 to {num_layers - 1}: the model's MoE layers")
            return tuple(sorted(self.layers))
        share = _share(self.layers)
        # At least one: a share above zero that switched nothing would look like a run with this library.
        wanted = max(1, round(num_layers * share / 100))
        # Layer i is taken where the running total passes a whole number, which spreads them evenly.
        return tuple(
            i for i in range(num_layers) if (i + 1) * wanted // num_layers > i * wanted // num_layers
        )


def load_config(path: Path | str, table: str = TABLE) -> DispatchConfig:
    """Read the dotted ``table`` of a TOML file; ValueError where the file has no such table."""
    if sys.version_info >= (3, 11):
        import tomllib as _toml
    else:
        import tomli as _toml
    value: Any = _toml.loads(Path(path).read_text(encoding="utf-8"))
    for depth, part in enumerate(parts := table.split("."), 1):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"{path}: no table [{'.'.join(parts[:depth])}], want [{table}]")
        value = value[part]
    return DispatchConfig.from_table(value, table)


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: got {value!r}, want one of {', '.join(allowed)}")


def _share(layers: str) -> float:
    """Percent of the layers that the word names."""
    if layers == "all":
        return 100.0
    try:
        share = float(layers.removesuffix("%")) if layers.endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise ValueError(
            f'layers: got {layers!r}, want "all", a percentage such as "50%", or a list of numbers'
        )
    return share
