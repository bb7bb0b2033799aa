"""Every command that a person types: `nox -l` lists them, `nox -s NAME` runs one.

The sessions share two environments under .nox/, because torch takes half a minute and a gigabyte to install: `build`
holds what the wheel is built with, `use` holds the built wheel and what tests it. Delete .nox/ to start afresh.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nox
import nox.command

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"  # the two shared environments below replace one per session

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
CPP_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")

# Threads that wait without spinning. Where something else runs on the same cores, spinning ones keep each other
# waiting: a training step took 17 s instead of 2 s on two cores with a load of 7.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


def requirements(*groups: str) -> tuple[str, ...]:
    """What the dependency GROUPS of pyproject.toml hold."""
    return nox.project.dependency_groups(PROJECT, *groups)


class Environment:
    """A shared virtual environment: `run` starts its programs first, `install` fills it with pip."""

    def __init__(self, session: nox.Session, name: str) -> None:
        self.session = session
        self.home = ROOT / ".nox" / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
        self.env = {"PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        # pip comes last into a new environment: without it the making was interrupted.
        if not (self.home / "bin" / "pip").exists():
            session.run(sys.executable, "-m", "venv", "--clear", str(self.home), external=True)

    def run(self, program: str, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        inside = self.home / "bin" / program
        command = str(inside) if inside.exists() else program
        self.session.run(command, *map(str, arguments), external=True, env={**self.env, **(env or {})})

    def ask(self, *command: str) -> str:
        """What `python COMMAND` prints, its errors included, whether it succeeds or not."""
        python, env = self.home / "bin" / "python", {**os.environ, **self.env}
        run = subprocess.run([python, *command], env=env, capture_output=True, text=True, check=False)
        return (run.stdout + run.stderr).strip()

    def install(self, *arguments: str | Path) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *arguments)


def cuda_compiler(build: Environment) -> str:
    """Path of an nvcc: the machine's, else the one whose packages ci/find_cuda.py names."""
    if not Path(build.ask("ci/find_cuda.py")).is_file():
        build.install(*build.ask("ci/find_cuda.py", "--packages").split())
    answer = build.ask("ci/find_cuda.py")
    if not Path(answer).is_file():
        build.session.error(answer)
    return answer


def build_environment(session: nox.Session) -> Environment:
    """The environment `build`: torch's headers, CMake, its helpers, CUDACXX, and a compiler cache if there is one."""
    build = Environment(session, "build")
    # One command for all: torch's pin decides before `torch>=` of the build requirements can ask for a newer one.
    build.install(*requirements("torch", "build", "repair"), *PROJECT["build-system"]["requires"])
    build.env["CUDACXX"] = cuda_compiler(build)
    if cache := shutil.which("ccache"):
        build.env |= {f"CMAKE_{language}_COMPILER_LAUNCHER": cache for language in ("CXX", "CUDA")}
    return build


def git(*words: str) -> str:
    """What git prints; empty where it fails."""
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""


def source_state() -> dict[str, str]:
    """Commit and time of the sources: from the environment where a container hides git, else from git."""
    changes = "+changes" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
    commit, date = git("rev-parse", "HEAD").strip(), git("log", "-1", "--format=%ct").strip()
    found = {"SOURCE_COMMIT": f"{commit}{changes}" if commit else "unknown", "SOURCE_DATE_EPOCH": date or "0"}
    return {name: os.environ.get(name) or value for name, value in found.items()}


def tracked_files() -> Path:
    """A copy of what git tracks, in build/source: a container gets no build product of this folder."""
    source = ROOT / "build" / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in filter(None, git("ls-files", "-z").split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    return source


def build_wheel(build: Environment) -> Path:
    """The wheel of the present sources, repaired and labelled, alone in dist/. Ninja compiles what changed."""
    raw, state = ROOT / "build" / "raw", source_state()
    for folder in (DIST, raw):
        shutil.rmtree(folder, ignore_errors=True)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", raw)
    try:
        build.run("python", "-m", "pip", "wheel", *options, ROOT)
    except nox.command.CommandFailed:
        # CMake remembers what a broken configuration found, and would fail again on a machine that was mended.
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        raise
    (made,) = raw.glob("*.whl")
    build.run("python", "ci/finish_wheel.py", made, DIST, "--commit", state["SOURCE_COMMIT"], env=state)
    (wheel,) = DIST.glob("*.whl")
    build.session.log(f"built {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def given_wheel(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The wheel that ARGUMENTS begin with, or None, and what follows it."""
    if arguments and arguments[0].endswith(".whl"):
        path = Path(arguments[0]).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such wheel")
        return path, arguments[1:]
    return None, arguments


def run_cpp_tests(build: Environment) -> None:
    """The tests under kernels/tests that need no device, linked from what was compiled for the wheel."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    folder = ROOT / "build" / f"py3-none-{platform}"  # build-dir of pyproject.toml
    build.run("cmake", "-S", "kernels", "-B", folder, "--log-level=WARNING", "-DMEGA_MOE_TESTS=ON")
    build.run("cmake", "--build", folder, "--target", "mega_moe_tests")
    build.run("ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error")


def installed(
    session: nox.Session, *groups: str, extra: str = "", wheel: Path | None = None
) -> tuple[Environment, Path]:
    """The environment `use` with dependency GROUPS, the pinned torch and the wheel, by default a new one."""
    wheel = wheel or build_wheel(build_environment(session))
    use = Environment(session, "use")
    use.install(f"{wheel}{extra}", *requirements("torch", *groups))
    # The version number alone would let pip keep an older build of it.
    use.install("--force-reinstall", "--no-deps", wheel)
    return use, wheel


def run_targets(build: Environment, use: Environment) -> None:
    """Compile checks of the flavours that are not built here; aarch64 only where there is a cross compiler."""
    folder = ROOT / "build" / "targets"
    options = ("-G", "Ninja", f"-DPython_EXECUTABLE={build.home / 'bin' / 'python'}")
    build.run("cmake", "-S", "kernels", "-B", folder, "--log-level=WARNING", *options)
    use.run("python", "ci/check_targets.py", "cu129", folder)
    if shutil.which("aarch64-linux-gnu-g++"):
        use.run("python", "ci/check_targets.py", "aarch64", folder)
    else:
        build.session.warn("no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu): aarch64 is not checked")


def gates(session: nox.Session, *groups: str) -> Environment:
    """The environment `use` with the tools of dependency GROUPS, the package itself left as it is."""
    # import-linter and torch-abi-audit have left 3.10, which the package itself still serves.
    if sys.version_info < (3, 11):
        session.error(f"the checkers need Python 3.11 or newer, this is {sys.version.split()[0]}")
    use = Environment(session, "use")
    use.install(*requirements(*groups))
    return use


def run_lint(use: Environment) -> None:
    use.run("ruff", "check", ".")
    use.run("ruff", "format", "--check", ".")
    sources = sorted(path for path in (ROOT / "kernels").rglob("*.*") if path.suffix in CPP_SUFFIXES)
    use.run("clang-format", "--dry-run", "--Werror", *sources)
    use.run("python", "ci/check_tree.py")
    # The rest is for what only CI machines and containers run: files that cannot be tried here.
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    use.run("actionlint", *workflows)
    use.run("zizmor", "--offline", "--quiet", "--no-progress", ".github/workflows")
    use.run("python", "ci/check_workflows.py")
    use.run("hadolint", *sorted((ROOT / "docker").glob("*.Dockerfile")))
    use.run("shellcheck", ".ci/run", *sorted((ROOT / "ci").glob("*.sh")))


def run_layers(use: Environment) -> None:
    use.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": str(ROOT / "python")})
    use.run("python", "ci/check_layers.py")


def run_docs(use: Environment) -> None:
    use.run("python", "ci/matrix.py", "check")
    use.run("python", "ci/measure_wheel.py", "--check")
    use.run("python", "ci/api_page.py", "--check")
    use.run("python", "ci/check_docs.py")
    use.run("python", "python/benchmarks/report.py", "--check")


@nox.session
def demo(session: nox.Session) -> None:
    """Build and install the wheel, then train the example language model (minutes on two cores). Takes its flags."""
    use, _ = installed(session, extra="[demo]")
    use.run("mega-moe", "train", *session.posargs, env=SHARED_CORES)


@nox.session
def tests(session: nox.Session) -> None:
    """lint, types, layers, docs, wheel, targets, then the CPU tests on the new wheel: [pytest's arguments]."""
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        session.error(
            f"torch.compile needs Python.h, not found in {headers}: install python3-dev or its like"
        )
    # The group `build` too: some gates configure the C++ sources themselves.
    tools = "build lint types layers docs check-wheel index targets trainers torchtitan"
    gates(session, "torch", "test", *tools.split())
    build = build_environment(session)
    use, wheel = installed(session, extra="[demo]", wheel=build_wheel(build))
    run_lint(use)
    use.run("mypy")
    run_layers(use)
    run_docs(use)
    use.run("python", "ci/check_wheel.py", wheel)
    run_cpp_tests(build)
    run_targets(build, use)
    promised = {"MEGA_MOE_REQUIRE_INSTALLED": "1", "MEGA_MOE_REQUIRE_TRAINERS": "1", **SHARED_CORES}
    # Two processes: half of the time of tests is that of processes which start. Each begins with half of the tests in
    # order, so that a file's tests share what they set up, and takes over from the other when it is done.
    parallel = ("-n", "2", "--dist", "worksteal")
    use.run("pytest", *parallel, *session.posargs, env={**promised, "CUDACXX": build.env["CUDACXX"]})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, clang-format, file lengths, left-over markers, and the files of CI and of the containers."""
    run_lint(gates(session, "lint"))


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over the package."""
    gates(session, "torch", "types").run("mypy", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Who may import or include whom, in Python and in C++."""
    run_layers(gates(session, "layers"))


@nox.session
def docs(session: nox.Session) -> None:
    """Every path, command, name and variable that the documents cite exists; the figures are those of the results.

    Builds the wheel, whose kernels say which figures are stale.
    """
    build_wheel(build_environment(session))
    run_docs(gates(session, "torch", "docs"))


@nox.session
def api(session: nox.Session) -> None:
    """Write docs/api.md anew from the docstrings."""
    gates(session, "docs").run("python", "ci/api_page.py")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel into dist/ and judge it: tag, needed libraries, symbols, stable ABI, architectures, size."""
    built = build_wheel(build_environment(session))
    gates(session, "check-wheel").run("python", "ci/check_wheel.py", built)


@nox.session
def sdist(session: nox.Session) -> None:
    """Build the source package into dist/, then from it, without a CUDA compiler, a package of the plain backends."""
    use = Environment(session, "sdist")
    use.install(*requirements("torch", "build", "test"))
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    use.run("python", "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (made,) = DIST.glob("*.tar.gz")
    without = {"MEGA_MOE_BUILD_KERNELS": "0", "CUDACXX": "/nonexistent"}
    use.run("python", "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", made, env=without)
    use.run("mega-moe", "doctor")
    use.run("pytest", "python/tests/cpu/test_core_semantics.py", env={"MEGA_MOE_REQUIRE_INSTALLED": "1"})


@nox.session
def targets(session: nox.Session) -> None:
    """Compile what this machine cannot build whole: with CUDA 12.9, and for aarch64."""
    run_targets(build_environment(session), gates(session, "targets"))


@nox.session
def wheel_manylinux(session: nox.Session) -> None:
    """Build, repair, judge and test a published wheel in its container: LABEL PLATFORM. Needs docker."""
    if len(session.posargs) != 2:
        session.error(f"got {session.posargs}, want LABEL PLATFORM, such as: -- cu130 x86_64")
    label, platform = session.posargs
    tools = Environment(session, "container")
    tools.install(*requirements("container"))
    wanted = json.loads(tools.ask("ci/matrix.py", "wheels", label, platform))
    if not wanted:
        session.error(f"ci/matrix.toml has no wheel {label} {platform}")
    engine = os.environ.get("CIBW_CONTAINER_ENGINE", "docker").partition(";")[0]
    made = f"localhost/mega-moe-wheel-{label}:{platform}"
    settings = {f"CIBW_MANYLINUX_{platform.upper()}_IMAGE": made, **source_state()}
    shutil.rmtree(DIST, ignore_errors=True)
    with session.chdir(tracked_files()):
        options = ("--build-arg", f"BASE={wanted[0]['image']}", "--file", "docker/wheel.Dockerfile")
        session.run(engine, "build", *options, "--tag", made, ".", external=True)
        building = ("--platform", "linux", "--archs", platform, "--output-dir", DIST)
        tools.run("cibuildwheel", *building, env=settings)


@nox.session
def reproducible(session: nox.Session) -> None:
    """Build the wheel twice from nothing; refuse it when the two differ in a byte."""
    kept = ROOT / "build" / "first"
    shutil.rmtree(kept, ignore_errors=True)
    build = build_environment(session)
    build.env["CCACHE_DISABLE"] = "1"
    for _ in range(2):
        # Where the wheel is built stays the same: compilers name some symbols after the path.
        for folder in (ROOT / "build").glob("py3-none-*"):
            shutil.rmtree(folder)
        wheel = build_wheel(build)
        if not kept.exists():
            shutil.copytree(DIST, kept)
    build.run("cmp", kept / wheel.name, wheel)


@nox.session
def tests_wheel(session: nox.Session) -> None:
    """The CPU tests on a wheel: [WHEEL] [pytest's arguments]. Without WHEEL builds one."""
    wheel, arguments = given_wheel(session.posargs)
    use, _ = installed(session, "test", extra="[demo]", wheel=wheel)
    use.run("pytest", "python/tests/cpu", *arguments, env={"MEGA_MOE_REQUIRE_INSTALLED": "1", **SHARED_CORES})


@nox.session
def tests_gpu(session: nox.Session) -> None:
    """The tests that need one CUDA device: [WHEEL] [--torch VERSION, else the machine's] [pytest's arguments]."""
    wheel, arguments = given_wheel(session.posargs)
    path = {}
    if arguments[:1] == ["--torch"]:
        use = Environment(session, f"gpu-torch{arguments[1]}")
        use.install(f"torch=={arguments[1]}.*", *requirements("test"))
        path, arguments = {"PATH": str(use.env["PATH"])}, arguments[2:]
    wheel = wheel or build_wheel(build_environment(session))
    session.run("bash", "ci/test_wheel.sh", "gpu", str(wheel), *arguments, external=True, env=path)


@nox.session
def bench(session: nox.Session) -> None:
    """Time every backend beside this machine's ceilings: [WHEEL] [flags of `mega-moe bench`]."""
    wheel, arguments = given_wheel(session.posargs)
    use, wheel = installed(session, wheel=wheel)
    use.run("mega-moe", "bench", "--wheel", wheel, *arguments)


@nox.session
def index(session: nox.Session) -> None:
    """Write the index for pip and uv into build/index: [FOLDER of wheels, dist/ by default] [--files-at ADDRESS]."""
    folder, *arguments = session.posargs or [str(DIST)]
    gates(session, "index").run(
        "python", "ci/release.py", "index", folder, ROOT / "build" / "index", *arguments
    )


@nox.session
def release_files(session: nox.Session) -> None:
    """Lay the files of a release out in build/release and judge them: FOLDER --tag vX.Y.Z [--commit COMMIT]."""
    if not session.posargs:
        session.error("got nothing, want the folder of the wheels and --tag vX.Y.Z")
    folder, *arguments = session.posargs
    release = ROOT / "build" / "release"
    use = gates(session, "check-wheel")
    use.run("python", "ci/release.py", "lay-out", folder, release)
    use.run("python", "ci/release.py", "check", release, *arguments)


@nox.session
def release_check(session: nox.Session) -> None:
    """Judge a release as a whole: [FOLDER of its wheels] --tag vX.Y.Z [--commit COMMIT]."""
    gates(session, "check-wheel").run("python", "ci/release.py", "check", *session.posargs)
