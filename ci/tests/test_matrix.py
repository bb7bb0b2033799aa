"""The matrix of wheels refuses what is wrong in itself, and files that say otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import matrix
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = (ROOT / "ci/matrix.toml").read_text()


def test_every_wheel_can_be_built_and_tested() -> None:
    loaded = matrix.load()
    wheels = loaded.wheels()
    assert {(w["label"], w["platform"]) for w in wheels} == {("cu130", "x86_64")}
    assert all("@sha256:" in w["image"] and w["runner"] and "self-hosted" in w["gpu"] for w in wheels)
    assert loaded.flavour("cu130").version == "13.0"


def test_another_cuda_version_and_platform_are_more_wheels(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    more = (
        '[[cuda]]\nlabel = "cu129"\nversion = "12.9"\ndriver = 525\narchitectures = ["90a"]\n[cuda.images]\n'
        f'x86_64 = {{ name = "a", digest = "{digest}" }}\naarch64 = {{ name = "b", digest = "{digest}" }}\n'
        '[runners.aarch64]\nbuild = "arm"\ngpu = ["gh200"]\n'
    )
    (tmp_path / "matrix.toml").write_text(f"{GOOD}\n{more}")
    loaded = matrix.load(tmp_path / "matrix.toml")
    assert [(w["label"], w["platform"], w["gpu"][-1]) for w in loaded.wheels()] == [
        ("cu130", "x86_64", "h200"),
        ("cu129", "x86_64", "h200"),
        ("cu129", "aarch64", "gh200"),
    ]
    assert "| `cu129` | 12.9 | 525 or newer | sm_90a | x86_64, aarch64 |" in matrix.table(loaded)


def test_an_unknown_label_is_refused() -> None:
    loaded = matrix.load()
    with pytest.raises(ValueError, match="flavour: got 'cu118', want one of"):
        loaded.flavour("cu118")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('policy = "manylinux_2_28"', 'policy = "linux"', "policy is 'linux', must be like"),
        ('label = "cu130"', 'label = "cu128"', "label of CUDA 13.0 is cu128, must be cu130"),
        ('default = "cu130"', 'default = "cu140"', "must differ and hold the default cu140"),
        ("driver = 580\n", "", "cuda cu130: keys are"),
        ("driver = 580", 'driver = "580"', "driver is '580', must be a int"),
        ('digest = "sha256:7710', 'digest = "latest', "digest is 'latest"),
        ('digest = "sha256:7710', 'digest = "', "must be sha256:<64 digits>"),
        ('"3.10", "3.11"', '"3.11", "3.10"', "pythons is"),
        ('torch_floor = "2.10"', 'torch_floor = "2.9"', "torch_tested must begin with the floor 2.9"),
        ("[runners.x86_64]", "[runners.riscv]", "images are for ['x86_64'], runners for ['riscv']"),
        ('gpu = ["self-hosted", "linux", "x64", "h200"]\n', "", "runners x86_64: keys are ['build']"),
        ("[runners.x86_64]", "[extra]\na = 1\n[runners.x86_64]", "tables are"),
        ('architectures = ["90a"]', "architectures = []", r"architectures is \[\], must be a list"),
    ],
)
def test_refuses(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    path = tmp_path / "matrix.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"matrix\.toml: ") as error:
        matrix.load(path)
    assert message.replace("\\", "") in str(error.value)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = {name for name, _, _ in matrix.REPEATED} | {"kernels/variants.toml", matrix.TABLE_FILE}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_files_of_this_tree_agree(tree: Path) -> None:
    assert matrix.faults(matrix.load(), ROOT) == []
    assert matrix.faults(matrix.load(), tree) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("pyproject.toml", 'requires-python = ">=3.10"', 'requires-python = ">=3.11"', "says ['3.11']"),
        ("pyproject.toml", '"torch>=2.10",', '"torch>=2.11",', "says ['2.11']"),
        ("kernels/cmake/generated.cmake", '"2.10"', '"2.11"', "says ['2.11']"),
        ("kernels/cmake/torch_stable.cmake", "0x020a0", "0x020b0", "says ['0x020b000000000000']"),
        ("kernels/CMakeLists.txt", "CUDAToolkit 12.9", "CUDAToolkit 12.8", "says ['12.8']"),
        ("python/mega_moe/_ops/library.py", "(2, 10)", "(2, 9)", "says ['2.9']"),
        ("ci/find_cuda.py", "(12, 9)", "(12, 4)", "says ['12.4']"),
        ("kernels/variants.toml", '"90a"', '"100a"', "compiles for ('100a',"),
        (
            "docs/installing.md",
            "| 580 or newer |",
            "| 470 or newer |",
            "the table is not that of matrix.toml",
        ),
        ("docs/installing.md", "<!-- matrix:end -->", "", "no place for the table"),
    ],
)
def test_refuses_a_file_that_says_otherwise(tree: Path, name: str, old: str, new: str, fault: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))
    assert [found for found in matrix.faults(matrix.load(), tree) if fault in found]


def test_prints_what_the_workflows_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["wheels"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert matrix.main(["wheels", "cu130", "x86_64"]) == 0
    (wheel,) = json.loads(capsys.readouterr().out)
    assert wheel["cuda"] == "13.0"
    assert matrix.main(["torch"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == "2.10"
    assert matrix.main(["pythons"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == "3.10"
    assert matrix.main(["dance"]) == 2
