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
    (wheel,) = matrix.load().wheels()
    assert (wheel["label"], wheel["cuda"], wheel["platform"]) == ("cu130", "13.0", "x86_64")
    assert "@sha256:" in wheel["image"]
    assert "self-hosted" in wheel["gpu"]


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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('policy = "manylinux_2_28"', 'policy = "linux"', "policy is 'linux', must be like"),
        ('label = "cu130"', 'label = "cu128"', "label of CUDA 13.0 is 'cu128', must be cu130"),
        ('default = "cu130"', 'default = "cu140"', "with the default cu140"),
        ("driver = 580\n", "", "keys of cuda cu130 is"),
        ("driver = 580", 'driver = "580"', "driver is '580', must be a whole number"),
        ('digest = "sha256:7710', 'digest = "latest', "must be sha256:<64 digits>"),
        ('"3.10", "3.11"', '"3.11", "3.10"', "pythons is"),
        ('torch_floor = "2.10"', 'torch_floor = "2.9"', "begins with the floor 2.9"),
        ("[runners.x86_64]", "[runners.riscv]", "images is ['x86_64'], must be for runners ['riscv']"),
        ('gpu = ["self-hosted", "linux", "x64", "h200"]\n', "", "runners x86_64 is ['build']"),
        ("[runners.x86_64]", "[extra]\na = 1\n[runners.x86_64]", "tables is"),
        ('architectures = ["90a"]', "architectures = []", "architectures is [], must be one at least"),
    ],
)
def test_refuses(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    (tmp_path / "matrix.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"matrix\.toml: ") as error:
        matrix.load(tmp_path / "matrix.toml")
    assert message in str(error.value)


TABLE = "docs/installing.md"


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
        ("kernels/variants.toml", '"90a"', '"100a"', "compiles for ['100a'], matrix.toml lists ['90a']"),
        (TABLE, "| 580 or newer |", "| 470 or newer |", "installing.md: the table matrix is an old one"),
        (TABLE, "<!-- matrix:end -->", "", "no document has a place for the table"),
    ],
)
def test_refuses_a_file_that_says_otherwise(
    tmp_path: Path, name: str, old: str, new: str, fault: str
) -> None:
    for file in {file for file, _, _ in matrix.REPEATED} | {"kernels/variants.toml", TABLE}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    assert matrix.faults(matrix.load(), tmp_path) == []
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    assert [found for found in matrix.faults(matrix.load(), tmp_path) if fault in found]


def test_prints_what_the_workflows_read(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in (
        ["wheels"],
        ["wheels", "cu130", "x86_64"],
        ["wheels", "cu118", "x86_64"],
        ["torch"],
        ["pythons"],
    ):
        assert matrix.main(words) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert [len(wheels) for wheels in printed[:3]] == [1, 1, 0]
    assert [versions[0] for versions in printed[3:]] == ["2.10", "3.10"]
    assert matrix.main(["check"]) == 0
    assert matrix.main(["dance"]) == 2
