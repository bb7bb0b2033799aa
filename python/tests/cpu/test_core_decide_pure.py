"""decide.py judges without torch, so that a machine without a GPU, or without torch, can ask it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from mega_moe._backends.choice import decide as module

PURE = """
import importlib.abc, sys, types

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Refuse())
# The package's own __init__ offers the layer and so needs torch; decide lives below it.
package = types.ModuleType("mega_moe")
package.__path__ = [{folder!r}]
sys.modules["mega_moe"] = package
from mega_moe._backends.choice.decide import choose, decide
from mega_moe._backends.choice.request import Request
fact = types.SimpleNamespace(
    host="a", machine="b", device="cpu", device_type="cpu", device_uuid=None, peer_access=(), group_backend=None,
    library_loaded=False, library_reason="none", variants=(), compute_capability=None,
)
print(choose(decide(Request(8, 64, 2, 512, 256), [fact])).backend)
{extra}
"""


def pure(*blocked: str, extra: str = "") -> subprocess.CompletedProcess[str]:
    folder = str(Path(module.__file__).parents[2])
    code = textwrap.dedent(PURE).format(blocked=set(blocked), folder=folder, extra=extra)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_decide_needs_no_torch() -> None:
    ended = pure("torch", "numpy")
    assert (ended.returncode, ended.stdout) == (0, "grouped\n"), ended.stderr


def test_the_purity_check_can_fail() -> None:
    ended = pure("torch", "numpy", extra="from mega_moe._backends.choice import facts")
    assert ended.returncode != 0
    assert "torch is blocked" in ended.stderr
