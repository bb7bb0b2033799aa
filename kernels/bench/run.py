"""Builds the micro-benchmarks that the fused kernels rest on, runs them on this machine and writes one JSON file.

    python kernels/bench/run.py                          everything, about three minutes on one device
    python kernels/bench/run.py --groups tiles,sms       some of it
    python kernels/bench/run.py --build-only             no device needed

Groups: peer (copies within and between devices), l2 (TMA out of L2), tiles (products by tile shape, multicast,
majorness and precision), sms (a product on fewer SMs), launch (cooperative clusters, grid barriers, launches that
wait for one another), flags (round trips). What needs two devices is skipped, with the reason, where there is one.

Every result is compared with a reference before it is timed. Status 0 when all groups ran and all checks passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent.parent
sys.path[:0] = [str(BENCH), str(BENCH.parent)]

from check_sass import check as check_sass  # noqa: E402  (the folders above must be on the path first)
from gemm_variants import load_variants  # noqa: E402
from hash_kernels import hash_kernels  # noqa: E402
from tables import format_tables  # noqa: E402

# Seconds after which a group is taken to hang; several times what it needs.
LIMITS = {"peer": 180, "l2": 60, "tiles": 300, "sms": 90, "launch": 60, "flags": 60}

Json = dict[str, Any]


def tool(name: str) -> str | None:
    """A program of PATH, or alongside this Python, or of CUDA's packages there."""
    packaged = [str(Path(folder) / "nvidia/cu13/bin") for folder in sys.path]
    alongside = [str(Path(sys.executable).parent), *packaged, "/usr/local/cuda/bin"]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(alongside))


def build(folder: Path, jobs: int) -> Path:
    """Compiles into `folder`; the path of the program. Ends the process with what went wrong when it fails."""
    nvcc = subprocess.run(
        [sys.executable, ROOT / "ci/find_cuda.py"], stdout=subprocess.PIPE, text=True, check=False
    )
    if nvcc.returncode:
        sys.exit(nvcc.returncode)
    cmake = tool("cmake")
    if cmake is None:
        sys.exit("run: no cmake on PATH; pip install cmake ninja")
    configure = [cmake, "-S", BENCH, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
    ninja = tool("ninja")
    if ninja and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    environment = os.environ | {"CUDACXX": nvcc.stdout.strip()}
    for command in (configure, [cmake, "--build", folder, "--parallel", str(jobs)]):
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
        )
        if run.returncode:
            sys.exit(f"{run.stdout}\nrun: {' '.join(map(str, command))} ended with status {run.returncode}")
    return folder / "mega_moe_microbench"


def inspect(folder: Path) -> Json:
    """Judges what ptxas said of the GEMMs and, where cuobjdump is at hand, their machine code."""
    table = BENCH / "variants.toml"
    ptxas = subprocess.run(
        [sys.executable, ROOT / "ci/check_ptxas.py", table, folder / "ptxas", folder / "kernels.json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wrong = ptxas.stderr.splitlines()
    variants = load_variants(table)
    cuobjdump = tool("cuobjdump")
    if cuobjdump:
        with tempfile.TemporaryDirectory() as scratch:
            for variant in variants:
                (compiled,) = folder.rglob(f"{variant['name']}.cu.o")
                with (Path(scratch) / f"{variant['name']}.sass").open("w") as sass:
                    subprocess.run([cuobjdump, "-sass", compiled], stdout=sass, check=True)
            wrong += check_sass(variants, Path(scratch))
    judged: Json = {"status": "failed" if wrong or ptxas.returncode else "ok", "variants": len(variants)}
    judged["sass"] = "looked at" if cuobjdump else "skipped: no cuobjdump on PATH"
    return judged | ({"reason": "; ".join(wrong)} if wrong else {})


def describe(line: Json) -> str:
    """A line of the program without its kind, for people."""
    return " ".join(f"{key}={value}" for key, value in line.items() if key != "kind")


def judge(lines: list[Json], returncode: int | None, limit: float) -> Json:
    """What a group's lines amount to. `returncode` is None when it ran past its limit."""
    group: Json = {
        "status": "ok",
        "rows": [line for line in lines if line["kind"] == "row"],
        "checks": [line for line in lines if line["kind"] == "check"],
        "skipped": [line for line in lines if line["kind"] == "skip"],
    }
    reasons = [line["message"] for line in lines if line["kind"] == "error"]
    failed = [line for line in group["checks"] if line["ok"] is not True]
    if failed:
        reasons.append(
            f"{len(failed)} of {len(group['checks'])} checks failed, the first: {describe(failed[0])}"
        )
    if returncode is None:
        reasons.append(f"ended after {limit:g} s without an answer")
    elif returncode and not reasons:
        reasons.append(f"ended with status {returncode}")
    elif not returncode and not group["checks"]:
        reasons.append("no result was checked")
    if reasons:
        group |= {"status": "failed", "reason": "; ".join(reasons)}
    return group


def run_group(program: Path, name: str, limit: float) -> tuple[Json, list[Json]]:
    """Runs one group, printing what goes wrong as it does; its results and the devices that it saw."""
    lines: list[Json] = []
    expired = threading.Event()
    with subprocess.Popen([program, name], stdout=subprocess.PIPE, text=True) as process:

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limit, expire)
        timer.start()
        for text in process.stdout or ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = {"kind": "error", "message": f"not JSON: {text.strip()}"}
            lines.append(line)
            if line["kind"] == "error" or (line["kind"] == "check" and line["ok"] is not True):
                print(f"{line['kind']}: {describe(line)}", flush=True)
        process.wait()
        timer.cancel()
    devices = [line for line in lines if line["kind"] == "device"]
    return judge(lines, None if expired.is_set() else process.returncode, limit), devices


def driver_facts() -> list[Json]:
    """What nvidia-smi says of each device; empty where it is missing."""
    fields = ("driver_version", "clocks.max.sm", "power.limit", "temperature.gpu")
    smi = tool("nvidia-smi")
    if smi is None:
        return []
    run = subprocess.run(
        [smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return [dict(zip(fields, map(str.strip, row.split(",")))) for row in run.stdout.splitlines() if row]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run.py"
    )
    parser.add_argument("--groups", default=",".join(LIMITS), help="names with commas between them")
    parser.add_argument("--out", type=Path, default=Path("microbench.json"), help="file of the results")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "microbench")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    parser.add_argument("--build-only", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.groups = arguments.groups.split(",")
    for name in arguments.groups:
        if name not in LIMITS:
            parser.error(f"--groups: got {name!r}, want some of {','.join(LIMITS)}")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    started = time.monotonic()
    result: Json = {"schema": 1, "started": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    program = build(arguments.build_dir, arguments.jobs)
    result["machine_code"] = inspect(arguments.build_dir)
    print(f"machine code: {result['machine_code']}", flush=True)
    result["build_seconds"] = round(time.monotonic() - started, 1)
    failed = result["machine_code"]["status"] == "failed"
    if arguments.build_only:
        return 1 if failed else 0

    result["sources"] = {"kernels_sha256": hash_kernels(BENCH.parent), "bench_sha256": hash_kernels(BENCH)}
    result["driver"] = driver_facts()
    result["groups"] = {}
    for name in arguments.groups:
        print(f"{name} ...", flush=True)
        group_started = time.monotonic()
        group, devices = run_group(program, name, LIMITS[name])
        result["devices"] = devices
        result["groups"][name] = group | {"seconds": round(time.monotonic() - group_started, 1)}
        failed = failed or group["status"] == "failed"
    result["seconds"] = round(time.monotonic() - started, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(format_tables(result))
    print(f"{'FAILED' if failed else 'ok'}: {result['seconds']} s, results in {arguments.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
