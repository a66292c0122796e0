"""A container engine and a registry of the tests' own: real dockerd and docker-registry, never the user's.

Everything that an engine keeps lies in one folder, which is gone when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

REQUIRED = "DFLASH_IMAGE_TESTS"
"""Set to `required`, it makes a missing engine a failure: CI must not pass by skipping."""

PROGRAMS = ("dockerd", "containerd", "runc", "docker-registry")
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A dockerd that belongs to the tests."""

    folder: Path
    """Where all of its data lies."""

    environ: Mapping[str, str] = field(repr=False)
    """What makes the docker command talk to it, and to nothing else."""

    @property
    def host(self) -> str:
        """Its address, as DOCKER_HOST has it."""
        return self.environ["DOCKER_HOST"]

    def docker(
        self, *arguments: str | Path, check: bool = True, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the docker command; its output as text. With `check`, its failure fails the test, with its words."""
        words = ["docker", *map(str, arguments)]
        settings = {**self.environ, **(environ or {})}
        done = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done


def missing() -> str:
    """Why no engine can be run here, as one clause; empty when one can."""
    if os.geteuid() != 0:
        return "an engine of one's own needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(lacking)} not installed (`.ci/engine install`)" if lacking else ""


@contextlib.contextmanager
def engine(folder: Path | None = None) -> Iterator[Engine]:
    """Run a dockerd with an empty data root while the block runs; afterwards nothing of it is left."""
    # a short path: a socket's is limited to 107 bytes
    home = Path(tempfile.mkdtemp(prefix="dflash-engine-", dir=folder))
    (home / "owner").write_text(str(os.getpid()))  # `.ci/engine clean` leaves what is in use alone
    environ = _environ(home)
    settings = {"features": {"containerd-snapshotter": True}}
    (home / "daemon.json").write_text(json.dumps(settings))
    command = [
        "dockerd",
        f"--config-file={home}/daemon.json",
        f"--data-root={home}/data",
        f"--exec-root={home}/exec",
        f"--pidfile={home}/pid",
        f"--host=unix://{home}/sock",
        # no bridge and no packet filter: builds use the host's network, containers none
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        "--ip-masq=false",
    ]
    log = home / "log"
    with log.open("wb") as said:
        daemon = subprocess.Popen(command, env=environ, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    made = Engine(folder=home, environ=environ)
    try:
        _wait(lambda: made.docker("info", check=False).returncode == 0, daemon, log)
        yield made
    finally:
        _stop(daemon)
        _remove(home)


@contextlib.contextmanager
def registry(folder: Path | None = None) -> Iterator[str]:
    """Run an empty registry on a free port of the loopback device while the block runs; yields `127.0.0.1:PORT`."""
    home = Path(tempfile.mkdtemp(prefix="dflash-registry-", dir=folder))
    (home / "owner").write_text(str(os.getpid()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": f"{home}/data"}, "delete": {"enabled": True}},
        "http": {"addr": address},
    }
    (home / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    log = home / "log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            ["docker-registry", "serve", f"{home}/config.yml"],
            env=_environ(home),
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
        )
    (home / "pid").write_text(str(server.pid))
    try:
        _wait(lambda: _answers(f"http://{address}/v2/"), server, log)
        yield address
    finally:
        _stop(server)
        shutil.rmtree(home)


def _environ(home: Path) -> dict[str, str]:
    """The environment of everything that talks to this engine: no context, login or proxy of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "BUILDX_"))}
    (home / "config").mkdir()
    (home / "tmp").mkdir()
    return kept | {
        "DOCKER_HOST": f"unix://{home}/sock",
        "DOCKER_CONFIG": f"{home}/config",
        "DOCKER_TMPDIR": f"{home}/tmp",
        # the distribution's programs before any other of the same name, and those of the system besides
        "PATH": f"/usr/bin:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost"])),
    }


def _answers(address: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            text = log.read_text(errors="replace").splitlines()
            raise RuntimeError("\n".join(["it does not start; its last words:", *text[-20:]]))
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _remove(home: Path) -> None:
    """Delete an engine's data; what a killed engine left mounted below it is unmounted first."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1].encode().decode("unicode_escape")
        if Path(place).is_relative_to(home):
            subprocess.run(["umount", "--lazy", place], check=False)
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """The engine that the image tests share."""
    _require()
    with engine() as made:
        yield made


@pytest.fixture(scope="session")
def empty_engine() -> Iterator[Engine]:
    """A second engine, with a data root of its own: the node that pulls what the first has built."""
    _require()
    with engine() as made:
        yield made


@pytest.fixture(scope="session")
def loopback_registry() -> Iterator[str]:
    """The registry that the image tests share, as `127.0.0.1:PORT`."""
    _require()
    with registry() as address:
        yield address


def _require() -> None:
    if missing():
        give_up(f"no container engine can be run here: {missing()}")


def give_up(reason: str) -> NoReturn:
    """Skip a test that this machine cannot run, with the reason; fail where CI says that it must be run."""
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and SIGTERM an interruption: whoever loses patience must not leave engines behind."""
    if "image" in config.option.markexpr:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    config.addinivalue_line("markers", "image: builds or runs images with a container engine of its own; minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out unless a marker expression speaks of them."""
    if "image" in config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("image")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
