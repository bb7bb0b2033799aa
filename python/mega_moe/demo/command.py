"""The command `mega-moe train`: words of the command line to a run and its summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_moe._backends.choice.decide import BACKENDS
from mega_moe._base.errors import FallbackWarning, MegaMoEError
from mega_moe._base.types import PRECISIONS
from mega_moe.demo.config import Config


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    defaults = Config()
    made = argparse.ArgumentParser(
        prog="mega-moe train",
        description="Train a small mixture-of-experts language model on the sources of Python's standard library. "
        "Under torchrun the experts are spread over the ranks and the rest is sharded with FSDP2.",
    )
    add = made.add_argument
    default = " (default: %(default)s)"
    add("--steps", type=int, default=defaults.steps, help="length of the whole run" + default)
    add(
        "--minutes",
        type=float,
        default=defaults.minutes,
        help="time box of training, at whose end the learning rate is zero; 0: none" + default,
    )
    add("--seed", type=int, default=defaults.seed, help="of weights and batches" + default)
    add("--precision", choices=PRECISIONS, default="bf16", help="of the experts' products" + default)
    add("--backend", choices=("auto", *BACKENDS), default="auto", help="of the experts" + default)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--ep-size", type=int, help="ranks that share the experts (default: all ranks of a host)")
    add("--out", type=Path, default=Path("demo-run"), help="folder of what the run writes" + default)
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other field of mega_moe.demo.config.Config, such as hidden=512; may be repeated",
    )
    add("--json", action="store_true", help="print the report, without the curves, as one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Run the command; 0 when every weight moved, 1 when one did not or the run failed, 2 for bad words or values."""
    words = parser().parse_args(argv)
    try:
        from mega_moe.demo.train import train
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is missing: pip install 'mega-moe[demo]'", 2)
    try:
        config = replace(Config(), **_fields(words))
        with warnings.catch_warnings():
            # The job itself says which backend it uses and why.
            warnings.simplefilter("ignore", FallbackWarning)
            report = train(
                config,
                words.out,
                backend=words.backend,
                precision=words.precision,
                device=words.device,
                ep_size=words.ep_size,
                resume=words.resume,
            )
    except ValueError as error:
        return _fail(str(error), 2)
    except (MegaMoEError, FloatingPointError) as error:
        return _fail(str(error), 1)
    if os.environ.get("RANK", "0") == "0":
        print(
            json.dumps({k: v for k, v in report.items() if k != "history"}) if words.json else summary(report)
        )
    moved = report["weights_moved"]
    if moved["ok"]:
        return 0
    least = min([*moved["routers"].values(), *moved["least_moved_experts"].values()])
    return _fail(
        f"not every weight was trained: the least moved has changed by {least:.2%} of its norm in {report['steps']} "
        f"steps, must by more than {moved['threshold']:.1%}; see report.json, or raise --steps",
        1,
    )


def summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    moved = report["weights_moved"]
    routers, experts = min(moved["routers"].values()), min(moved["least_moved_experts"].values())
    rows = {
        "training loss": f"{report['train_loss']:.3f} nats per byte (mean of the last steps)",
        "held-out loss": f"{report['held_out_loss']:.3f} nats per byte",
        "steps": f"{report['steps']} in {report['seconds']:.0f} s, {report['tokens_per_second']:.0f} tokens/s",
        "backend": report["reason"],
        "weights moved": f"{'yes' if moved['ok'] else 'NOT ALL'}: the least moved expert by {experts:.1%} of its norm, "
        f"the least moved router by {routers:.1%}",
        "written to": f"{report['out']}/report.json and loss.png",
    }
    return "\n".join(f"{name:15}{text}" for name, text in rows.items())


def _fields(words: argparse.Namespace) -> dict[str, Any]:
    """The fields of Config that the words set."""
    return {"steps": words.steps, "minutes": words.minutes, "seed": words.seed, **fields_of(words.set)}


def fields_of(words: list[str]) -> dict[str, Any]:
    """Fields of Config given as NAME=VALUE. Raises ValueError for a name or a value that it does not take."""
    values: dict[str, Any] = {}
    kinds: dict[str, type] = {name: type(value) for name, value in Config().as_dict().items()}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in kinds or not equals:
            raise ValueError(f"set: {word!r}, must be NAME=VALUE, NAME one of {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise ValueError(f"set: {name}: {text!r} is not of type {kinds[name].__name__}") from None
    return values


def _fail(message: str, status: int) -> int:
    print(f"mega-moe train: error: {message}", file=sys.stderr)
    return status
