"""A package index on this machine: made-up wheels, and a server that answers as an index does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import wheel_file

JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def made_up_wheel(folder: Path, project: str, version: str, tags: str, *requires: str) -> Path:
    """A wheel with one module that says its version."""
    module = project.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = ["Metadata-Version: 2.4", f"Name: {project}", f"Version: {version}", "Requires-Python: >=3.10"]
    lines += [f"Requires-Dist: {name}" for name in requires]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-{tags}.whl"
    wheel_file.write(
        path,
        {
            f"{module}/__init__.py": f"__version__ = {version!r}\n".encode(),
            f"{info}/METADATA": ("\n".join(lines) + "\n").encode(),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n".encode(),
        },
    )
    return path


class Index(SimpleHTTPRequestHandler):
    """Serves files; a folder's index.json to those who ask for the JSON form where `as_json` says so."""

    asked: list[str]
    as_json: bool

    def __init__(self, *arguments: object, asked: list[str], as_json: bool, **options: object) -> None:
        self.asked, self.as_json = asked, as_json
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        folder = Path(self.translate_path(self.path))
        self.asked.append(self.path)
        if self.as_json and JSON_TYPE in self.headers.get("Accept", "") and (folder / "index.json").is_file():
            body = (folder / "index.json").read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", JSON_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class names it so
        pass


@contextmanager
def served(folder: Path, as_json: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Address of a server of `folder` on this machine alone, and the paths that it was asked for."""
    asked: list[str] = []
    handler = partial(Index, directory=str(folder), asked=asked, as_json=as_json)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
