"""A package index of a few made-up wheels, served over HTTP from this process: real pip and uv, no network."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tinywheels import wheel


class Wheelhouse:
    """A folder laid out as a simple index (PEP 503)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        """Paths that were requested, so that a test can see that nothing was."""
        self.hold: threading.Event | None = None
        """While set to an unset event, downloads of wheels wait: for tests that kill an installation in the middle."""

    def add(self, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, str] | None = None) -> str:
        """Make a wheel and return its `sha256:...`."""
        contents = files or {f"{name.replace('-', '_')}/__init__.py": f"version = {version!r}\n"}
        made = wheel(self.folder / "simple" / name, name, version, contents, requires=requires)
        self.index()
        return "sha256:" + hashlib.sha256(made.read_bytes()).hexdigest()

    def index(self) -> None:
        """Write the pages that list each package's files with their hashes."""
        for place in (self.folder / "simple").iterdir():
            links = [
                f'<a href="{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a>'
                for wheel in sorted(place.glob("*.whl"))
            ]
            (place / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links))

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve the index while the block runs; yields its address."""
        house = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                house.asked.append(self.path)
                if house.hold is not None and self.path.endswith(".whl"):
                    house.hold.wait(60)
                super().do_GET()

            def end_headers(self) -> None:
                self.send_header("Cache-Control", "no-cache")  # a wheel that a test adds is to be seen at once
                super().end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Keep the tests' output clean."""

        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(self.folder))) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/simple"
            finally:
                server.shutdown()
                thread.join()


def only(address: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make an address the only index, by pip's configuration file alone; caches go into the folder."""
    for name in [*os.environ]:
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            patch.delenv(name)
    settings = folder / "pip.conf"
    settings.write_text(f"[global]\nindex-url = {address}\n")
    patch.setenv("PIP_CONFIG_FILE", str(settings))
    patch.setenv("PIP_CACHE_DIR", str(folder / "pip-cache"))
    patch.setenv("PIP_RETRIES", "1")  # with none at all, pip does not say that it was the network
    patch.setenv("UV_CACHE_DIR", str(folder / "uv-cache"))
    patch.setenv("UV_HTTP_RETRIES", "0")


def pin(name: str, version: str, digest: str) -> str:
    """A line of a lock."""
    return f"{name}=={version} \\\n    --hash={digest}\n"
