"""The face of DeepGEMM's Mega MoE calls: a trainer written against them runs on this library unchanged.

`install` makes ``import deep_gemm`` resolve to these names; a trainer that cannot be edited is started with
``python -m mega_moe.deep_gemm script.py args``. Importing this changes nothing.
"""

from __future__ import annotations

from mega_moe.deep_gemm.calls import (
    bf16_mega_moe,
    bf16_mega_moe_backward,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from mega_moe.deep_gemm.fp8_calls import fp8_mega_moe, fp8_mega_moe_backward
from mega_moe.deep_gemm.installing import install, serves, uninstall
from mega_moe.deep_gemm.symm_buffer import SymmBuffer, get_num_sms, get_symm_buffer_for_mega_moe, set_num_sms

__all__ = [
    "SymmBuffer",
    "bf16_mega_moe",
    "bf16_mega_moe_backward",
    "fp8_mega_moe",
    "fp8_mega_moe_backward",
    "get_num_sms",
    "get_symm_buffer_for_mega_moe",
    "install",
    "serves",
    "set_num_sms",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "uninstall",
]
