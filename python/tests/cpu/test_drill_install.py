"""Failure drills: each way in which an installation goes wrong, and the words that the user then reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mega_moe
from mega_moe._advice import Installation, advice
from mega_moe._backends.choice.decide import choose, decide
from mega_moe._backends.choice.facts import RankFacts
from mega_moe._backends.choice.request import Request
from mega_moe._ops import library

PACKAGE = Path(mega_moe.__file__).parent
FLAVOURS = [
    {"label": "cu129", "cuda": "12.9", "driver": 525, "architectures": ["90a"]},
    {"label": "cu130", "cuda": "13.0", "driver": 580, "architectures": ["90a"]},
]
RECORD = {"label": "cu130", "commit": "0" * 40, "flavours": FLAVOURS}
LAYER: dict[str, int] = dict(num_experts=4, top_k=2, hidden=256, intermediate=128, max_tokens_per_rank=16)

# One forward and backward pass on the CPU, as a trainer would do it.
TRAIN = """
import torch, warnings
import mega_moe
warnings.simplefilter("ignore", mega_moe.FallbackWarning)
with mega_moe.MoEBuffer(None, num_experts=4, max_tokens_per_rank=16, top_k=2, hidden=64, intermediate=32,
                        dtype=torch.float32, device="cpu") as buffer:
    layer = mega_moe.nn.MegaMoE(64, 32, 4, buffer=buffer)
    x = torch.randn(8, 64, requires_grad=True)
    ids = torch.arange(16).reshape(8, 2) % 4
    layer(x, ids, torch.full((8, 2), 0.5)).square().mean().backward()
assert x.grad is not None and torch.isfinite(x.grad).all()
print("trained on", buffer.backend)
"""


def python(code: str, *words: str, path: Path | str = PACKAGE.parent, **environment: str) -> Any:
    """A fresh process with the package from `path`; an empty value takes a variable away."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MEGA_MOE_", "CUDA_"))}
    inherited |= {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={k: v for k, v in inherited.items() if v},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


DOCTOR = "from mega_moe.cli import main; assert main(['doctor']) == 0\n"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Folder with a copy of the installed package that a drill may break."""
    if not (PACKAGE / "_lib/mega_moe_ops.so").is_file():
        pytest.skip("needs the package installed from a wheel")
    shutil.copytree(PACKAGE, tmp_path / "mega_moe", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def gpu(**changes: Any) -> RankFacts:
    known: dict[str, Any] = dict(
        device="cuda:0",
        device_name="NVIDIA H200",
        compute_capability=(9, 0),
        num_sms=132,
        torch_version="2.13.0",
        torch_cuda="13.0",
        driver_cuda=(13, 0),
        library_loaded=True,
        library_cuda="13.0",
        library_architectures=("90a",),
    )
    return RankFacts(**{**known, **changes})


def told(*facts: RankFacts, **changes: Any) -> list[str]:
    known: dict[str, Any] = dict(distributions=(), package=PACKAGE, record=RECORD)
    return advice(facts, Installation(**{**known, **changes}))


def test_nothing_amiss_nothing_said() -> None:
    assert told(gpu()) == []


def test_torch_too_old() -> None:
    done = python(f"import torch; torch.__version__ = '2.9.1+cu128'\n{DOCTOR}")
    want = "advice: torch is 2.9.1+cu128, the library needs torch >= 2.10: pip install --upgrade torch"
    assert want in done.stdout.splitlines(), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a torch says that sees no GPU")
def test_torch_without_cuda() -> None:
    with pytest.raises(ValueError, match=r"device: got cuda, but this torch \(.*\) sees no GPU"):
        mega_moe.MoEBuffer(None, **LAYER, device="cuda")
    cpu = gpu(device="cpu", compute_capability=None, torch_cuda=None, torch_version="2.13.0+cpu")
    (line,) = told(cpu)
    assert line == (
        "there is an NVIDIA driver that serves CUDA 13.0, but this torch (2.13.0+cpu) is built without CUDA: "
        "install a CUDA build of torch"
    )


def test_no_driver() -> None:
    cpu = gpu(device="cpu", compute_capability=None, driver_cuda=None)
    assert told(cpu) == [
        "torch is built with CUDA but sees no GPU and no NVIDIA driver: its CUDA 13.0 needs driver 580 or newer"
    ]


def test_driver_too_old() -> None:
    """torch itself then sees no GPU, so the device is the CPU."""
    unseen, torch_line, wheel_line = told(gpu(device="cpu", compute_capability=None, driver_cuda=(12, 2)))
    assert unseen == "torch is built with CUDA but sees no GPU: check the driver and CUDA_VISIBLE_DEVICES"
    assert torch_line == (
        "the driver serves CUDA 12.2, torch is built with CUDA 13.0: update the driver to 580 or newer, "
        "or install a torch for CUDA 12"
    )
    assert wheel_line == (
        "the driver serves CUDA 12.2, this mega-moe wheel is built with CUDA 13.0: update the driver to 580 or newer, "
        "or install its +cu129 wheel"
    )
    # torch for CUDA 12 sees the GPU; the wheel alone is too new.
    (line,) = told(gpu(torch_cuda="12.8", driver_cuda=(12, 8)))
    assert "this mega-moe wheel is built with CUDA 13.0" in line
    verdicts = decide(Request(**LAYER), [gpu(driver_cuda=(12, 8))])
    assert "the driver serves CUDA 12.8, this wheel is built with CUDA 13.0" in str(verdicts[0])
    # Minor versions do not matter.
    assert told(gpu(driver_cuda=(13, 0), library_cuda="13.2", torch_cuda="13.2")) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_architecture_not_in_the_wheel(capability: tuple[int, int]) -> None:
    number = "{}{}".format(*capability)
    other = gpu(compute_capability=capability, device_name="another GPU")
    (line,) = told(other)
    assert line == (
        f"cuda:0 is sm_{number} (another GPU), this wheel holds kernels for sm_90a: no wheel of this version "
        "holds any; backend='grouped' serves it, a newer version may hold some"
    )
    with pytest.raises(mega_moe.BackendRefusedError) as refused:
        choose(decide(Request(**LAYER), [other]), named="fused")
    want = f"the device is sm_{number} (another GPU), this wheel holds sm_90a: `mega-moe doctor` says what to install"
    assert want in str(refused.value)


def test_architecture_in_another_wheel() -> None:
    flavours = [{**FLAVOURS[0]}, {**FLAVOURS[1], "architectures": ["90a", "100a"]}]
    (line,) = told(
        gpu(compute_capability=(10, 0), device_name="B200", library_cuda="12.9"),
        record={**RECORD, "flavours": flavours},
    )
    assert line.endswith("this wheel holds kernels for sm_90a: install the +cu130 wheel")


def test_two_flavours_installed(copied: Path, tmp_path: Path) -> None:
    """As after `pip install --user` of one and an image's own of another: which one is imported is luck."""
    folders = []
    for label in ("cu129", "cu130"):
        folder = tmp_path / label
        info = folder / f"mega_moe-9.0.0+{label}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mega-moe\nVersion: 9.0.0+{label}\n")
        shutil.copytree(copied / "mega_moe", folder / "mega_moe")
        folders.append(str(folder))
    done = python(DOCTOR, path=os.pathsep.join(folders))
    (line,) = (line for line in done.stdout.splitlines() if "times: uninstall until one is left" in line)
    assert f"9.0.0+cu129 in {folders[0]}" in line
    assert f"9.0.0+cu130 in {folders[1]}" in line


def test_wheel_without_its_library(copied: Path) -> None:
    (copied / "mega_moe/_lib/mega_moe_ops.so").unlink()
    refused = (
        "from mega_moe._ops import library\n"
        "try: library.require()\nexcept Exception as error: print(type(error))\n"
    )
    done = python(DOCTOR + refused + TRAIN, path=copied)
    assert (
        "mega_moe_ops.so is missing: this is not an installed mega-moe wheel): install the mega-moe wheel"
        in done.stdout
    ), done.stderr
    # The backends of plain torch go on.
    assert done.stdout.splitlines()[-2:] == [
        "<class 'mega_moe._base.errors.LibraryError'>",
        "trained on grouped",
    ]


def test_a_build_without_kernels_says_so(copied: Path) -> None:
    (copied / "mega_moe/_lib/mega_moe_ops.so").unlink()
    (copied / "mega_moe/_lib/build.json").write_text('{"version": "0.1.0", "architectures": [], "code": {}}')
    done = python(DOCTOR + "main(['explain'])", path=copied)
    assert done.returncode == 0, done.stderr
    why = "this build holds no kernels, it was made with MEGA_MOE_BUILD_KERNELS=0"
    assert f"advice: {why}: a wheel, or a build with a CUDA compiler, holds them" in done.stdout.splitlines()
    assert f"fused: refused: the compiled library is not loaded: {why}" in done.stdout
    assert "chosen: grouped" in done.stdout


def test_glibc_too_old(copied: Path) -> None:
    """The same library, asking for a symbol version that no system has."""
    path = copied / "mega_moe/_lib/mega_moe_ops.so"
    content = path.read_bytes()
    newest = max({version for version in (b"GLIBC_2.34", b"GLIBC_2.32", b"GLIBC_2.17") if version in content})
    path.write_bytes(content.replace(newest, newest.replace(b"_2.", b"_9.")))
    done = python(DOCTOR + "from mega_moe._ops import library; print(library.status().reason)", path=copied)
    number = newest.decode().replace("GLIBC_2.", "9.")
    assert f"version `GLIBC_{number}' not found" in done.stdout, done.stderr
    assert f", the wheel needs {number} or newer" in done.stdout
    assert "; this system's glibc is " in done.stdout
    assert "the compiled library is there and cannot be used" in done.stdout


WATCH = """
import sys
seen = []
def watch(event, args):
    if event == "open" and (set(str(args[1] or "")) & set("wax+") or (args[2] or 0) & 3) and args[0] != "/dev/null":
        seen.append(("writes", str(args[0])))
    if event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        seen.append((event, str(args[0])))
sys.addaudithook(watch)
"""
REPORT = "\nprint(seen)"


def test_read_only_home_and_no_compiler(tmp_path: Path) -> None:
    """Nothing is written and nothing is started: neither a home, nor a temporary folder, nor a compiler is needed."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "home")  # below a file, so that not even root can make it
    done = python(
        f"{WATCH}import torch; seen.clear()\n{TRAIN}{REPORT}",
        HOME=nowhere,
        TMPDIR=nowhere,
        XDG_CACHE_HOME=nowhere,
        PATH=str(tmp_path),
        CC="",
        CXX="",
        CUDA_HOME="",
    )
    assert done.stdout.splitlines() == ["trained on grouped", "[]"], done.stderr


def test_the_watch_sees_what_is_written_and_started(tmp_path: Path) -> None:
    file, folder = str(tmp_path / "x"), str(tmp_path / "y")
    planted = f"open({file!r}, 'w').close(); import os; os.system('true'); os.mkdir({folder!r})"
    done = python(f"{WATCH}{planted}{REPORT}")
    assert "writes" in done.stdout
    assert "os.system" in done.stdout
    assert "os.mkdir" in done.stdout


def test_import_before_a_worker_starts(tmp_path: Path) -> None:
    """As in a data loader's workers: the parent has imported the package and loaded its library."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, sys\nimport mega_moe, torch\n"
        f"def work(how):\n    print(how, end=': ')\n    exec({TRAIN!r})\n    sys.stdout.flush()\n"
        "if __name__ == '__main__':\n"
        "    from mega_moe._ops import library\n    _ = mega_moe.moe, library.status()\n"
        "    assert not torch.cuda.is_initialized()\n    torch.set_num_threads(1)\n"
        "    for how in ('fork', 'spawn', 'forkserver'):\n"
        "        worker = multiprocessing.get_context(how).Process(target=work, args=(how,))\n"
        "        worker.start()\n        worker.join(60)\n        assert worker.exitcode == 0, how\n"
    )
    # A worker that is not forked imports the script again, so it must be a file that Python was started with.
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{how}: trained on grouped" for how in ("fork", "spawn", "forkserver")
    ]


def test_import_before_torch(copied: Path) -> None:
    """The order of imports does not matter; the library on its own could not even be opened."""
    done = python(
        "import mega_moe, torch; from mega_moe._ops import library; print(library.status().loaded)",
        path=copied,
    )
    assert done.stdout == "True\n", done.stderr
    path = copied / "mega_moe/_lib/mega_moe_ops.so"
    done = python(f"import ctypes; ctypes.CDLL({str(path)!r})")
    assert "libtorch.so: cannot open shared object file" in done.stderr


def test_no_torch_at_all(copied: Path) -> None:
    done = python("import sys; sys.modules['torch'] = None; import mega_moe; mega_moe.moe", path=copied)
    assert done.returncode == 1
    assert "torch" in done.stderr.splitlines()[-1]


def test_doctor_tells_where_the_wheel_comes_from(copied: Path) -> None:
    build, record = library.build_record(), library.wheel_record()
    lines = python(DOCTOR, path=copied).stdout.splitlines()
    assert f"  cuda: {build['cuda']}" in lines
    assert f"  architectures: {', '.join(build['architectures'])}" in lines
    assert f"  label: {record['label']}" in lines
    assert f"  commit: {record['commit']}" in lines
    assert mega_moe.__version__.endswith(f"+{record['label']}")
