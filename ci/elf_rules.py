"""What the compiled library may need, export and hold: rules over one ELF file, used by check_wheel.py.

How old a glibc and libstdc++ may be is auditwheel's question; which functions of torch are stable, torch-abi-audit's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

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
# Folders of the machine that built it.
HOST_PATH = re.compile(rb"/(?:home|root|work|tmp|build|project|Users|opt|usr/local|usr/lib|__w)/[\w.+/-]+")


def needed_faults(needed: list[str]) -> Iterator[str]:
    yield from (
        f"needs {name}, which is not on the list of allowed libraries"
        for name in needed
        if not NEEDED.fullmatch(name)
    )
    if MUST_NEED not in needed:
        yield f"does not need {MUST_NEED}, so its symbols would not be found"


def symbol_faults(name: str, undefined: bool, weak: bool, versioned: bool) -> Iterator[str]:
    if not undefined:
        yield f"exports {name}, must export nothing"
    # Versioned ones belong to the toolchain.
    elif not versioned and not TOOLCHAIN_SYMBOL.fullmatch(name):
        if not STABLE_SYMBOL.fullmatch(name):
            yield f"wants symbol {name}, which is not of torch's stable ABI"
        elif CUDA_SYMBOL.fullmatch(name) and not weak:
            yield f"wants symbol {name} strongly: it would not load in a torch without CUDA"


def path_faults(content: bytes) -> list[str]:
    found = sorted({match.group().decode() for match in HOST_PATH.finditer(content)})
    return [f"holds the path {path} of the machine that built it" for path in found]


def library_faults(path: Path) -> list[str]:
    """One line per fault of the file at path."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, table = (elf.get_section_by_name(name) for name in (".dynamic", ".dynsym"))
        if dynamic is None or table is None:
            return ["is not a shared library: no dynamic section or symbols"]
        faults = list(needed_faults([tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]))
        for kind in ("DT_RPATH", "DT_RUNPATH"):
            faults += [f"has a {kind}, must have none" for _ in dynamic.iter_tags(kind)]
        versions = elf.get_section_by_name(".gnu.version")
        for number, symbol in enumerate(table.iter_symbols()):
            bind = symbol["st_info"]["bind"]
            if symbol.name and bind != "STB_LOCAL":
                version = versions.get_symbol(number)["ndx"] if versions else ""
                undefined = symbol["st_shndx"] == "SHN_UNDEF"
                faults += symbol_faults(
                    symbol.name, undefined, bind == "STB_WEAK", not isinstance(version, str)
                )
    return faults + path_faults(path.read_bytes())
