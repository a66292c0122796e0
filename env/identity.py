"""`env_id`: which environment is meant, as one number that only what decides can change.

It is a digest of the set that a lock resolves to for one Python minor version on one platform: names, versions, the
hashes that the lock allows, and the variant. It says what was asked for; whether that is what is installed is
`env.drift`'s question.

The same on every machine with the same Python minor version, variant and platform (`linux-x86_64`): the patch version
of Python, the kernel and the C library do not enter. Where a lock tells patch versions apart, everything that any
patch version would get enters, for the same reason. Comments, order and spacing of the lock do not enter; neither do
its other pins, for other platforms and Pythons.

What does enter although it may not matter here: a lock names hashes, not files, so a file that is added for another
platform to a version that is already locked changes the number once the lock takes it up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from env import drift
from env.errors import Exit, Failure, report

FORMAT = 1
"""Part of the digest; to be raised when its form changes."""


def env_id(lock: Path, *, variant: str, python: str, machine: str | None = None) -> str:
    """The identity of the environment that a lock describes, 64 hexadecimal digits.

    `python` is a version, of which the minor counts (`3.11.7` is `3.11`); `machine` as `platform.machine()` has it,
    this machine's own by default.

    Raises:
        Failure: the lock cannot be read or judged, or `python` is no version.
    """
    return identify(drift.read_lock(lock), variant=variant, python=python, machine=machine)


def identify(pins: Iterable[drift.Pin], *, variant: str, python: str, machine: str | None = None) -> str:
    """`env_id` of pins that have been read already."""
    match = re.match(r"^([0-9]+\.[0-9]+)(?:\.|$|(?=a|b|rc))", python)
    if match is None:
        raise Failure(Exit.USAGE, f"`{python}` is no version of Python, like 3.11")
    minor, machine = match[1], machine or os.uname().machine
    decides = {
        "format": FORMAT,
        "variant": variant,
        "python": minor,
        "platform": f"{sys.platform}-{machine}",
        "packages": sorted(_resolved(tuple(pins), minor, machine)),
    }
    return hashlib.sha256(json.dumps(decides, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def markers(full: str, machine: str) -> dict[str, str]:
    """What markers may ask about CPython on this system. The kernel's version is left out: it must not decide."""
    return {
        "implementation_name": "cpython",
        "implementation_version": full,
        "os_name": os.name,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": os.uname().sysname,
        "python_full_version": full,
        "python_version": ".".join(full.split(".")[:2]),
        "sys_platform": sys.platform,
    }


def _resolved(pins: Sequence[drift.Pin], minor: str, machine: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """Names, versions and hashes that any patch version of a minor would get."""
    told = {int(patch) for pin in pins for patch in re.findall(rf"\b{re.escape(minor)}\.([0-9]+)", pin.marker)}
    edges = {0, *told, *(patch + 1 for patch in told)}  # between two of these, no marker changes its answer
    return {
        (pin.name, pin.version, pin.hashes)
        for patch in edges
        for pin in drift.resolve(pins, markers(f"{minor}.{patch}", machine)).values()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m env id [--variant V] [--python 3.12] [--machine aarch64] [--lock FILE]`: print an environment's id."""
    parser = argparse.ArgumentParser(prog="id", description="Print the identity of a locked environment.")
    parser.add_argument("--variant", help="which set; the default one if left out")
    parser.add_argument("--python", default=".".join(map(str, sys.version_info[:2])), help="its Python, like 3.11")
    parser.add_argument("--machine", help="its platform's machine, like x86_64; this one if left out")
    parser.add_argument("--lock", type=Path, help="another lock than the variant's own")
    given = parser.parse_args(argv)
    try:
        from env.variants import load

        variant = load().variant(given.variant)
        lock = given.lock or variant.lock
        print(env_id(lock, variant=variant.name, python=given.python, machine=given.machine))
    except Failure as refused:
        return report(refused)
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(main())
