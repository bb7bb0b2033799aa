"""Every command that a person types: `nox -l` lists them, `nox -s NAME` runs one.

The sessions share two environments under .nox/, because torch takes half a minute and a gigabyte to install: `build`
holds what the wheel is built with, `use` holds the built wheel and what tests it. Delete .nox/ to start afresh.
"""

from __future__ import annotations

import os
import shutil
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
        self.env: dict[str, str | None] = {"PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        # pip comes last into a new environment: without it the making was interrupted.
        if not (self.home / "bin" / "pip").exists():
            session.run(sys.executable, "-m", "venv", "--clear", str(self.home), external=True)

    def run(self, program: str, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        inside = self.home / "bin" / program
        command = str(inside) if inside.exists() else program
        self.session.run(command, *map(str, arguments), external=True, env={**self.env, **(env or {})})

    def ask(self, *command: str) -> str:
        """What `python COMMAND` prints, its errors included, whether it succeeds or not."""
        answer = self.session.run(
            str(self.home / "bin" / "python"),
            *command,
            external=True,
            silent=True,
            success_codes=range(256),
            env=self.env,
        )
        return str(answer).strip()

    def install(self, *arguments: str | Path) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *arguments)


def cuda_compiler(build: Environment) -> str:
    """Path of an nvcc: the machine's, else the one whose packages ci/find_cuda.py names."""
    answer = build.ask("ci/find_cuda.py")
    if not Path(answer).is_file():
        build.install(*answer.rpartition("pip install ")[2].split())
        answer = build.ask("ci/find_cuda.py")
    if not Path(answer).is_file():
        build.session.error(answer)
    return answer


def build_environment(session: nox.Session) -> Environment:
    """The environment `build`: torch's headers, CMake and its helpers, and CUDACXX as the compiler to use."""
    build = Environment(session, "build")
    # One command for all: torch's pin decides before `torch>=` of the build requirements can ask for a newer one.
    build.install(*requirements("torch", "build"), *PROJECT["build-system"]["requires"])
    build.env["CUDACXX"] = cuda_compiler(build)
    return build


def build_wheel(build: Environment) -> Path:
    """The wheel of the present sources, alone in dist/. Ninja compiles what changed; nothing stale can be left over."""
    shutil.rmtree(DIST, ignore_errors=True)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", DIST)
    try:
        build.run("python", "-m", "pip", "wheel", *options, ROOT)
    except nox.command.CommandFailed:
        # CMake remembers what a broken configuration found, and would fail again on a machine that was mended.
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        raise
    (wheel,) = DIST.glob("*.whl")
    build.session.log(f"built {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def run_cpp_tests(build: Environment) -> None:
    """The tests under kernels/tests that need no device."""
    folder = ROOT / "build" / "tests"
    python = build.home / "bin" / "python"
    options = ("-G", "Ninja", "-DMEGA_MOE_TESTS=ON", f"-DPython_EXECUTABLE={python}")
    build.run("cmake", "-S", "kernels", "-B", folder, "--log-level=WARNING", *options)
    build.run("cmake", "--build", folder, "--target", "mega_moe_tests")
    build.run("ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error")


def installed(build: Environment, *groups: str, extra: str = "") -> tuple[Environment, Path]:
    """The environment `use` with dependency GROUPS, the pinned torch and the wheel of the present sources."""
    wheel = build_wheel(build)
    use = Environment(build.session, "use")
    use.install(f"{wheel}{extra}", *requirements("torch", *groups))
    # The version number alone would let pip keep an older build of it.
    use.install("--force-reinstall", "--no-deps", wheel)
    return use, wheel


def need_python_of_the_tools(session: nox.Session) -> None:
    """import-linter and torch-abi-audit have left 3.10, which the package itself still serves."""
    if sys.version_info < (3, 11):
        session.error(f"the checkers need Python 3.11 or newer, this is {sys.version.split()[0]}")


def gates(session: nox.Session, *groups: str) -> Environment:
    """The environment `use` with the tools of dependency GROUPS, the package itself left as it is."""
    need_python_of_the_tools(session)
    use = Environment(session, "use")
    use.install(*requirements(*groups))
    return use


def run_lint(use: Environment) -> None:
    use.run("ruff", "check", ".")
    use.run("ruff", "format", "--check", ".")
    sources = [
        path for kind in ("h", "cuh", "cpp", "cu") for path in sorted((ROOT / "kernels").rglob(f"*.{kind}"))
    ]
    use.run("clang-format", "--dry-run", "--Werror", *sources)
    use.run("python", "ci/check_tree.py")


def run_layers(use: Environment) -> None:
    use.run("python", "ci/check_imports.py")
    use.run("python", "ci/check_layers.py")


def run_docs(use: Environment) -> None:
    use.run("python", "ci/check_docs.py")
    use.run("python", "python/benchmarks/report.py", "--check")


@nox.session
def demo(session: nox.Session) -> None:
    """Build and install the wheel, then train the example language model (minutes on two cores). Takes its flags."""
    use, _ = installed(build_environment(session), extra="[demo]")
    use.run("mega-moe", "train", *session.posargs, env=SHARED_CORES)


@nox.session
def tests(session: nox.Session) -> None:
    """Every gate, then the CPU tests on the installed wheel. Takes pytest's arguments."""
    need_python_of_the_tools(session)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        session.error(
            f"torch.compile needs Python.h, not found in {headers}: install python3-dev or its like"
        )
    build = build_environment(session)
    # The group `build` too: some gates configure the C++ sources themselves.
    tools = ("test", "build", "lint", "types", "layers", "check-wheel", "trainers")
    use, wheel = installed(build, *tools, extra="[demo]")
    use.install("--no-deps", *requirements("torchtitan"))
    run_lint(use)
    use.run("mypy")
    run_layers(use)
    run_docs(use)
    use.run("python", "ci/check_wheel.py", wheel)
    run_cpp_tests(build)
    promised = {
        "MEGA_MOE_REQUIRE_INSTALLED": "1",
        "MEGA_MOE_REQUIRE_TRAINERS": "1",
        "CUDACXX": str(build.env["CUDACXX"]),
    }
    use.run("pytest", *session.posargs, env={**promised, **SHARED_CORES})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, clang-format, file lengths and left-over markers."""
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
    """Every path, command, name and variable that the documents cite exists; the figures are those of the results."""
    run_docs(gates(session, "torch"))


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel into dist/."""
    build_wheel(build_environment(session))


@nox.session
def check_wheel(session: nox.Session) -> None:
    """Build the wheel and judge it: tag, needed libraries, symbols, stable ABI, architectures, size."""
    built = build_wheel(build_environment(session))
    gates(session, "check-wheel").run("python", "ci/check_wheel.py", built)


@nox.session
def tests_gpu(session: nox.Session) -> None:
    """Build the wheel and run the tests that need one CUDA device, on the torch that is installed there."""
    session.run(
        "bash", "ci/test_wheel.sh", "gpu", str(build_wheel(build_environment(session))), external=True
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Time every backend beside this machine's ceilings. Takes the flags of `mega-moe bench`."""
    use, _ = installed(build_environment(session))
    use.run("mega-moe", "bench", *session.posargs)
