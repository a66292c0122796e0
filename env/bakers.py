"""Start the processes that bake: in training's pinned environment, with the stand-in driver where it is for a GPU."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from env.cache import pins
from env.errors import Exit, Failure
from env.variants import ROOT

STUB = Path(__file__).with_name("stub.cpp")

RUNNING: set[subprocess.Popen[str]] = set()
"""Children of this process: whoever is told to stop stops them all."""


@functools.cache
def compilers(python: Path) -> tuple[str, ...]:
    """Which torch, Triton and Python an environment has: half-done work of others is not taken up."""
    return tuple(map(str, describe(python, "builtins:dict", {})["compilers"]))


def describe(python: Path, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function of the training environment by name; its `value`, and which torch and Triton are there.

    Raises:
        Failure: what that function raises.
    """
    return _ask(python, {"describe": function, "arguments": dict(arguments)}, {}, lambda: None)


def run(
    python: Path, job: Mapping[str, Any], work: Path, environ: Mapping[str, str], tick: Callable[[], None]
) -> dict[str, Any]:
    """Do one job of baking in a fresh process that keeps what it needs in `work`; `tick` is called now and then.

    Raises:
        Failure: what the process said, or the end of its output when it broke.
    """
    extra = dict(environ)
    if job["gpu"] is not None:
        stub = str(stub_library(work.parent))
        extra |= {"DFLASH_STUB": stub, "LD_PRELOAD": stub, "CUDA_VISIBLE_DEVICES": ""}
        extra["LD_LIBRARY_PATH"] = f"{Path(stub).parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return _ask(python, {**job, "outputs": str(work / "outputs")}, extra, tick)


def stop_all() -> None:
    """Kill every child that still runs."""
    for process in list(RUNNING):
        process.kill()


def _ask(python: Path, job: Mapping[str, Any], extra: Mapping[str, str], tick: Callable[[], None]) -> dict[str, Any]:
    environ, _ = pins.pinned(os.environ, python)
    # kernels are compiled in the process itself: helpers would not believe in the card
    environ |= {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1", **extra}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [str(python), "-m", "env.baking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environ,
            cwd=ROOT,
            text=True,
        )
        RUNNING.add(process)
        try:
            answer = _converse(process, json.dumps(job), tick)
        finally:
            process.kill()
            process.wait()
            RUNNING.discard(process)
        said.seek(0)
        text = said.read()
    if process.returncode == 0:
        outcome: dict[str, Any] = json.loads(answer)
        return outcome
    raise _failure(process.returncode, text)


def _converse(process: subprocess.Popen[str], job: str, tick: Callable[[], None]) -> str:
    sent: str | None = job
    while True:
        try:
            return process.communicate(sent, timeout=10)[0]
        except subprocess.TimeoutExpired:
            sent = None
            tick()


def _failure(code: int, text: str) -> Failure:
    """What a child process said, as our own failure."""
    lines = text.strip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if begins and code in set(Exit):
        told = lines[begins[-1] :]
        hints = [line.removeprefix("hint: ") for line in told if line.startswith("hint: ")]
        details = [line.strip() for line in told[1:] if not line.startswith("hint: ")]
        return Failure(Exit(code), told[0].removeprefix("error: "), details=details, hint=hints[0] if hints else None)
    if "No space left on device" in text:
        return Failure(Exit.STORAGE, "the disk is full", hint="make room, then run the same command again: it goes on")
    if code < 0:
        return Failure(Exit.HOST, f"the baking process was killed by signal {-code}", details=lines[-6:])
    # torch ends its long tracebacks with advice; the error itself stands somewhere above
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt|Failed)\b", line)]
    return Failure(Exit.BUG, "the baking process broke", details=[*raised[-1:], *lines[-12:]])


def stub_library(folder: Path) -> Path:
    """The stand-in driver as a shared library, built once for each version of its source.

    Raises:
        Failure: Exit.HOST, without g++.
    """
    source = STUB.read_bytes()
    place = folder / f"stub-{hashlib.sha256(source).hexdigest()[:16]}" / "libcuda.so.1"
    if place.exists():
        return place
    compiler = shutil.which("g++")
    if compiler is None:
        raise Failure(
            Exit.HOST, "baking needs a C++ compiler: `g++` is not on the PATH", hint="`apt-get install g++` installs it"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
    options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    made = subprocess.run(
        [compiler, *options, "-o", str(fresh), str(STUB)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        raise Failure(Exit.HOST, "g++ cannot build the stand-in driver", details=made.stderr.strip().splitlines()[-5:])
    fresh.replace(place)
    return place
