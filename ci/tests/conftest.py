"""The built wheel, for the tests that judge or change it."""

from __future__ import annotations

from pathlib import Path

import pytest

DIST = Path(__file__).resolve().parents[2] / "dist"


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel that `nox -s wheel` builds; without it the test is skipped."""
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        pytest.skip(f"dist/ holds {len(wheels)} wheels, this needs the one that `nox -s wheel` builds")
    return wheels[0]
