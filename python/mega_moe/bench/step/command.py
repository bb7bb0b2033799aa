"""The command `mega-moe bench step`: words of the command line to runs, their table and JSON."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_moe._backends.choice.decide import BACKENDS
from mega_moe._base.types import PRECISIONS
from mega_moe.bench import schema
from mega_moe.bench.schema import StepResult, StepRow
from mega_moe.bench.step.shapes import MODELS, Model, find_model
from mega_moe.bench.table import columns
from mega_moe.bench.words import add_run_options, check_run_options, listed, without_folders

# What a run needs is imported by it: help and refused words come without torch.
if TYPE_CHECKING:
    from mega_moe.bench.ranks import Context

# Too slow to train a model with; it can be named.
_NOT_BY_DEFAULT = "reference"
_COLUMNS = (
    "model",
    "backend",
    "step s",
    "tokens/s/GPU",
    "MFU",
    "MoE s",
    "MoE forwards",
    "peak",
    "load max/mean",
)


def parser() -> argparse.ArgumentParser:
    """The options of the command; lists are separated by commas."""
    made = argparse.ArgumentParser(
        prog="mega-moe bench step",
        description="Time full training steps with every backend and precision that is named: forward, backward, "
        "clipping and AdamW, full activation checkpointing, FSDP2 and expert parallelism over the ranks that torchrun "
        "started; one process works. Without a GPU the tiny model runs in seconds.",
    )
    add = made.add_argument
    default = " (default: %(default)s)"
    add("--model", help=f"of {', '.join(MODELS)} (default: 30B on a GPU, else tiny)")
    add("--layers", type=int, help="layers of the model to train (default: as many as fit)")
    add("--sequence", type=int, help="tokens of a sequence, one for each rank (default: the model's own)")
    add("--backend", help=f"of {', '.join(BACKENDS)} (default: all but {_NOT_BY_DEFAULT})")
    add("--precision", default="bf16", help=f"of the experts, of {', '.join(PRECISIONS)}" + default)
    add("--steps", type=int, default=20, help="of each backend" + default)
    add("--skip", type=int, default=5, help="first steps that do not count" + default)
    add("--ep-size", type=int, help="ranks that share the experts (default: all of one machine)")
    add("--reserved-sms", type=int, default=16, help="SMs that fused kernels leave to NCCL" + default)
    add_run_options(made)
    return made


def main(argv: list[str]) -> int:
    """Runs the command; 1 when a backend failed or all were refused, 2 for bad words, else 0."""
    words = parser().parse_args(argv)
    try:
        _check(words)
        from mega_moe.bench.ranks import joined

        with joined(words.device) as context, _group_of_one(context):
            model = _model(words, context)
            result = _run(words, model, context, argv)
            if context.rank == 0:
                print(render(result), end="")
                if words.json is not None:
                    words.json.write_text(schema.dumps(result), encoding="utf-8")
    except ValueError as error:
        print(f"mega-moe bench step: {error}", file=sys.stderr)
        return 2
    statuses = {row.status for row in result.rows}
    return 1 if "failed" in statuses or "measured" not in statuses else 0


def _run(words: argparse.Namespace, model: Model, context: Context, argv: list[str]) -> StepResult:
    from mega_moe.bench.environment import describe
    from mega_moe.bench.step.measure import StepOptions, measure_backend
    from mega_moe.integrations import make_meshes

    ep_size = words.ep_size or int(os.environ.get("LOCAL_WORLD_SIZE", context.num_ranks))
    meshes = make_meshes(context.device.type, ep_size)
    layers = words.layers or _layers(model, context, ep_size)
    rows = []
    for precision, backend in itertools.product(_precisions(words), _backends(words)):
        options = StepOptions(model, layers, precision, words.steps, words.skip, ep_size, words.reserved_sms)
        rows.append(measure_backend(options, backend, context, meshes))
        if context.rank == 0:
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return StepResult(
        schema.SCHEMA_VERSION, describe(context, words.wheel), without_folders(argv), tuple(rows)
    )


def _check(words: argparse.Namespace) -> None:
    for name in ("layers", "sequence", "ep_size"):
        value = getattr(words, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')}: got {value}, wanted at least 1")
    if not 0 <= words.skip < words.steps:
        raise ValueError(f"skip: got {words.skip}, wanted 0 to {words.steps - 1}: fewer than the steps")
    check_run_options(words)
    _backends(words)
    _precisions(words)


def _backends(words: argparse.Namespace) -> list[str]:
    if words.backend is None:
        return [name for name in BACKENDS if name != _NOT_BY_DEFAULT]
    return listed("backend", words.backend, BACKENDS)


def _precisions(words: argparse.Namespace) -> list[str]:
    return listed("precision", words.precision, PRECISIONS)


def _model(words: argparse.Namespace, context: Context) -> Model:
    model = find_model(words.model or ("30B" if context.device.type == "cuda" else "tiny"))
    if words.layers is not None and words.layers > model.num_layers:
        raise ValueError(f"layers: got {words.layers}, wanted at most {model.num_layers}: the model's own")
    return replace(model, sequence=words.sequence or model.sequence)


def _layers(model: Model, context: Context, ep_size: int) -> int:
    if context.device.type != "cuda":
        return model.num_layers
    import torch

    free, _ = torch.cuda.mem_get_info(context.device)
    # The rank with the least memory decides for all.
    return model.layers_that_fit(int(context.minimum(free)), context.num_ranks, ep_size)


@contextmanager
def _group_of_one(context: Context) -> Iterator[None]:
    """FSDP2 wants a process group: a single process without torchrun is one of size 1."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    on_gpu = context.device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=context.device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def render(result: StepResult) -> str:
    """Environment, table of what was measured, then what was refused or failed and why."""
    where = result.environment
    lines = [
        f"{where.device}, {where.num_ranks} rank(s), torch {where.torch}, mega-moe {where.mega_moe}, {where.date}",
        "",
    ]
    measured = [row for row in result.rows if row.status == "measured"]
    if measured:
        first = measured[0]
        lines[0] += (
            f"; {first.layers} of {first.model_layers} layers, sequence {first.sequence}, EP {first.ep_size}"
        )
        lines += [*columns([_COLUMNS, *map(_cells, measured)], left=2), ""]
    lines += [f"{row.backend}: {row.reason}" for row in measured if row.reason not in (None, row.backend)]
    lines += [_line(row) for row in result.rows if row.status != "measured"]
    return "\n".join(lines) + "\n"


def _cells(row: StepRow) -> tuple[str, ...]:
    return (
        f"{row.model} {row.precision}",
        row.backend,
        f"{row.seconds:.3f}",
        f"{row.tokens_per_s:.0f}",
        "-" if row.mfu is None else f"{row.mfu:.1%}",
        f"{row.moe_seconds:.3f}",
        str(row.moe_forwards),
        "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f} GiB",
        f"{row.load_max_over_mean:.2f}",
    )


def _line(row: StepRow) -> str:
    if row.status == "measured":
        return "  ".join(_cells(row))
    return f"{row.status}: {row.model} {row.precision}: backend {row.backend}: {'; '.join(row.reasons)}"
