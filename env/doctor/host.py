"""A host as facts: gathered by looking, or read back from what was recorded on another host."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from env.cache import pins
from env.doctor.facts import compilers, container, environment, folders, machine, nvidia
from env.doctor.facts.probing import together
from env.errors import Failure
from env.variants import ROOT, Variant

FIRST_SECONDS = 30.0
"""For what the rest depends on: the user database (which may be a directory server), the environment's interpreter."""

FOLDER_SECONDS = 15.0
"""For one folder: a local disk answers at once, a network file system whose server is gone never does."""

ALL_SECONDS = 300.0
"""For everything: hashing an environment takes 4 s from a warm disk, minutes from a cold network file system. Each
command that is run has a shorter limit of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Everything that is judged. A group that could not be had is None, and `trouble` says why."""

    system: machine.System | None = None
    nvidia: nvidia.Nvidia | None = None
    containers: container.Containers | None = None
    compilers: compilers.Compilers | None = None
    environment: environment.Environment | None = None
    user: machine.User | None = None
    folders: tuple[folders.Folder, ...] = ()
    memory: machine.Memory | None = None
    processors: machine.Processors | None = None
    limits: machine.Limits | None = None
    clock: machine.Clock | None = None
    trouble: dict[str, str] = field(default_factory=dict)
    """For a group that is missing, why."""
    origin: str | None = None
    """For recorded hosts: what this is, and which of it was read off a real machine."""

    def why(self, group: str) -> tuple[str, ...]:
        """The reason why a group is missing, as a finding's details."""
        return (self.trouble[group],) if group in self.trouble else ()


def gather(
    variant: Variant, *, project: Path = ROOT, here: Path | None = None, runs: Path | None = None, hashes: bool = True
) -> Host:
    """Look at this host; takes as long as its slowest fact.

    That is the hashing of the environment, where there is one; without `hashes` the environment is not compared at all.
    """
    environ = dict(os.environ)
    first, trouble = together(
        {
            "user": lambda: machine.user(environ),
            "mounts": folders.read_mounts,
            "environment": lambda: environment.find(variant),
        },
        seconds=FIRST_SECONDS,
    )
    user, mounts, found = first.get("user"), first.get("mounts", ()), first.get("environment")
    home = Path(user.home) if user is not None and user.home is not None else None
    places = folders.places(
        environ, project=project, here=here or project, home=home, uid=user.uid if user else os.getuid(), runs=runs
    )
    rest, more = together(
        {
            "system": machine.system,
            "nvidia": lambda: nvidia.look(environ=environ),
            "containers": lambda: container.look(environ=environ),
            # with the variables that a launch leaves: it takes `CXX` away where there is a g++
            "compilers": lambda: compilers.look(environment.include_of(found), pins.pinned(environ)[0]),
            "drift": lambda: _gate(variant, found) if hashes else found,
            "folders": lambda: look_at_folders(places, mounts),
            "memory": lambda: machine.memory(mounts=mounts),
            "processors": lambda: machine.processors(mounts=mounts),
            "limits": lambda: machine.limits(mounts=mounts),
            "clock": lambda: machine.clock(project),
        },
        seconds=ALL_SECONDS,
    )
    found = rest.pop("drift", found)
    return Host(**rest, user=user, environment=found, trouble={**trouble, **more})


def look_at_folders(
    places: tuple[folders.Folder, ...], mounts: tuple[folders.Mount, ...], seconds: float = FOLDER_SECONDS
) -> tuple[folders.Folder, ...]:
    """Look at all folders at once; one that does not answer in time keeps its path and says so."""
    seen, _ = together(
        {folder.role: lambda folder=folder: folders.look(folder, mounts) for folder in places},  # type: ignore[misc]
        seconds=seconds,
    )
    return tuple(seen.get(folder.role) or folders.unanswered(folder, mounts, seconds) for folder in places)


def _gate(variant: Variant, found: environment.Environment | None) -> environment.Environment | None:
    if found is None or found.python is None:
        return found
    refusal: Failure | None = environment.compare(variant, Path(found.python))
    if refusal is None:
        return dataclasses.replace(found, compared=True)
    return dataclasses.replace(found, compared=True, drift=refusal.message, packages=refusal.details, mend=refusal.hint)


def encode(host: Host) -> dict[str, Any]:
    """The facts as JSON has them; what is not known is left out, so that a recorded host shows what it holds."""
    facts: dict[str, Any] = _bare(dataclasses.asdict(host))
    return facts


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if item is not None and item != {}}
    return [_bare(item) for item in value] if isinstance(value, tuple | list) else value


def decode(facts: Any) -> Host:
    """A recorded host; raises ValueError naming the place of what no host has."""
    host = _decode(Host, facts, "host")
    assert isinstance(host, Host)
    return host


def _decode(kind: Any, value: Any, place: str) -> Any:
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _decode(arguments[0], value, place)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {str(key): _decode(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        for key in value:
            if key not in hints:
                raise ValueError(f"{place}.{key}: unknown; known there: {', '.join(hints)}")
        try:
            return kind(**{key: _decode(hints[key], item, f"{place}.{key}") for key, item in value.items()})
        except TypeError as error:  # a field without a default is missing
            raise ValueError(f"{place}: {error}") from None
    fits = isinstance(value, kind) if isinstance(kind, type) else False
    if kind is float and isinstance(value, int):
        fits = True
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place}: {value!r} is not what stands there")
    return value
