"""The only place that reads the package's environment variables; each is read when it is asked for, never at import."""

from __future__ import annotations

import os

VARIABLES: dict[str, str] = {
    "MEGA_MOE_BACKEND": "backend that every buffer built with backend='auto' must use (a refusal raises)",
    "MEGA_MOE_STRICT": "1: raise instead of falling back when the fused backend is refused",
    "MEGA_MOE_DEBUG": "1: report a bad expert id in the call that holds it; costs a host synchronization",
    "MEGA_MOE_BUILD_KERNELS": "builds only; 0: compile nothing, the package then has the plain backends alone",
    "MEGA_MOE_NIGHTLY": "builds only; YYYYMMDD: the wheel is of the version that comes, with .dev and this date",
    "MEGA_MOE_REQUIRE_GPU": "tests only; 1: a GPU test that cannot run fails instead of being skipped",
    "MEGA_MOE_REQUIRE_INSTALLED": "tests only; 1: the tests refuse a package that is not installed from a wheel",
    "MEGA_MOE_REQUIRE_TRAINERS": "tests only; 1: a test of a trainer's own classes fails where that is not installed",
    "MEGA_MOE_SOAK_S": "tests only; seconds of the soak of random small calls on a GPU, 60 unless set, at most 240",
}


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: got {value!r}, want 0 or 1")
    return value == "1"


def given() -> dict[str, str]:
    """The package's variables that are set, with their values."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def backend() -> str | None:
    """The backend named by MEGA_MOE_BACKEND, or None. The name is checked where it is used."""
    return os.environ.get("MEGA_MOE_BACKEND") or None


def strict() -> bool:
    return _flag("MEGA_MOE_STRICT")


def debug() -> bool:
    return _flag("MEGA_MOE_DEBUG")
