"""The command `mega-moe explain`: the verdict on every backend for one layer on this machine."""

from __future__ import annotations

import argparse
import json
import sys

from mega_moe._backends.choice.decide import BACKENDS
from mega_moe._backends.choice.request import DTYPES
from mega_moe._base import env
from mega_moe._base.types import DISPATCHERS, DW_PRECISIONS, PRECISIONS, SCALE_FORMATS


def main(argv: list[str]) -> int:
    """Print the verdicts; 0 when a backend, or the named one, can serve the layer, 1 when not, 2 for bad values."""
    parser = argparse.ArgumentParser(
        prog="mega-moe explain",
        description="Which backend would serve a layer on this machine, and why not the others. "
        "The defaults are a layer of a 30B model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-experts", type=int, default=128, help="of all ranks together")
    add("--top-k", type=int, default=8, help="experts of one token")
    add("--hidden", type=int, default=2048, help="elements of a token")
    add("--intermediate", type=int, default=768, help="elements of an expert's hidden layer")
    add("--max-tokens-per-rank", type=int, default=16384, help="largest batch of one rank")
    add("--num-ranks", type=int, default=1, help="ranks over which the experts are spread")
    add("--num-reserved-sms", type=int, default=0, help="SMs that the fused kernels leave to others")
    add("--precision", choices=PRECISIONS, default="bf16", help="of the products")
    add("--dw-precision", choices=DW_PRECISIONS, default="bf16", help="of the weights' gradients' products")
    add("--scale-format", choices=SCALE_FORMATS, default="fp32", help="of the fp8 precisions")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the tokens and weights")
    add("--backend", choices=("auto", *BACKENDS), default="auto", help="judge as if this one were named")
    add("--dispatcher", choices=DISPATCHERS, default="nccl", help="what moves tokens where dispatched serves")
    add("--device", help="such as cpu or cuda:1")
    add("--json", action="store_true", help="print one JSON object")
    words = vars(parser.parse_args(argv))
    as_json = words.pop("json")

    import torch

    import mega_moe

    try:
        explanation = mega_moe.explain(**{**words, "dtype": getattr(torch, words["dtype"])})
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"mega-moe explain: error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(explanation.as_dict(), indent=1))
    else:
        print(explanation, *(f"environment: {name}={value}" for name, value in env.given().items()), sep="\n")
    return 0 if explanation.chosen else 1
