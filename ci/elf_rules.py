"""What the compiled library may need, export and hold: rules over one ELF file, used by check_wheel.py."""

from __future__ import annotations

import re
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# libtorch.so leads to all of torch; the CUDA runtime is inside, and the driver is looked up at run time.
NEEDED = re.compile(
    r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|libm\.so\.6|libc\.so\.6|ld-linux-[a-z0-9-]+\.so\.\d"
)
MUST_NEED = "libtorch.so"
# The C functions of the stable ABI; everything of torch in C++ is mangled and so does not match.
STABLE_SYMBOL = re.compile(r"(?:aoti_torch|torch)_[a-z0-9_]+")
# Null in a torch without CUDA, so they must be weak or the library would not load there.
CUDA_SYMBOL = re.compile(r"(?:aoti_)?torch_\w*(?:cuda|cublas)\w*(?<!device_type_cuda)")
TOOLCHAIN_SYMBOL = re.compile(r"_ITM_\w+|__gmon_start__|__cxa_finalize")
# The highest versions of manylinux_2_34.
VERSION_LIMITS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (12, 0)}
# Folders of the machine that built it.
HOST_PATH = re.compile(rb"/(?:home|root|work|tmp|build|project|Users|opt|usr/local|usr/lib|__w)/[\w.+/-]+")


def needed_faults(needed: list[str]) -> list[str]:
    faults = [
        f"needs {name}, which is not on the list of allowed libraries"
        for name in needed
        if not NEEDED.fullmatch(name)
    ]
    if MUST_NEED not in needed:
        faults.append(f"does not need {MUST_NEED}, so its symbols would not be found")
    return faults


def undefined_faults(symbols: list[tuple[str, bool, bool]]) -> list[str]:
    """Of (name, weak, versioned): versioned ones belong to the toolchain, whose versions are limited elsewhere."""
    faults = []
    for name, weak, versioned in symbols:
        if versioned or TOOLCHAIN_SYMBOL.fullmatch(name):
            continue
        if not STABLE_SYMBOL.fullmatch(name):
            faults.append(f"wants symbol {name}, which is not of torch's stable ABI")
        elif CUDA_SYMBOL.fullmatch(name) and not weak:
            faults.append(f"wants symbol {name} strongly: it would not load in a torch without CUDA")
    return faults


def version_faults(versions: list[str]) -> list[str]:
    faults = []
    for version in versions:
        family, _, number = version.partition("_")
        limit = VERSION_LIMITS.get(family)
        if limit is None or not re.fullmatch(r"[\d.]+", number):
            faults.append(f"wants version {version}, which is of none of {sorted(VERSION_LIMITS)}")
        elif tuple(map(int, number.split("."))) > limit:
            faults.append(f"wants version {version}, the limit is {'.'.join(map(str, limit))}")
    return faults


def path_faults(content: bytes) -> list[str]:
    found = sorted({match.group().decode() for match in HOST_PATH.finditer(content)})
    return [f"holds the path {path} of the machine that built it" for path in found]


def library_faults(path: Path) -> list[str]:
    """All of the above, and exported symbols (there must be none), for the file at path."""
    faults: list[str] = []
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = next((s for s in elf.iter_sections() if isinstance(s, DynamicSection)), None)
        table = elf.get_section_by_name(".dynsym")
        if dynamic is None or table is None:
            return ["is not a shared library: no dynamic section or symbols"]
        faults += needed_faults([tag.needed for tag in dynamic.iter_tags("DT_NEEDED")])
        for kind in ("DT_RPATH", "DT_RUNPATH"):
            faults += [f"has a {kind}, must have none" for _ in dynamic.iter_tags(kind)]
        index = elf.get_section_by_name(".gnu.version")
        undefined: list[tuple[str, bool, bool]] = []
        for number, symbol in enumerate(table.iter_symbols()):
            weak = symbol["st_info"]["bind"] == "STB_WEAK"
            if not symbol.name or symbol["st_info"]["bind"] == "STB_LOCAL":
                continue
            if symbol["st_shndx"] == "SHN_UNDEF":
                version = index.get_symbol(number)["ndx"] if index else "VER_NDX_GLOBAL"
                undefined.append((symbol.name, weak, not isinstance(version, str)))
            else:
                faults.append(f"exports {symbol.name}, must export nothing")
        faults += undefined_faults(undefined)
        needs = next((s for s in elf.iter_sections() if isinstance(s, GNUVerNeedSection)), None)
        if needs is not None:
            faults += version_faults(
                [aux.name for _, auxiliaries in needs.iter_versions() for aux in auxiliaries]
            )
    return faults + path_faults(path.read_bytes())
