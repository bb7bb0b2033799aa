"""The hash of a variant's code changes with what decides the code or its launch, and with nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
sys.path.insert(0, str(KERNELS))
from hash_kernels import hash_variants  # noqa: E402  (the folder above must be on the path first)
from variant_sources import DECLARES_EVERY_OP, Sources  # noqa: E402

del sys.path[0]

BEFORE = hash_variants(KERNELS)
STAGE = {"sm90_bf16_stage", "sm90_fp8_stage"}
FORWARD = {name for name in BEFORE if "_forward" in name}
BACKWARD = {name for name in BEFORE if "_backward" in name}
LAYER = FORWARD | BACKWARD


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A copy of the sources."""
    left_out = shutil.ignore_patterns("build", "bench", "tests", "__pycache__")
    return Path(shutil.copytree(KERNELS, tmp_path / "kernels", ignore=left_out))


def changed(kernels: Path) -> set[str]:
    after = hash_variants(kernels)
    assert after.keys() == BEFORE.keys()
    return {name for name, digest in after.items() if digest != BEFORE[name]}


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(kernels: Path) -> None:
        text = (kernels / name).read_text()
        assert old in text
        (kernels / name).write_text(text.replace(old, new, 1))

    return apply


def add(name: str, text: str) -> Callable[[Path], None]:
    def apply(kernels: Path) -> None:
        with (kernels / name).open("a") as file:
            file.write(text)

    return apply


def test_one_of_each_variant_wherever_the_sources_lie(kernels: Path) -> None:
    assert list(BEFORE) == sorted(variant["name"] for variant in Sources(KERNELS).variants)
    assert len(set(BEFORE.values())) == len(BEFORE)
    assert changed(kernels) == set()
    done = subprocess.run(
        [sys.executable, kernels / "hash_kernels.py", "--variants"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == BEFORE


@pytest.mark.parametrize(
    "apply",
    [
        add("device/route/route.cuh", "// A comment.\n"),
        add("layout/staging.h", "\n\n/* Another,\nlonger. */\n"),
        edit("host/launch.cpp", "config.gridDim = dim3(blocks);", "config.gridDim =\n  dim3( blocks );"),
        add("device/route/new.cuh", "constexpr int kNew = 1;\n"),
        add("host/new.cpp", "int made_of() { return 1; }\n"),
        add("device/kernel/sm90_new.cuh", '#include "device/route/route.cuh"\n'),
        edit("variants.toml", "threads = 384\n", "threads = 384  # why\n"),
        edit("variants.toml", "spill_bytes = 208", "spill_bytes = 209"),
        add("cmake/flags.cmake", "# why\n"),
        add("cmake/layers.cmake", "set(a b)\n"),
        add(DECLARES_EVERY_OP, "void made_of();\n"),
        add("binding/library.cpp", "void made_of() {}\n"),
    ],
)
def test_what_changes_no_code(kernels: Path, apply: Callable[[Path], None]) -> None:
    apply(kernels)
    assert changed(kernels) == set()


@pytest.mark.parametrize(
    ("apply", "those"),
    [
        (
            edit("layout/staging.h", "kQuantGroup = 128", "kQuantGroup = 64"),
            {*BEFORE} - {"sm90_clock_probe", "sm90_fp8_quantize_weights"},
        ),
        (add("device/route/count.cuh", "constexpr int kNew = 1;\n"), LAYER | {"sm90_route"}),
        (add("device/sm90/wgrad_store.cuh", "constexpr int kNew = 1;\n"), BACKWARD),
        (add("device/dispatch/stage_copy.cuh", "constexpr int kNew = 1;\n"), STAGE),
        (edit("variants.toml", "threads = 512                #", "threads = 256  #"), {"sm90_route"}),
        (add("host/stage.cpp", "int made_of() { return 1; }\n"), STAGE),
        (add("host/forward.cpp", "int made_of() { return 1; }\n"), FORWARD),
        (add("host/layer_launch.cpp", "int made_of() { return 1; }\n"), LAYER),
        (add("host/route.cpp", "int made_of() { return 1; }\n"), LAYER | {"sm90_route"}),
        (add("host/launch.cpp", "int made_of() { return 1; }\n"), {*BEFORE}),
        (add("binding/backward.cpp", "int made_of() { return 1; }\n"), BACKWARD),
        (add("binding/clock_probe.cpp", "int made_of() { return 1; }\n"), {"sm90_clock_probe"}),
        (edit("cmake/flags.cmake", "-Xptxas=-v", "-Xptxas=-v,-O1"), {*BEFORE}),
        (edit("generate.py", "\nnamespace mega_moe {{", "\nnamespace mega_moe {{ int a;"), {*BEFORE} - LAYER),
    ],
)
def test_what_changes_the_code_of_some(kernels: Path, apply: Callable[[Path], None], those: set[str]) -> None:
    apply(kernels)
    assert changed(kernels) == those


def test_a_renamed_header_counts(kernels: Path) -> None:
    (kernels / "device/dispatch/stage_copy.cuh").rename(kernels / "device/dispatch/stage_moved.cuh")
    edit("device/kernel/sm90_stage.cuh", "dispatch/stage_copy.cuh", "dispatch/stage_moved.cuh")(kernels)
    assert changed(kernels) == STAGE


def test_every_source_of_a_launch_is_found() -> None:
    """Each source of the launching layers counts for some op, but what only says what was built and what there is."""
    sources = Sources(KERNELS)
    reached = {name for variant in sources.variants for name in sources.of_launch(variant["op"])}
    there = {
        path.relative_to(KERNELS).as_posix()
        for layer in ("host", "binding")
        for path in KERNELS.glob(f"{layer}/*.*")
    }
    assert there - reached == {
        "host/build_info.cpp",
        "host/layer.cpp",  # judges a call before any launch
        "binding/exports.map",
        "binding/library.cpp",
        DECLARES_EVERY_OP,
    }


def test_what_cannot_be_followed_is_refused(kernels: Path) -> None:
    add("device/route/route.cuh", '#include "device/route/none.cuh"\n')(kernels)
    with pytest.raises(
        FileNotFoundError, match=r"route.cuh: includes device/route/none.cuh, which is not below"
    ):
        hash_variants(kernels)


def test_an_op_that_nothing_launches_is_refused(kernels: Path) -> None:
    (kernels / "host/clock_probe.cpp").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"op clock_probe: got no source that launches it, wanted one of host/"
    ):
        hash_variants(kernels)
