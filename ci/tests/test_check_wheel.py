"""check_wheel on the built wheel and on copies of it, each with one thing made wrong."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import check_wheel
import finish_wheel
import pytest
import wheel_file

from ._helpers import compile_cpp

Change = Callable[[dict[str, bytes]], object]


def judged(wheel: Path, folder: Path, change: Change = lambda files: None, name: str = "") -> list[str]:
    """The verdict on a copy of the wheel whose files `change` edits."""
    files = wheel_file.read(wheel)
    change(files)
    with zipfile.ZipFile(
        folder / (name or wheel.name), "w", zipfile.ZIP_DEFLATED, compresslevel=1
    ) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    return check_wheel.check(folder / (name or wheel.name))


def replace(suffix: str, old: str, new: str) -> Change:
    def change(files: dict[str, bytes]) -> None:
        (entry,) = (entry for entry in files if entry.endswith(suffix))
        assert old.encode() in files[entry]
        files[entry] = files[entry].replace(old.encode(), new.encode())

    return change


def add(entry: str, content: str = "") -> Change:
    return lambda files: files.update({entry: content.encode()})


def drop(suffix: str) -> Change:
    return lambda files: [files.pop(entry) for entry in list(files) if entry.endswith(suffix)]


def test_the_built_wheel_passes(wheel: Path, tmp_path: Path) -> None:
    assert judged(wheel, tmp_path) == []


def test_a_wheel_has_a_largest_size(wheel: Path, tmp_path: Path) -> None:
    noise = os.urandom(check_wheel.MAX_BYTES).hex()
    assert any(fault.startswith("size is") for fault in judged(wheel, tmp_path, add("mega_moe/a.py", noise)))


# Of these a fault ends the judgement, or no tool looks into the library: one test of them all is short.
FILES = [
    (add("mega_moe/_lib/other.so"), "mega_moe/_lib/other.so does not belong into a wheel"),
    (add(finish_wheel.KERNELS), "mega_moe/_lib/kernels.json does not belong into a wheel"),
    (add("mega_moe/tests/test_x.py"), "mega_moe/tests/test_x.py does not belong into a wheel"),
    (add("mega_moe/bench/tests/x.py"), "mega_moe/bench/tests/x.py does not belong into a wheel"),
    (add("kernels/layout/tiles.h"), "kernels/layout/tiles.h does not belong into a wheel"),
    (add("mega_moe/__pycache__/api.pyc"), "mega_moe/__pycache__/api.pyc does not belong into a wheel"),
    (add("mega_moe/a.py", "x = '/" + "home/a/b'"), "mega_moe/a.py holds the path /" + "home/a/b"),
    (drop("mega_moe/py.typed"), "mega_moe/py.typed is missing"),
    (drop("LICENSE"), "licenses/LICENSE is missing"),
    (drop("NOTICE"), "licenses/NOTICE is missing"),
    (drop("mega-moe.cdx.json"), "sboms/mega-moe.cdx.json is missing"),
    (drop("wheel.json"), "mega_moe/_lib/wheel.json is missing"),
    (drop("build.json"), "mega_moe/_lib/build.json is missing"),
    (drop("mega_moe_ops.so"), "mega_moe/_lib/mega_moe_ops.so is missing"),
    (drop("RECORD"), "RECORD is missing"),
    (add("mega_moe-0.2.0.dist-info/METADATA"), "dist-info: got"),
]
RECORDS = [
    (drop("nn.py"), "RECORD has a false line of mega_moe/nn.py"),
    (add("mega_moe/more.py"), "RECORD has no true line of mega_moe/more.py"),
    (replace("mega_moe/nn.py", "import", "import "), "RECORD has a false line of mega_moe/nn.py"),
    (replace("wheel.json", '"cu130"', '"cu129"'), "label in wheel.json is cu129, must be cu130"),
    (replace("wheel.json", '"commit": "', '"commit": "v'), "must be a commit's 40 digits"),
    (replace("wheel.json", '"sm90_route": "', '"route": "'), "code in wheel.json is of"),
    (replace("wheel.json", '"sm90_route": "', '"sm90_route": "-'), "for sm90_route, must be 64 hex"),
    (replace("build.json", '"13.0"', '"12.9"'), "name is +cu130, the library is built with CUDA 12.9"),
    (replace("build.json", '"kernels_sha256"', '"sha"'), "build.json has"),
    (replace("build.json", '"version": "0.1.0"', '"version": ""'), "version in build.json is , in the file"),
    (replace("cdx.json", '"version": "13.0"', '"version": "13.1"'), "must list the CUDA runtime 13.0"),
    (replace("cdx.json", '"0.1.0+cu130"', '"0.1.0"'), "of materials is of version 0.1.0"),
    (replace("METADATA", "torch>=2.10", "torch<3,>=2.10"), "torch is ['torch<3,>=2.10']"),
    (replace("METADATA", "torch>=2.10", "torch>=2.9"), "must be ['torch>=2.10']"),
    (replace("METADATA", "# mega-moe\n", "[a](docs/a.md)"), "the description links to docs/a.md"),
    (replace("/WHEEL", "Purelib: false", "Purelib: true"), "WHEEL does not say"),
]
LIBRARY = [
    (replace("variants.json", '"90a"', '"100a"'), "cubins are for ['90a'], variants.json lists ['100a']"),
    (replace("build.json", '"90a"', '"100a"'), "build.json lists ['100a'], variants.json ['90a']"),
    (replace("build.json", '"2.10"', '"2.9"'), "needs torch 2.10, build.json says 2.9"),
    (
        replace("mega_moe_ops.so", "aoti_torch_get_dim", "_ZN2at3getEvxxxxxx"),
        "mega_moe_ops.so wants symbol _ZN2at3getEvxxxxxx, which is not of torch's stable ABI",
    ),
    (replace("mega_moe_ops.so", "libtorch.so", "libcuda.so1"), "needs libcuda.so1, which is not on the list"),
]


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look into the library, which takes seconds."""
    monkeypatch.setattr(check_wheel, "library_faults", lambda *_: ())
    monkeypatch.setattr(check_wheel, "platform_faults", lambda *_: ())


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize(("change", "reason"), [*FILES, *RECORDS])
def test_refuses(wheel: Path, tmp_path: Path, change: Change, reason: str) -> None:
    faults = judged(wheel, tmp_path, change)
    assert any(reason in fault for fault in faults), faults


@pytest.mark.parametrize(("change", "reason"), LIBRARY)
def test_refuses_a_changed_library(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, reason: str
) -> None:
    monkeypatch.setattr(check_wheel, "platform_faults", lambda *_: ())
    faults = judged(wheel, tmp_path, change)
    assert any(reason in fault for fault in faults), faults


def test_the_code_of_every_variant_is_hashed() -> None:
    right = {"a": "1" * 64, "b": "2" * 64}
    assert list(check_wheel.code_faults(["a", "b"], right)) == []
    for code in (None, "x", {"a": "1" * 64}, {**right, "c": "3" * 64}):
        (fault,) = check_wheel.code_faults(["a", "b"], code)
        assert fault.endswith("variants.json lists ['a', 'b']")


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize(
    "tag",
    [
        "-cp311-cp311-linux_x86_64",
        "-py3-none-any",
        "+cu130-py3-none-linux_x86_64",
        "-cp311-abi3-manylinux_2_34_x86_64",
    ],
)
def test_refuses_a_tag(wheel: Path, tmp_path: Path, tag: str) -> None:
    assert judged(wheel, tmp_path, name=f"mega_moe-0.1.0{tag}.whl")[0].startswith("name is mega_moe-0.1.0")


@pytest.mark.usefixtures("unopened")
def test_refuses_a_version_that_the_name_does_not_carry(wheel: Path, tmp_path: Path) -> None:
    faults = judged(wheel, tmp_path, name=wheel.name.replace("-0.1.0+", "-0.2.0+"))
    assert [fault for fault in faults if "version in" in fault] == [
        "version in METADATA is 0.1.0+cu130, in the file name 0.2.0+cu130",
        "version in build.json is 0.1.0, in the file name 0.2.0",
    ]


@pytest.mark.parametrize(("glibc", "machine"), [(27, "x86_64"), (34, "aarch64")])
def test_refuses_a_platform_that_the_symbols_do_not_allow(
    monkeypatch: pytest.MonkeyPatch, glibc: int, machine: str
) -> None:
    """A wheel for an older glibc would install on systems where the library does not load."""
    monkeypatch.setattr(finish_wheel, "granted", lambda _: (28, "x86_64"))
    assert not list(check_wheel.platform_faults(Path(), 28, "x86_64"))
    (fault,) = check_wheel.platform_faults(Path(), glibc, machine)
    assert fault == f"tag is for glibc 2.{glibc} on {machine}, auditwheel grants 2.28 on x86_64"


@pytest.mark.usefixtures("unopened")
def test_refuses_too_much(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_wheel, "MAX_BYTES", 100_000)
    (fault,) = check_wheel.check(wheel)
    assert "MB, must be below" in fault


def test_refuses_ptx() -> None:
    (fault,) = check_wheel.architecture_faults(
        ["a.1.sm_90a.cubin"], ["a.sm_90.ptx"], {"90a"}, {"architectures": ["90a"]}
    )
    assert fault == "holds PTX a.sm_90.ptx, which would be compiled on the user's machine"


USE = "__attribute__((constructor)) static void use() "
STREAM = "aoti_torch_get_current_cuda_stream"


def library(folder: Path, source: str, *options: str) -> list[str]:
    """The verdict on a shared library of `source`, linked with an empty libtorch.so."""
    torch = compile_cpp("", folder / "libtorch.so", "-Wl,-soname,libtorch.so")
    linked = ("-O1", "-fvisibility=hidden", *options, "-Wl,--no-as-needed", torch)
    return check_wheel.elf_faults(compile_cpp(source, folder / "a.so", *linked))


def test_a_plain_library_passes(tmp_path: Path) -> None:
    used = (
        'extern "C" int aoti_torch_get_dim(void*, long*);' + USE + "{ aoti_torch_get_dim(nullptr, nullptr); }"
    )
    assert library(tmp_path, used) == []


@pytest.mark.parametrize(
    ("source", "options", "fault"),
    [
        (
            'extern "C" __attribute__((visibility("default"))) int launch() { return 0; }',
            (),
            "exports launch",
        ),
        (
            "namespace at { int get(); }" + USE + "{ at::get(); }",
            (),
            "wants symbol _ZN2at3getEv, which is not",
        ),
        ('extern "C" int cuInit(int);' + USE + "{ cuInit(0); }", (), "wants symbol cuInit, which is not"),
        (f'extern "C" int {STREAM}(int);{USE}{{ {STREAM}(0); }}', (), f"wants symbol {STREAM} strongly"),
        ("", ("-Wl,-rpath,$ORIGIN",), "has a DT_RUNPATH"),
        (
            f'const char* volatile p;{USE}{{ p = "/{"home"}/a/b.cpp"; }}',
            (),
            f"holds the path /{'home'}/a/b.cpp",
        ),
    ],
)
def test_refuses_a_library(tmp_path: Path, source: str, options: tuple[str, ...], fault: str) -> None:
    (found,) = library(tmp_path, source, *options)
    assert found.startswith(fault)


def test_refuses_what_is_no_library_and_what_it_may_not_need(tmp_path: Path) -> None:
    found = check_wheel.elf_faults(compile_cpp("int a;", tmp_path / "a.o", "-c", "-no-pie"))
    assert found == ["is not a shared library: no dynamic section or symbols"]
    for name in ("libcuda.so.1", "libcudart.so.13", "libtorch_cuda.so", "libc10.so", "libpython3.11.so.1.0"):
        (fault,) = check_wheel.needed_faults(["libtorch.so", "libc.so.6", name])
        assert fault == f"needs {name}, which is not on the list of allowed libraries"
    assert "does not need libtorch.so" in next(check_wheel.needed_faults(["libc.so.6"]))
