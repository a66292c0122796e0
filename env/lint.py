"""What a lock must be for every Python and platform that it serves, markers evaluated.

uv could resolve a set that is consistent and still wrong for us: a second CUDA beside torch's, another torch than the
matrix's. And a lock can be merged or edited into what no resolver would write.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from env.drift import Pin
from env.variants import Matrix, Variant

CUDA = re.compile(r"^(nvidia|cuda)-")
"""Names of the packages that bring parts of CUDA."""

Requires = Mapping[str, Sequence[str]]
"""`Requires-Dist` of torch and of the packages that it delegates CUDA's pins to, as the index had it at lock time."""


def served(matrix: Matrix) -> Iterator[dict[str, str]]:
    """The marker values of each Python and platform that the locks serve."""
    for python in matrix.python:
        for machine in matrix.platforms:
            yield {
                "implementation_name": "cpython",
                "implementation_version": f"{python}.0",
                "os_name": "posix",
                "platform_machine": machine,
                "platform_python_implementation": "CPython",
                "platform_release": "",
                "platform_system": "Linux",
                "platform_version": "",
                "python_full_version": f"{python}.0",
                "python_version": python,
                "sys_platform": "linux",
                "extra": "",
            }


def lint_variant(pins: Sequence[Pin], requires: Requires, variant: Variant, matrix: Matrix) -> list[str]:
    """Everything wrong with a variant's lock, a sentence each with the Python and platform it is wrong for."""
    complaints = lint(pins, matrix)
    for markers in served(matrix):
        here = chosen(pins, markers)
        where = _where(markers)
        complaints += [f"{where}: {text}" for text in _torch(here, variant)]
        complaints += [f"{where}: {text}" for text in _required(here, requires, markers)]
        complaints += [f"{where}: {text}" for text in _cuda(here, requires, markers, variant)]
    return complaints


def lint(pins: Sequence[Pin], matrix: Matrix) -> list[str]:
    """What any lock must be: every file hashed, and no package twice where it is installed."""
    complaints = [f"{pin.name} {pin.version} has no sha256 hash" for pin in pins if not _hashed(pin)]
    for markers in served(matrix):
        versions: dict[str, list[str]] = {}
        for pin in pins:
            if _applies(pin, markers):
                versions.setdefault(pin.name, []).append(pin.version)
        complaints += [
            f"{_where(markers)}: {name} stands {len(found)} times: {', '.join(found)}"
            for name, found in versions.items()
            if len(found) > 1
        ]
    return complaints


def lint_together(pins: Sequence[Pin], others: Sequence[Pin], names: tuple[str, str], matrix: Matrix) -> list[str]:
    """Two locks that are installed together must agree on what both hold."""
    complaints = []
    for markers in served(matrix):
        mine, theirs = chosen(pins, markers), chosen(others, markers)
        complaints += [
            f"{_where(markers)}: {name} is {mine[name].version} in {names[0]} and {theirs[name].version} in {names[1]}"
            for name in mine.keys() & theirs.keys()
            if mine[name].version != theirs[name].version
        ]
    return sorted(complaints)


_marker = functools.cache(Marker)  # a lock has hundreds of lines and a dozen different markers


def _hashed(pin: Pin) -> bool:
    return bool(pin.hashes) and all(digest.startswith("sha256:") for digest in pin.hashes)


def _applies(pin: Pin, markers: Mapping[str, str]) -> bool:
    return not pin.marker or _marker(pin.marker).evaluate(dict(markers))


def chosen(pins: Sequence[Pin], markers: Mapping[str, str]) -> dict[str, Pin]:
    """The pins that one Python on one platform gets, by name."""
    return {pin.name: pin for pin in pins if _applies(pin, markers)}


def _where(markers: Mapping[str, str]) -> str:
    return f"Python {markers['python_version']} on {markers['platform_machine']}"


def _torch(here: Mapping[str, Pin], variant: Variant) -> Iterator[str]:
    if "torch" not in here:
        yield "torch is missing"
    elif here["torch"].version != variant.torch:
        yield f"torch is {here['torch'].version}; the matrix says {variant.torch} for {variant.name}"


def _wanted(requires: Requires, markers: Mapping[str, str]) -> dict[str, list[tuple[str, Requirement]]]:
    """What torch, and what it delegates to with the extras that it asks for, wants here: by name, who and what."""
    wanted: dict[str, list[tuple[str, Requirement]]] = {}
    asked: list[tuple[str, set[str]]] = [("torch", set())]
    while asked:
        who, extras = asked.pop()
        for text in requires.get(who, ()):
            need = Requirement(text)
            environments = [dict(markers) | {"extra": extra} for extra in extras or {""}]
            if need.marker is None or any(need.marker.evaluate(one) for one in environments):
                name = canonicalize_name(need.name)
                wanted.setdefault(name, []).append((who, need))
                asked.append((name, need.extras))
    return wanted


def _required(here: Mapping[str, Pin], requires: Requires, markers: Mapping[str, str]) -> Iterator[str]:
    """Triton and CUDA's libraries exactly as this torch requires them."""
    for name, needs in _wanted(requires, markers).items():
        for who, need in needs:
            if name not in here:
                yield f"{name} is missing; {who} requires {need.specifier or 'it'}"
            elif not need.specifier.contains(here[name].version, prereleases=True):
                yield f"{name} is {here[name].version}; {who} requires {need.specifier}"


def _cuda(here: Mapping[str, Pin], requires: Requires, markers: Mapping[str, str], variant: Variant) -> Iterator[str]:
    """No CUDA library but those that torch brings, and all of the variant's major.

    Majors are not read off versions: cuFFT 12.0 belongs to CUDA 13. They stand in names (`-cu13`), and torch's own
    requirements tie every other library to its CUDA.
    """
    wanted = _wanted(requires, markers)
    major = variant.cuda.partition(".")[0]
    brought = {name for name in wanted if CUDA.match(name)}
    while more := {
        name for name in here if CUDA.match(name) and name not in brought and brought.intersection(here[name].via)
    }:
        brought |= more
    for name in here:
        suffix = re.search(r"-cu([0-9]+)$", name)
        if suffix and suffix[1] != major:
            yield f"{name} is for CUDA {suffix[1]}; {variant.name} is CUDA {variant.cuda}"
        elif CUDA.match(name) and name not in brought:
            yield f"{name} {here[name].version} is a part of CUDA that torch does not ask for"
        elif name == "triton" and name not in wanted:
            yield "triton is here, which this torch does not ask for"
