"""What several tests of the gates need: small libraries and wheels, and a package index on this machine."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import wheel_file

ROOT = Path(__file__).resolve().parents[2]


def compile_cpp(source: str, out: Path, *options: str | Path) -> Path:
    """A shared library of `source`."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    code = out.with_suffix(".cpp")
    code.write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", out, code, *options], check=True)
    return out


def make_wheel(folder: Path, project: str, version: str, tags: str, *requires: str) -> Path:
    """A wheel with one module that says its version."""
    module = project.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.4", f"Name: {project}", f"Version: {version}", "Requires-Python: >=3.10"]
    lines += [f"Requires-Dist: {name}" for name in requires]
    path = folder / f"{module}-{version}-{tags}.whl"
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    wheel_file.write(path, {name: text.encode() for name, text in files.items()})
    return path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class names it so
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a server of `folder` on this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
