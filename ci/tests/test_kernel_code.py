"""The hash of a variant's machine code changes with its instructions, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import kernel_code
import pytest

LISTING = """
\tcode for sm_90a
\t\tFunction : _Z1kPi
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/              @!P0 BRA 0x1d0 ;                            /* 0x00000000005c8947 */
        /*10020*/                  ULDC.64 UR4, c[0x0][UR6+0x260] ;       /* 0x0000980000047ab9 */
        /*10030*/                  LDC R2, c[0x3][R0] ;                   /* 0x0000980000047ab8 */
        /*10040*/                  CALL.REL.NOINC `(_Z1fv) ;              /* 0x0000980000047ab7 */
\t\tFunction : _Z1lPi
        /*0000*/                   EXIT ;                                 /* 0x000000000000794d */
"""
KERNELS = {"k": ["_Z1kPi"], "l": ["_Z1lPi"]}


# Text of the listing, what stands in its place, and the variant whose code that changes, if any.
CHANGES = [
    ("_Z1kPi", "_Z5otherPiS_", ""),
    ("_Z1fv", "_Z1gv", ""),
    ("c[0x0][0x28]", "c[0x0][0x1f0]", ""),
    ("UR6+0x260", "UR6+0x8", ""),
    ("UR6+0x260", "UR6", ""),
    ("0x00000a00ff017b82", "0x00000a00ff017b83", ""),
    ("/*10020*/", "/*0020*/ ", ""),
    ("LDC R1, c", "LDC R1,  c", ""),
    ("LDC R1", "LDC R3", "k"),
    ("LDC R1, c[0x0][0x28]", "LDC R1, c[0x1][0x28]", "k"),
    ("UR6+", "UR7+", "k"),
    ("@!P0", "@P0", "k"),
    ("0x1d0", "0x1e0", "k"),
    ("c[0x3][R0]", "c[0x3][R0+0x10]", "k"),
    ("EXIT", "NOP", "l"),
    ("EXIT ;", "EXIT ; /* 0x0 */\n /*0010*/ BRA 0x10 ;", "l"),
]


@pytest.mark.parametrize(("old", "new", "variant"), CHANGES)
def test_the_hash_changes_with_the_code_alone(old: str, new: str, variant: str) -> None:
    assert old in LISTING
    renamed = {name: [kernel.replace(old, new) for kernel in kernels] for name, kernels in KERNELS.items()}
    before = kernel_code.hashes(LISTING, KERNELS)
    after = kernel_code.hashes(LISTING.replace(old, new), renamed)
    assert {name for name in before if before[name] != after[name]} == set(variant)
    assert all(len(digest) == 64 for digest in before.values())


def test_every_kernel_of_a_variant_counts() -> None:
    one, other = ({"k": names} for names in (["_Z1kPi", "_Z1lPi"], ["_Z1lPi", "_Z1kPi"]))
    assert kernel_code.hashes(LISTING, one) != kernel_code.hashes(LISTING, other)


@pytest.mark.parametrize(
    ("listing", "kernels"),
    [
        (LISTING, {"k": ["_Z1kPi"]}),
        (LISTING, {**KERNELS, "m": ["_Z1mPi"]}),
        (LISTING, {**KERNELS, "m": []}),
        (LISTING, {**KERNELS, "m": ["_Z1kPi"]}),
        (LISTING.partition("        /*0000*/                   EXIT")[0], KERNELS),
        ("", KERNELS),
    ],
)
def test_refuses_names_and_code_that_do_not_cover_each_other(
    listing: str, kernels: dict[str, list[str]]
) -> None:
    with pytest.raises(ValueError, match="machine code: got instructions"):
        kernel_code.hashes(listing, kernels)


def test_a_library_is_disassembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tools that stand in for NVIDIA's: the one is started with the other on PATH, and its failure is told."""
    (tmp_path / "listing").write_text(LISTING)
    for name, lines in (("nvdisasm", ""), ("cuobjdump", 'command -v nvdisasm >&2; cat "$2"\n')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(kernel_code, "TOOLS", tmp_path)
    assert kernel_code.of_library(tmp_path / "listing", KERNELS) == kernel_code.hashes(LISTING, KERNELS)
    with pytest.raises(ValueError, match=rf"cuobjdump -sass none: {tmp_path}/nvdisasm"):
        kernel_code.of_library(tmp_path / "none", KERNELS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(kernel_code, "TOOLS", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="nvdisasm: not found in"):
        kernel_code.of_library(tmp_path / "listing", KERNELS)
