"""Whether this is a container, and whether containers started here would be given the GPUs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from env.doctor.facts.probing import read, run

ENGINES = ("docker", "podman")
TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class Containers:
    """Containers, seen from inside and from outside."""

    inside: str | None = None
    """The kind of container that this is; None on a host of its own."""

    engine: str | None = None
    """The container engine's command on PATH."""

    toolkit: str | None = None
    """Path of a program of the NVIDIA container toolkit."""

    runtimes: tuple[str, ...] | None = None
    """Runtimes that the engine's daemon knows; None if it does not answer."""

    specifications: tuple[str, ...] = ()
    """CDI files that describe NVIDIA devices: with them an engine needs no runtime of its own."""


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Containers:
    """Look for signs of a container, an engine and the toolkit."""
    path = environ.get("PATH")
    engine = next((name for name in ENGINES if shutil.which(name, path=path)), None)
    return Containers(
        inside=_inside(root, environ),
        engine=engine,
        toolkit=next((found for name in TOOLKIT if (found := shutil.which(name, path=path))), None),
        runtimes=_runtimes(environ) if engine == "docker" else None,
        specifications=tuple(
            str(file) for folder in ("etc/cdi", "var/run/cdi") for file in sorted((root / folder).glob("*nvidia*"))
        ),
    )


def _inside(root: Path, environ: Mapping[str, str]) -> str | None:
    """Each engine leaves its own mark; Kubernetes' is the most telling, since the engine below it leaves one too."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ:
        return "apptainer"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if environ.get("container"):
        return environ["container"]
    # Only root may read it: an LXC container's first process, and systemd-nspawn's, are told there what they are in.
    first = read(root / "proc/1/environ") or ""
    marks = [entry.partition("=")[2] for entry in first.split("\0") if entry.startswith("container=")]
    return marks[0] if marks and marks[0] else None


def _runtimes(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    answer = run(["docker", "info", "--format", "{{json .Runtimes}}"], seconds=5, environ=environ)
    if answer is None or answer.code != 0:
        return None
    try:
        table = json.loads(answer.output)
    except ValueError:
        return None
    return tuple(sorted(table)) if isinstance(table, dict) else None
