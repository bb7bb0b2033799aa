"""check_wheel on the built wheel and on copies of it, each with one thing made wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import check_wheel
import elf_rules
import finish_wheel
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        pytest.skip(f"dist/ holds {len(wheels)} wheels, this needs the one that `nox -s wheel` builds")
    return wheels[0]


def rewritten(
    wheel: Path, folder: Path, change: Callable[[dict[str, bytes]], None], name: str | None = None
) -> list[str]:
    """The verdict on a copy of the wheel whose files `change` edits."""
    with zipfile.ZipFile(wheel) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    change(files)
    path = folder / (name or wheel.name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    return check_wheel.check(path)


def replace(suffix: str, old: str, new: str) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        (entry,) = (entry for entry in files if entry.endswith(suffix))
        assert old.encode() in files[entry]
        files[entry] = files[entry].replace(old.encode(), new.encode())

    return change


def add(entry: str, content: str = "") -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({entry: content.encode()})


def drop(suffix: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: [files.pop(entry) for entry in list(files) if entry.endswith(suffix)] and None


def test_the_built_wheel_passes(wheel: Path, tmp_path: Path) -> None:
    assert check_wheel.check(wheel) == []
    assert rewritten(wheel, tmp_path, lambda files: None) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add("mega_moe/_lib/other.so"), "mega_moe/_lib/other.so does not belong into a wheel"),
        (add(finish_wheel.KERNELS), "mega_moe/_lib/kernels.json does not belong into a wheel"),
        (add("mega_moe/tests/test_x.py"), "mega_moe/tests/test_x.py does not belong into a wheel"),
        (add("kernels/layout/parts.h"), "kernels/layout/parts.h does not belong into a wheel"),
        (add("mega_moe/__pycache__/api.cpython-311.pyc"), "does not belong into a wheel"),
        (
            add("mega_moe/leak.py", "x = '/" + "home/someone/mega-moe'"),
            "mega_moe/leak.py holds the path /home",
        ),
        (drop("mega_moe/py.typed"), "mega_moe/py.typed is missing"),
        (drop("LICENSE"), "licenses/LICENSE is missing from dist-info"),
        (drop("NOTICE"), "licenses/NOTICE is missing from dist-info"),
        (drop("mega-moe.cdx.json"), "sboms/mega-moe.cdx.json is missing from dist-info"),
        (drop("wheel.json"), "mega_moe/_lib/wheel.json is missing"),
        (drop("RECORD"), "RECORD is missing from dist-info"),
        (drop("nn.py"), "RECORD lists mega_moe/nn.py, which is not there"),
        (add("mega_moe/more.py"), "RECORD does not list mega_moe/more.py"),
        (replace("mega_moe/nn.py", "import", "import "), "mega_moe/nn.py is not what RECORD says"),
        (add("mega_moe-0.2.0.dist-info/METADATA"), "dist-info: got"),
        (replace("wheel.json", '"cu130"', '"cu129"'), "label in wheel.json is cu129, must be cu130"),
        (replace("wheel.json", '"commit": "', '"commit": "v'), "must be a commit's 40 digits"),
        (replace("wheel.json", '"driver"', '"drivers"'), "flavours in wheel.json do not say"),
        (
            replace("build.json", '"13.0"', '"12.9"'),
            "name is +cu130, the library is built with CUDA 12.9",
        ),
        (replace("cdx.json", '"version": "13.0"', '"version": "13.1"'), "must list the CUDA runtime 13.0"),
        (
            replace("cdx.json", '"version": "0.1.0+cu130"', '"version": "0.1.0"'),
            "of materials is of version 0.1.0",
        ),
        (drop("mega_moe_ops.so"), "mega_moe/_lib/mega_moe_ops.so is missing"),
        (drop("build.json"), "mega_moe/_lib/build.json is missing"),
        (
            replace("METADATA", "torch>=2.10", "torch<3,>=2.10"),
            "Requires-Dist for torch is ['torch<3,>=2.10']",
        ),
        (replace("METADATA", "torch>=2.10", "torch>=2.9"), "must be ['torch>=2.10']"),
        (
            replace("METADATA", "# mega-moe\n", "# mega-moe\n[a](docs/a.md)"),
            "the description links to docs/a.md, which the package index does not have",
        ),
        (replace("/WHEEL", "Root-Is-Purelib: false", "Root-Is-Purelib: true"), "WHEEL does not say"),
        (replace("variants.json", '"90a"', '"100a"'), "cubins are for ['90a'], variants.json lists ['100a']"),
        (replace("build.json", '"90a"', '"100a"'), "build.json lists ['100a'], variants.json ['90a']"),
        (replace("build.json", '"kernels_sha256"', '"sha"'), "build.json has"),
        (replace("wheel.json", '"sm90_route": "', '"route": "'), "code in wheel.json is of"),
        (replace("wheel.json", '"sm90_route": "', '"sm90_route": "-'), "for sm90_route, must be 64 hex"),
        (replace("build.json", '"2.10"', '"2.9"'), "needs torch 2.10, build.json says 2.9"),
        (
            replace("build.json", '"version": "0.1.0"', '"version": ""'),
            "version in build.json is , in the file name",
        ),
        (
            replace("mega_moe_ops.so", "aoti_torch_get_dim", "_ZN2at3getEvxxxxxx"),
            "mega_moe_ops.so wants symbol _ZN2at3getEvxxxxxx, which is not of torch's stable ABI",
        ),
        (
            replace("mega_moe_ops.so", "libtorch.so", "libcuda.so1"),
            "needs libcuda.so1, which is not on the list of allowed libraries",
        ),
    ],
)
def test_refuses(
    wheel: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], None], reason: str
) -> None:
    faults = rewritten(wheel, tmp_path, change)
    assert any(reason in fault for fault in faults), faults


def test_the_code_of_every_variant_is_hashed() -> None:
    """Without a wheel too: what is wrong with the hashes alone."""
    variants = '{"variants": [{"name": "a"}, {"name": "b"}]}'
    right = {"a": "1" * 64, "b": "2" * 64}
    assert check_wheel.code_faults(variants, {"code": right}) == []
    for code in (None, "x", {"a": "1" * 64}, {**right, "c": "3" * 64}):
        (fault,) = check_wheel.code_faults(variants, {"code": code})
        assert fault.endswith("variants.json lists ['a', 'b']")
    (fault,) = check_wheel.code_faults(variants, {"code": {**right, "b": "2"}})
    assert fault == "code in wheel.json is '2' for b, must be 64 hex digits"


@pytest.mark.parametrize(
    "name",
    [
        "mega_moe-0.1.0-cp311-cp311-linux_x86_64.whl",
        "mega_moe-0.1.0-py3-none-any.whl",
        "mega_moe-0.1.0+cu130-py3-none-linux_x86_64.whl",
        "mega_moe-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl",
    ],
)
def test_refuses_a_tag(wheel: Path, tmp_path: Path, name: str) -> None:
    assert f"name is {name}, must be" in rewritten(wheel, tmp_path, lambda files: None, name)[0]


@pytest.mark.parametrize(
    "name", ["0.1.0-py3-none-manylinux_2_34_aarch64", "0.1.0+cu130-py3-none-manylinux_2_28_x86_64"]
)
def test_takes_a_tag(name: str) -> None:
    assert check_wheel.name_faults(f"mega_moe-{name}.whl") == []


def test_refuses_a_version_that_the_name_does_not_carry(wheel: Path, tmp_path: Path) -> None:
    name = wheel.name.replace("-0.1.0+", "-0.2.0+")
    faults = rewritten(wheel, tmp_path, lambda files: None, name)
    assert [fault for fault in faults if "version in" in fault] == [
        "version in METADATA is 0.1.0+cu130, in the file name 0.2.0+cu130",
        "version in build.json is 0.1.0, in the file name 0.2.0",
    ]


def test_refuses_a_platform_that_the_symbols_do_not_allow(wheel: Path, tmp_path: Path) -> None:
    """A wheel for glibc 2.17 would install on systems where the library does not load."""
    match = check_wheel.NAME.fullmatch(wheel.name)
    assert match is not None
    machine, other = match["machine"], {"x86_64": "aarch64", "aarch64": "x86_64"}[match["machine"]]
    old = f"manylinux_2_{match['glibc']}_{machine}"
    for new, reason in (
        (f"manylinux_2_17_{machine}", f"tag is for glibc 2.17 on {machine}, auditwheel grants 2."),
        (f"manylinux_2_{match['glibc']}_{other}", "auditwheel: "),
    ):
        faults = rewritten(wheel, tmp_path, replace("/WHEEL", old, new), wheel.name.replace(old, new))
        assert any(reason in fault for fault in faults), faults


def test_refuses_too_much(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_wheel, "MAX_BYTES", 100_000)
    assert any("MB, must be below" in fault for fault in check_wheel.check(wheel))


def test_refuses_ptx(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        variants, build = (archive.read(name).decode() for name in (check_wheel.VARIANTS, check_wheel.BUILD))
    faults = check_wheel.architecture_faults(
        ["a.1.sm_90a.cubin"], ["a.sm_90.ptx"], variants, json.loads(build)
    )
    assert faults == ["holds PTX a.sm_90.ptx, which would be compiled on the user's machine"]


# --- libraries made wrong by the compiler ----------------------------------------------------------------------------


def build(folder: Path, source: str, *options: str) -> list[str]:
    """The verdict on a shared library of `source`, linked with an empty libtorch.so."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    stub, code, library = folder / "libtorch.so", folder / "a.cpp", folder / "a.so"
    (folder / "empty.cpp").write_text("")
    subprocess.run(
        [compiler, "-shared", "-Wl,-soname,libtorch.so", "-o", stub, folder / "empty.cpp"], check=True
    )
    code.write_text(source)
    link = ("-Wl,--no-as-needed", stub)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-o", library, code, *options, *link],
        check=True,
    )
    return elf_rules.library_faults(library)


USE = "__attribute__((constructor)) static void use() "


def test_a_plain_library_passes(tmp_path: Path) -> None:
    source = (
        'extern "C" int aoti_torch_get_dim(void*, long*);' + USE + "{ aoti_torch_get_dim(nullptr, nullptr); }"
    )
    assert build(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "options", "fault"),
    [
        (
            'extern "C" __attribute__((visibility("default"))) int launch() { return 0; }',
            (),
            "exports launch, must export nothing",
        ),
        (
            "namespace at { int get(); }" + USE + "{ at::get(); }",
            (),
            "wants symbol _ZN2at3getEv, which is not of torch's stable ABI",
        ),
        (
            'extern "C" int cuInit(unsigned);' + USE + "{ cuInit(0); }",
            (),
            "wants symbol cuInit, which is not of torch's stable ABI",
        ),
        (
            'extern "C" int aoti_torch_get_current_cuda_stream(int, void**);'
            + USE
            + "{ aoti_torch_get_current_cuda_stream(0, nullptr); }",
            (),
            "wants symbol aoti_torch_get_current_cuda_stream strongly",
        ),
        ("", ("-Wl,-rpath,$ORIGIN",), "has a DT_RUNPATH"),
        (
            f'const char* volatile path;{USE}{{ path = "/{"home"}/someone/a.cpp"; }}',
            (),
            f"holds the path /{'home'}/someone/a.cpp",
        ),
    ],
)
def test_refuses_a_library(tmp_path: Path, source: str, options: tuple[str, ...], fault: str) -> None:
    faults = build(tmp_path, source, *options)
    assert len(faults) == 1, faults
    assert faults[0].startswith(fault)


def test_refuses_what_is_no_library(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "a.cpp").write_text("int a;")
    subprocess.run([compiler, "-c", tmp_path / "a.cpp", "-o", tmp_path / "a.o"], check=True)
    assert elf_rules.library_faults(tmp_path / "a.o") == [
        "is not a shared library: no dynamic section or symbols"
    ]


def test_needed_libraries() -> None:
    assert (
        elf_rules.needed_faults(["libtorch.so", "libstdc++.so.6", "libc.so.6", "ld-linux-x86-64.so.2"]) == []
    )
    for name in ("libcuda.so.1", "libcudart.so.13", "libtorch_cuda.so", "libc10.so", "libpython3.11.so.1.0"):
        assert elf_rules.needed_faults(["libtorch.so", name]) == [
            f"needs {name}, which is not on the list of allowed libraries"
        ]
    assert "does not need libtorch.so" in elf_rules.needed_faults(["libc.so.6"])[0]


def test_versions_of_the_toolchain() -> None:
    assert (
        elf_rules.version_faults(["GLIBC_2.34", "GLIBC_2.2.5", "GLIBCXX_3.4.29", "CXXABI_1.3.9", "GCC_3.0"])
        == []
    )
    assert "the limit is 2.34" in elf_rules.version_faults(["GLIBC_2.38"])[0]
    assert "the limit is 3.4.29" in elf_rules.version_faults(["GLIBCXX_3.4.30"])[0]
    assert "is of none of" in elf_rules.version_faults(["GLIBC_PRIVATE"])[0]
