"""A build that breaks or is stopped, seen through the real BuildKit, whose words `env.buildx` reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine import Engine
from toys import use

from env import base, buildx
from env.errors import Exit, Failure
from env.variants import ROOT

pytestmark = [pytest.mark.image, pytest.mark.timeout(300)]

BOTH = "from env import building, buildx; import sys\nwith building.terminable(): buildx.run(sys.argv[1:])"


@pytest.fixture(autouse=True)
def shell(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands talk to the tests' engine."""
    use(docker_engine, monkeypatch)


def command(folder: Path, step: str) -> list[str]:
    """A build of one step on the images' base."""
    (folder / "Dockerfile").write_text(f"FROM base\nRUN --network=none {step}\n")
    words = ["docker", "buildx", "build", "--progress=plain", "--provenance=false", "--output=type=cacheonly"]
    return [*words, f"--build-context=base={base.ensure().reference}", str(folder)]


def test_what_a_step_says_comes_out_with_its_own_exit_code(tmp_path: Path) -> None:
    step = "echo 'trying; 503 timed out'; echo 'error: there is no compiler' >&2; echo 'hint: install one' >&2; exit 5"
    with pytest.raises(Failure) as broken:
        buildx.run(command(tmp_path, step))
    failure = broken.value
    assert (failure.code, failure.message) == (Exit.HOST, "the build stopped: there is no compiler")
    assert failure.hint == "install one"
    with pytest.raises(Failure, match="a step of the build failed with exit code 99") as broken:
        buildx.run(command(tmp_path, "echo 403 forbidden; exit 99"))
    assert broken.value.details == ("403 forbidden",)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, Exit.TERMINATED)])
def test_a_signal_ends_a_build_and_what_its_step_runs(tmp_path: Path, number: signal.Signals, code: int) -> None:
    mark = f"86{os.getpid()}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", BOTH, *command(tmp_path, f"echo begun; sleep {mark}")]
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        patience = threading.Timer(120, process.kill)
        patience.start()
        lines = [next(line for line in process.stderr if line.endswith(" begun\n"))]
        process.send_signal(number)
        lines += process.stderr
        patience.cancel()
    assert process.returncode == code, "".join(lines)
    end = time.monotonic() + 30
    while running(mark) or running(str(tmp_path)):  # the step, or docker and buildx
        assert time.monotonic() < end
        time.sleep(0.1)


def running(mark: str) -> list[str]:
    """Processes that have it in their command line."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if mark.encode() in words:
            found.append(each.parent.name)
    return found
