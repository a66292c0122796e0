"""The variant's environment: where its interpreter is, and whether it still holds what the lock says."""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from env.doctor.facts.probing import run
from env.errors import Failure
from env.variants import Variant

ASK = "import json, platform, sysconfig; print(json.dumps([platform.python_version(), sysconfig.get_path('include')]))"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An environment made from a lock, or its absence."""

    python: str | None = None
    """Its interpreter; None if the environment has not been made."""

    version: str | None = None
    """That interpreter's version; None if it does not run."""

    include: str | None = None
    """Where that interpreter says that Python.h is."""

    compared: bool = False
    """Whether it was compared with the lock, file hashes included."""

    drift: str | None = None
    """The sentence that names the drift; None if there is none."""

    packages: tuple[str, ...] = ()
    """What drifted, a line each."""

    mend: str | None = None
    """The command that mends it."""


def find(variant: Variant) -> Environment:
    """The variant's environment; its interpreter is asked, its packages are left alone."""
    module = importlib.import_module("env.environment")
    python: Path = module.python_of(variant.name)
    if not python.exists():
        return Environment()
    version, include = _ask(python)
    return Environment(python=str(python), version=version, include=include)


def compare(variant: Variant, python: Path) -> Failure | None:
    """The gate that every launch passes, here with the hash of every file; the refusal, or None without drift."""
    drift, bootstrap = importlib.import_module("env.drift"), importlib.import_module("env.bootstrap")
    drifts = drift.compare(python, variant.lock, hashes=True, environ=bootstrap.environment(os.environ))
    failure: Failure | None = drift.failure(drifts, variant.name) if drifts else None
    return failure


def include_of(found: Environment | None) -> Path:
    """The folder of Python.h for the interpreter that will compile: the environment's, else this one's."""
    if found is not None and found.include is not None:
        return Path(found.include)
    return Path(sysconfig.get_path("include"))


def _ask(python: Path) -> tuple[str | None, str | None]:
    # -I and -S: a broken site-packages must not stop the interpreter from saying who it is.
    answer = run([str(python), "-I", "-S", "-c", ASK], seconds=20)
    if answer is None or answer.code != 0:
        return None, None
    try:
        version, include = json.loads(answer.output)
    except ValueError:
        return None, None
    return version, include
