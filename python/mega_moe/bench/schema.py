"""What a benchmark run writes: dataclasses to JSON and back, checked on reading.

Standard library only, and no import of this package: a report is made from result files by machines without torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1

_REMOVED_KINDS = {"stage"}
"""Rows of older results that nothing measures any more; they are skipped."""

Status = Literal["measured", "refused", "failed"]
"""refused: the machine or the library cannot do it and says why; failed: it ran and was wrong or broke."""


class SchemaError(ValueError):
    """A result that does not say what it must: names the field, what it holds and what was wanted."""


def _require(condition: bool, field: str, got: object, wanted: str) -> None:
    if not condition:
        raise SchemaError(f"{field}: got {got!r}, wanted {wanted}")


def _require_reason(field: str, value: object, reason: str | None) -> None:
    wanted = "a reason" if value is None else "null alongside a value"
    _require((value is None) == bool(reason), f"{field}_reason", reason, wanted)


@dataclass(frozen=True)
class Timing:
    """One measurement. Seconds are those of one call, the maximum over ranks, the median over windows."""

    protocol: str
    timer: str
    seconds: float
    windows_s: tuple[float, ...]
    calls_per_window: int
    input_sets: int
    idle_s: float
    mhz: float | None
    mhz_reason: str | None

    def __post_init__(self) -> None:
        _require(
            self.seconds > 0 and math.isfinite(self.seconds), "seconds", self.seconds, "a positive number"
        )
        _require(len(self.windows_s) > 0, "windows_s", self.windows_s, "at least one window")
        _require(self.calls_per_window >= 1, "calls_per_window", self.calls_per_window, "at least 1")
        _require(self.input_sets >= 1, "input_sets", self.input_sets, "at least 1")
        _require(self.mhz is None or self.mhz > 0, "mhz", self.mhz, "a positive number or null")
        _require_reason("mhz", self.mhz, self.mhz_reason)


@dataclass(frozen=True)
class Outcome:
    """What every row has: a timing when it was measured, else the reasons why not."""

    status: Status
    reasons: tuple[str, ...]
    timing: Timing | None

    def __post_init__(self) -> None:
        if self.status == "measured":
            _require(self.timing is not None, "timing", self.timing, "a timing on a measured row")
            _require(not self.reasons, "reasons", self.reasons, "none on a measured row")
        else:
            _require(self.timing is None, "timing", self.timing, f"null on a {self.status} row")
            _require(any(self.reasons), "reasons", self.reasons, f"at least one on a {self.status} row")


@dataclass(frozen=True)
class CeilingRow:
    """A rate that the machine reaches on a plain operation of `work` FLOPs or bytes a call."""

    kind: Literal["ceiling"]
    name: str
    what: str
    unit: Literal["TF/s", "GB/s"]
    work: float
    rate: float | None
    outcome: Outcome

    def __post_init__(self) -> None:
        _require_rate("rate", self.rate, self.outcome)


@dataclass(frozen=True)
class LayerRow:
    """mega_moe.moe with one backend, in one direction. A refused row stands for every direction."""

    kind: Literal["layer"]
    shape: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    tokens: int
    """Per rank."""
    num_ranks: int
    backend: str
    precision: str
    dtype: str
    """Of x and the weights."""
    direction: str
    """forward, backward, forward_backward; "all" on a refused row."""
    dw_dtype: str | None
    """Of the weight gradients; null where the direction makes none."""
    reserved_sms: int | None
    """SMs left to other work; null: not applicable, this backend's kernels are not ours to size."""
    flops: float | None
    """Per rank and call, balanced routing."""
    flop_rule: str | None
    tflops: float | None
    percent_of_ceiling: float | None
    """Time of the GEMMs at the measured ceilings, over the time of the call; null without a ceiling."""
    peak_bytes: int | None
    """Most device memory that torch's allocator held during one call, beyond inputs and weights."""
    relative_error: float | None
    """Relative L2 of the checked tokens against the reference backend; null where that refused."""
    outcome: Outcome
    weight_copies: str | None = None
    """"reused": calls found e4m3 copies of the weights from before the time began, as all but a step's first do; null:
    each call made what it read."""
    dw_precision: str | None = None
    """"fp8": the buffer was asked for wgrad GEMMs in e4m3; null: it was not."""

    @property
    def numerics(self) -> str:
        """The precision in words: bf16 means the tensors' own dtype, which may be another."""
        own = self.dtype if self.precision == "bf16" and self.dtype != "bfloat16" else self.precision
        return own if self.dw_precision is None else f"{own} with dW {self.dw_precision}"

    def __post_init__(self) -> None:
        _require_rate("tflops", self.tflops, self.outcome)
        if self.outcome.status == "measured":
            _require_positive("flops", self.flops)
            _require(bool(self.flop_rule), "flop_rule", self.flop_rule, "the rule in words on a measured row")
            wanted = "null for a forward" if self.direction == "forward" else "a dtype for a backward"
            _require(
                (self.dw_dtype is None) == (self.direction == "forward"), "dw_dtype", self.dw_dtype, wanted
            )
        _require(
            self.weight_copies in (None, "reused"), "weight_copies", self.weight_copies, "null or reused"
        )
        _require(self.dw_precision in (None, "fp8"), "dw_precision", self.dw_precision, "null or fp8")


@dataclass(frozen=True)
class PeerRow:
    """Another implementation of the layer, timed by its own script on the same machine, between our own parts."""

    kind: Literal["peer"]
    peer: str
    shape: str
    tokens: int
    """Per rank."""
    num_ranks: int
    precision: str
    direction: str
    """forward or backward; "all" where the script gave no figure."""
    flop_rule: str | None
    tflops: float | None
    outcome: Outcome

    def __post_init__(self) -> None:
        _require_rate("tflops", self.tflops, self.outcome)


@dataclass(frozen=True)
class HostRow:
    """Host time of one call of the layer with few tokens, as a `ratio` to that of a line of plain torch."""

    kind: Literal["host"]
    shape: str
    backend: str
    direction: str
    ratio: float | None
    outcome: Outcome


def _require_positive(field: str, value: float | None) -> None:
    _require(value is not None and value > 0, field, value, "a positive number on a measured row")


def _require_rate(field: str, rate: float | None, outcome: Outcome) -> None:
    if outcome.status == "measured":
        _require_positive(field, rate)
    else:
        _require(rate is None, field, rate, f"null on a {outcome.status} row")


Row = CeilingRow | LayerRow | PeerRow | HostRow


@dataclass(frozen=True)
class Environment:
    """Where a run took place. A hash that is not known is null, and its reason says why."""

    date: str
    """UTC, YYYY-MM-DDTHH:MM:SSZ."""
    device: str
    num_sms: int | None
    num_ranks: int
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    platform: str
    mega_moe: str
    wheel_sha256: str | None
    wheel_reason: str | None
    kernels_sha256: str | None
    kernels_reason: str | None
    code: Mapping[str, str] | None = None
    """sha256 of the machine code of each compiled kernel that the device can run, by variant; null: not known."""
    compiler: str | None = None
    """Version of the nvcc that made it, such as 13.0.88; null: not known."""

    def __post_init__(self) -> None:
        date = re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", self.date)
        _require(date is not None, "date", self.date, "YYYY-MM-DDTHH:MM:SSZ")
        _require(self.num_ranks >= 1, "num_ranks", self.num_ranks, "at least 1")
        for name in ("wheel", "kernels"):
            digest, reason = getattr(self, f"{name}_sha256"), getattr(self, f"{name}_reason")
            known = digest is None or re.fullmatch(r"[0-9a-f]{64}", digest) is not None
            _require(known, f"{name}_sha256", digest, "64 hex digits or null")
            _require_reason(name, digest, reason)
        for name, digest in (self.code or {}).items():
            known = re.fullmatch(r"[0-9a-f]{64}", digest) is not None
            _require(known, f"code.{name}", digest, "64 hex digits")


@dataclass(frozen=True)
class Result:
    """One run: environment, the words of the command, rows in the order they were measured."""

    schema_version: int
    environment: Environment
    arguments: tuple[str, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        version = self.schema_version
        _require(version == SCHEMA_VERSION, "schema_version", version, str(SCHEMA_VERSION))


@dataclass(frozen=True)
class StepRow:
    """Training steps of one model with one backend. Seconds: means over the steps that count, maxima over ranks."""

    kind: Literal["step"]
    model: str
    layers: int
    """Trained; the whole model has `model_layers`."""
    model_layers: int
    sequence: int
    """Tokens of one step on one rank."""
    num_ranks: int
    ep_size: int
    backend: str
    precision: str
    reserved_sms: int
    status: Status
    reason: str | None = None
    """What serves the layers, in the buffer's words; null unless measured."""
    seconds: float | None = None
    steps_s: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    """Per GPU."""
    mfu: float | None = None
    """FLOPs of the model, nothing recomputed, over the GPU's stated bf16 peak; null where that is not known."""
    peak_bytes: int | None = None
    """Most device memory that torch's allocator held, the largest of the ranks; null on a CPU."""
    moe_seconds: float | None = None
    """Of a step inside MoE layers, forward and backward."""
    moe_forwards: int | None = None
    """Forward calls that reached the backend in one step: as many as layers when nothing is computed twice."""
    load_max_over_mean: float | None = None
    """Load of the busiest expert over the mean one's, mean over layers, of rank 0's tokens."""
    losses: tuple[float, ...] = ()
    """Of every step, rank 0's."""
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.status == "measured":
            for name in ("seconds", "tokens_per_s", "moe_seconds", "moe_forwards", "load_max_over_mean"):
                _require_positive(name, getattr(self, name))
            _require(len(self.steps_s) > 0, "steps_s", self.steps_s, "at least one step")
            _require(not self.reasons, "reasons", self.reasons, "none on a measured row")
        else:
            _require(self.seconds is None, "seconds", self.seconds, f"null on a {self.status} row")
            _require(any(self.reasons), "reasons", self.reasons, f"at least one on a {self.status} row")


@dataclass(frozen=True)
class StepResult(Result):
    """One run of `mega-moe bench step`."""

    rows: tuple[StepRow, ...]  # type: ignore[assignment]


def dumps(result: Result) -> str:
    """The result as JSON text with a final newline."""
    return json.dumps(plain(result), indent=1, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries. A field whose null is the default is left out: older files lack it."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(value[name]) for name in sorted(value)}
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: plain(got) for field, got in fields if got is not None or field.default is not None}


def read(path: Path, kind: type[Result | StepResult] = Result) -> Any:
    """Reads a result file as `kind`. Raises SchemaError that names the file and the field."""
    try:
        return loads(path.read_text(encoding="utf-8"), kind)
    except SchemaError as error:
        raise SchemaError(f"{path.name}: {error}") from error


def loads(text: str, kind: type[Result | StepResult] = Result) -> Any:
    """Reads what `dumps` wrote of a `kind`. Raises SchemaError that names the field for anything else."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"result: got text that is not JSON ({error}), wanted a benchmark result"
        ) from error
    if isinstance(data, dict) and isinstance(data.get("rows"), list):
        data["rows"] = [row for row in data["rows"] if not _is_removed(row)]
    return _decode(kind, data, "result")


def _is_removed(row: Any) -> bool:
    return isinstance(row, dict) and row.get("kind") in _REMOVED_KINDS


def _decode(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as what an annotation says."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if origin is tuple:
        _require(isinstance(value, list), where, value, "a list")
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        _require(isinstance(value, dict), where, value, "an object")
        return {name: _decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is Literal:
        _require(value in arguments, where, value, " or ".join(map(repr, arguments)))
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    _require(type(value) is kind, where, value, "a finite number" if kind is float else kind.__name__)
    return value


def _decode_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    """Of dataclasses by their `kind`, else of one type and None."""
    if type(None) in members:
        return None if value is None else _decode(members[0], value, where)
    kinds = {typing.get_args(typing.get_type_hints(member)["kind"])[0]: member for member in members}
    kind = value.get("kind") if isinstance(value, dict) else None
    _require(kind in kinds, f"{where}.kind", kind, " or ".join(map(repr, kinds)))
    return _decode(kinds[kind], value, where)


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, value, f"an object for {kind.__name__}")
    hints = typing.get_type_hints(kind)
    optional = {field.name for field in dataclasses.fields(kind) if field.default is None}
    missing, unknown = sorted(set(hints) - set(value) - optional), sorted(set(value) - set(hints))
    _require(not missing, where, value.keys(), f"also {', '.join(missing)}")
    _require(not unknown, where, unknown, f"only the fields of {kind.__name__}")
    decoded = {name: _decode(hints[name], value[name], f"{where}.{name}") for name in value}
    try:
        return kind(**decoded)
    except SchemaError as error:
        raise SchemaError(f"{where}.{error}") from error
