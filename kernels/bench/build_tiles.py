"""Builds the library once per tile of the staging kernel, for stage_timing.py to compare.

    python kernels/bench/build_tiles.py OUT_FOLDER

Writes OUT_FOLDER/<bf16 tile>_<fp8 tile>.so, a tile being threads x vectors per thread x blocks per SM.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent

# (threads, vectors per thread, blocks per SM): of the copying form, and of the quantizing form, whose warps hold four.
TILES = [
    ((256, 4, 8), (256, 4, 5)),
    ((128, 4, 16), (128, 4, 10)),
    ((512, 4, 4), (512, 4, 2)),
    ((256, 2, 8), (128, 4, 8)),
    ((256, 8, 4), (256, 4, 4)),
    ((128, 8, 8), (256, 4, 6)),
    ((1024, 2, 2), (64, 4, 20)),
]


def with_tiles(variants: str, tiles: dict[str, tuple[int, int, int]]) -> str:
    """variants.toml with other tiles: name of a variant to its tile."""
    for name, values in tiles.items():
        start = variants.index(f'name = "{name}"')
        head, tail = variants[:start], variants[start:]
        for key, value in zip(("threads", "vectors_per_thread", "blocks_per_sm"), values, strict=True):
            tail = re.sub(rf"^{key} = \d+", f"{key} = {value}", tail, count=1, flags=re.MULTILINE)
        variants = head + tail
    return variants


def label(tile: tuple[int, int, int]) -> str:
    return "x".join(map(str, tile))


def main(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Beside the copy, because the build calls the checker of ptxas logs in ci/.
        shutil.copytree(KERNELS.parent / "ci", Path(folder) / "ci")
        source = shutil.copytree(KERNELS, Path(folder) / "kernels", ignore=shutil.ignore_patterns("build"))
        variants = (source / "variants.toml").read_text()
        build = Path(folder) / "build"
        for copying, quantizing in TILES:
            tiles = {"sm90_bf16_stage": copying, "sm90_fp8_stage": quantizing}
            (source / "variants.toml").write_text(with_tiles(variants, tiles))
            configure = [
                "cmake",
                "-S",
                source,
                "-B",
                build,
                "-G",
                "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["cmake", "--build", build, "--target", "mega_moe_ops"], check=True)
            shutil.copy(build / "mega_moe_ops.so", out / f"{label(copying)}_{label(quantizing)}.so")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
