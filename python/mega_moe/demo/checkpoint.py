"""Save and resume, bit for bit, at the same or at another number of ranks.

A checkpoint is a folder `step-<n>` of torch.distributed.checkpoint (weights and Adam moments, each under its
parameter's name) with `run.json` next to the tensors. `run.json` is written last: a folder without it is not complete.
The data order needs no state, because a batch is a function of (seed, step).
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mega_moe.demo.parallel import Ranks, as_global

KEPT = 2  # newest checkpoints; the older one survives a full disk or a kill while the newer one is written


def create_moments(optimizer: torch.optim.Adam) -> None:
    """Give a fresh Adam the zero state that it would make at its first step, so that loading finds its tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def tensors(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Adam, ranks: Ranks
) -> dict[str, Tensor]:
    """All state by global name, sharing memory with parameters and optimizer: loading into it restores them."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moments = optimizer.state[parameter]
        state[f"model.{name}"] = as_global(name, parameter, ranks)
        state[f"adam.{name}.exp_avg"] = as_global(name, moments["exp_avg"], ranks)
        state[f"adam.{name}.exp_avg_sq"] = as_global(name, moments["exp_avg_sq"], ranks)
        state[f"adam.{name}.step"] = moments["step"]
    return state


def save(folder: Path, step: int, state: dict[str, Tensor], run: dict[str, Any], ranks: Ranks) -> Path:
    """Write `folder`/step-<step> from all ranks, then drop all but the newest ones. `run` must be JSON-able."""
    path = folder / f"step-{step:06d}"
    if ranks.rank == 0:
        shutil.rmtree(
            path, ignore_errors=True
        )  # what an interrupted run left, or the same step of an earlier one
        path.mkdir(parents=True)
    _barrier(ranks)
    with _quiet():
        dcp_save(state, checkpoint_id=path, no_dist=ranks.world is None)
    if ranks.rank == 0:
        unfinished = path / "run.json.tmp"
        unfinished.write_text(json.dumps(run))
        unfinished.replace(path / "run.json")
        for old in _complete(folder)[:-KEPT]:
            shutil.rmtree(old)
    _barrier(ranks)
    return path


def newest(folder: Path) -> Path:
    """The newest complete checkpoint in `folder`. Raises ValueError if there is none."""
    complete = _complete(folder)
    if not complete:
        raise ValueError(f"resume: no complete checkpoint (step-*/run.json) in {folder}")
    return complete[-1]


def load(path: Path, state: dict[str, Tensor], ranks: Ranks) -> None:
    """Read the tensors of a checkpoint into `state`, in place, whatever number of ranks wrote it."""
    with _quiet():
        dcp_load(state, checkpoint_id=path, no_dist=ranks.world is None)


def read_run(path: Path) -> dict[str, Any]:
    """What `save` was given as `run`."""
    run: dict[str, Any] = json.loads((path / "run.json").read_text())
    return run


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("step-*/run.json"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without two warnings that torch.distributed.checkpoint gives whatever the caller does."""
    with warnings.catch_warnings():
        # Without a process group, although no_dist says so already.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        # torch 2.10 asks tensors for their typed storage there.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
        yield


def _barrier(ranks: Ranks) -> None:
    ranks.sum(torch.zeros((), device=ranks.device))
