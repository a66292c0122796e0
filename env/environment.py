"""Make the environment of a variant from its lock: exact, hash-checked, whole or not at all.

An environment that exists is returned as it is. It is compared with its lock elsewhere (`env.drift`) and never
synchronised here: that would destroy the evidence of what changed it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from env import bootstrap, variants
from env.bootstrap import python_version
from env.building import HINTS, beside, exclusively, run, say
from env.errors import Exit, Failure
from env.variants import ROOT

HOME = ROOT / ".nox" / "environments"
LOCKS = "dflash-locks"
"""In an environment with extra locks: the digest of all that it was made from."""


def python_of(variant: str | None, extra: Sequence[str] = (), python: str | None = None) -> Path:
    """Where the Python of a variant's environment is, or will be.

    `extra` names further locks that the environment holds (`dev`), `python` another minor version than the one that
    runs this. Without a variant, the environment holds the extra locks only.
    """
    words = [*([variant] if variant else []), f"py{python or python_version()}", *extra]
    return HOME / "-".join(words) / "bin" / "python"


def ensure(variant: str | None, extra: Sequence[str] = (), python: str | None = None) -> Path:
    """Return the environment's Python, after making the environment where there is none.

    An environment with extra locks serves our own checks only, so it follows its locks unasked. Raises a `Failure` for
    a Python that the locks do not serve, too little room, no index, a file that is not the locked one.
    """
    place = python_of(variant, extra, python).parent.parent
    if not _is_there(place, _locks(variant, extra), follow=bool(extra)):
        if variant is not None:
            refuse_unmakable(variant, extra, python)
        with exclusively(place) as guard:
            if not _is_there(place, _locks(variant, extra), follow=bool(extra)):  # someone may have made it meanwhile
                _make(place, variant, extra, python, guard)
    return place / "bin" / "python"


def refuse_unmakable(variant: str, extra: Sequence[str] = (), python: str | None = None) -> None:
    """Refuse an environment that is not there and cannot be made where others are: an image holds that of one variant.

    Raises:
        Failure: Exit.USAGE, with what is there.
    """
    place = python_of(variant, extra, python).parent.parent
    made = (path.parent for path in HOME.glob("*/pyvenv.cfg"))
    held = sorted(path.name for path in made if not path.suffix.startswith((".building-", ".old-")))
    if place.name in held or not held or os.access(HOME, os.W_OK):
        return
    named = os.environ.get(variants.NAMED)
    hint = f"`--variant {held[0].partition('-')[0]}` is there"
    if named:  # as in every image
        hint = f"each variant has an image of its own: `nox -s image -- --variant {variant}` builds that one"
    raise Failure(
        Exit.USAGE,
        f"{HOME} holds {', '.join(held)}, not {place.name}, and cannot be written",
        details=[f"{variants.NAMED} names {named}"] if named == variant else (),
        hint=hint,
    )


def repair(variant: str, python: str | None = None) -> Path:
    """Make a variant's environment anew from its lock and put it in the old one's place."""
    place = python_of(variant, (), python).parent.parent
    with exclusively(place) as guard:
        _make(place, variant, (), python, guard)
    return place / "bin" / "python"


def _locks(variant: str | None, extra: Sequence[str]) -> list[Path]:
    names = [*([variant] if variant else []), *extra]
    return [ROOT / "requirements" / f"{name}.txt" for name in names]


def _is_there(place: Path, locks: Sequence[Path], *, follow: bool) -> bool:
    if not follow:
        return (place / "pyvenv.cfg").exists()
    try:
        return (place / LOCKS).read_text(encoding="ascii") == _digest(locks)
    except OSError:
        return False


def _digest(locks: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()


def _make(place: Path, variant: str | None, extra: Sequence[str], python: str | None, guard: int) -> None:
    from env import drift, index

    matrix = variants.load()
    if (python or python_version()) not in matrix.python:
        served = ", ".join(matrix.python)
        raise Failure(Exit.USAGE, f"the locks serve Python {served}, not {python}", hint="`--python 3.11`, for example")
    if variant is not None:
        _check_room(place.parent, matrix.variant(variant))
    locks = _locks(variant, extra)
    say(f"making the environment {place.name} from {', '.join(f'requirements/{lock.name}' for lock in locks)}")
    tools = bootstrap.ensure_tools()
    uv = str(tools.with_name("uv"))
    environ = index.uv_environment(os.environ, index.pip_settings(tools))
    execute = functools.partial(run, environ=environ, keep=[guard])
    with beside(place) as building:
        # Relocatable, because it is built under another name than it will have.
        execute(
            [
                uv,
                "venv",
                "--quiet",
                "--no-project",
                "--relocatable",
                "--python",
                python or sys.executable,
                str(building),
            ]
        )
        inside = building / "bin" / "python"
        # Copied, not linked: a file edited in here must not be edited in uv's cache and in every other environment, nor
        # come back from that cache with the next repair.
        options = ["--require-hashes", "--no-build", "--link-mode", "copy", "--python", str(inside)]
        execute([uv, "pip", "sync", *options, *map(str, locks)])
        if variant is not None:
            drift.stamp(inside, locks)
        if extra:
            (building / LOCKS).write_text(_digest(locks), encoding="ascii")


def _check_room(folder: Path, variant: variants.Variant) -> None:
    """Refuse before gigabytes were downloaded for nothing."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < variant.installed_gb:
        raise Failure(
            Exit.STORAGE,
            f"{variant.name} takes {variant.installed_gb} GB in {folder}; {free:.1f} GB are free there",
            hint=HINTS[Exit.STORAGE],
        )
