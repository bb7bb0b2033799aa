"""Into a trainer: the switch in its configuration, its models, FSDP2 with expert parallelism, and what RL needs.

Importing this imports no trainer: the families of models are told by what their modules hold.
"""

from __future__ import annotations

from mega_moe.integrations.adapters import Arguments, ExpertAdapter, PackedExperts, Sizes
from mega_moe.integrations.config import DispatchConfig, load_config
from mega_moe.integrations.conversion import Converted, convert, find
from mega_moe.integrations.parallel import Meshes, clip_grad_norm_, keep_moe_outputs, make_meshes, shard
from mega_moe.integrations.routing import LoadMeter, RoutingReplay

__all__ = [
    "Arguments",
    "Converted",
    "DispatchConfig",
    "ExpertAdapter",
    "LoadMeter",
    "Meshes",
    "PackedExperts",
    "RoutingReplay",
    "Sizes",
    "clip_grad_norm_",
    "convert",
    "find",
    "keep_moe_outputs",
    "load_config",
    "make_meshes",
    "shard",
]
