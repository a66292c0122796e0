"""Images of a few hundred kilobytes that carry the labels of a real one: pushing and pulling need no more."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import os
import random
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engine import Engine

from env import identity, labels, push, remote, variants

CU130 = variants.load().variants["cu130"]
LABELS = labels.Labels(
    env_id=identity.env_id(CU130.lock, variant="cu130", python="3.11"),
    variant="cu130",
    python="3.11",
    driver=CU130.driver,
    caches={"h200": ("a" * 64,)},
    revision="c" * 40,
    base="sha256:" + "d" * 64,
)
STATUS = "Package: tar\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1.34\n"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A pair that cosign made."""

    private: Path
    public: Path


def use(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Let our own commands talk to that engine, as a user's shell would."""
    for name in [*os.environ]:
        if name.startswith(("DOCKER_", "BUILDX_", "COSIGN_")):
            patch.delenv(name)
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_TMPDIR", "PATH", "NO_PROXY"):
        patch.setenv(name, engine.environ[name])


def make_keys(folder: Path, name: str) -> Keys:
    """A new pair without a password."""
    remote.cosign("generate-key-pair", "--output-key-prefix", str(folder / name))
    return Keys(private=folder / f"{name}.key", public=folder / f"{name}.pub")


def build(
    engine: Engine,
    folder: Path,
    name: str,
    told: labels.Labels | Mapping[str, str] = LABELS,
    *,
    zeros: int = 0,
    noise: int = 150_000,
) -> str:
    """Build an image of three layers; one is noise of so many bytes, one as many zeros as told."""
    folder.mkdir(exist_ok=True)
    contents = {"noise": random.Random(0).randbytes(noise), "zeros": bytes(zeros)}
    for file, content in [*contents.items(), ("var/lib/dpkg/status", STATUS.encode())]:
        with tarfile.open(folder / f"{Path(file).name}.tar", "w") as archive:
            member = tarfile.TarInfo(file)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    stands = told.as_dict() if isinstance(told, labels.Labels) else told
    lines = ["FROM scratch", *(f"ADD {each}.tar /" for each in ("status", "noise", "zeros"))]
    lines += [f'LABEL {key}="{value}"' for key, value in stands.items()]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    engine.docker("buildx", "build", "--quiet", "--provenance=false", "--tag", name, folder)
    return name


def other(**changes: str | dict[str, str]) -> labels.Labels:
    """The labels of an image that is like the good one but for this."""
    return dataclasses.replace(LABELS, **changes)  # type: ignore[arg-type]


class Proxy(ThreadingHTTPServer):
    """A registry's double, which hands out the first half of each large blob and then waits until it may go on."""

    def __init__(self, behind: str, most: int) -> None:
        proxy = self
        self.halfway = threading.Event()
        """Set when half of a large blob has gone out."""
        self.on = threading.Event()
        """To be set by whoever has seen enough."""

        class Handler(BaseHTTPRequestHandler):
            default_request_version = "HTTP/1.0"  # so that a client that tries TLS first is told that this is HTTP

            def do_GET(self) -> None:
                connection = http.client.HTTPConnection(behind, timeout=60)
                connection.request(self.command, self.path, headers={**self.headers, "Host": behind})
                answer = connection.getresponse()
                body = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever asked may be gone by now
                    self.wfile.write(body[: len(body) // 2])
                    if len(body) > most and not proxy.on.is_set():
                        self.wfile.flush()
                        proxy.halfway.set()
                        proxy.on.wait(60)
                    self.wfile.write(body[len(body) // 2 :])
                connection.close()

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                """Keep the tests' output clean."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True

    @property
    def address(self) -> str:
        """As `127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def slow(behind: str, most: int) -> Iterator[Proxy]:
    """Run a registry's slow double while the block runs."""
    with Proxy(behind, most) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.on.set()
            proxy.shutdown()
            thread.join()


@contextlib.contextmanager
def closed() -> Iterator[str]:
    """Run a registry that lets nobody in while the block runs; yields `127.0.0.1:PORT`."""

    class Handler(BaseHTTPRequestHandler):
        default_request_version = "HTTP/1.0"

        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="nobody"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *arguments: Any) -> None:
            """Keep the tests' output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The pair that the tests' images are signed with."""
    return make_keys(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="session")
def signed(
    docker_engine: Engine, loopback_registry: str, keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[remote.Reference]:
    """A good image in the registry, signed and with its papers, by digest."""
    name = f"{loopback_registry}/good:1"
    build(docker_engine, tmp_path_factory.mktemp("good"), name)
    with pytest.MonkeyPatch.context() as patch:
        use(docker_engine, patch)
        assert push.main([name, "--key", str(keys.private)]) == 0
        yield remote.reference(name).pinned(remote.digest_of(remote.reference(name)))
