"""Make the tools' private environment: the step that lets one line set up everything.

Standard library only, because nothing else is there yet; `noxfile.py` calls it first, on whichever Python runs it. The
environment is built beside its place and renamed into it, so a killed bootstrap leaves the old one or none, and a stamp
in it tells in microseconds, the second time, that there is nothing to do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from env import variants
from env.building import beside, exclusively, run, say
from env.errors import Exit, Failure, report

ROOT = variants.ROOT
STAMP = "dflash-tools"
FRONT_DOOR = "DFLASH_FRONT_DOOR"
"""Tells our programs how the user called us, for the commands in their hints: `nox` or `python3 noxfile.py`."""


def python_version() -> str:
    """The minor version that names environments: `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def tools_python(root: Path = ROOT) -> Path:
    """Where the tools' Python is, or will be. One a Python version, so that two Pythons do not undo each other's."""
    return root / ".nox" / f"tools-py{python_version()}" / "bin" / "python"


def ensure_tools(root: Path = ROOT) -> Path:
    """Make the environment of `requirements/tools.txt` unless it is there, and return its Python.

    Raises a `Failure` when this Python cannot make environments, when no package index answers, when a file is not the
    locked one, and when the disk is full.
    """
    lock = root / "requirements" / "tools.txt"
    python = tools_python(root)
    folder = python.parent.parent
    if _is_current(folder, lock):
        return python
    served = variants.load().python
    if python_version() not in served:
        raise Failure(
            Exit.HOST,
            f"this Python is {python_version()} ({sys.executable}); the locks serve {served[0]} to {served[-1]}",
            hint=f"run it with one of those, as in `python{served[0]} noxfile.py …`",
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise Failure(
                Exit.HOST,
                f"this Python ({sys.executable}) lacks `{module}`, which makes private environments",
                hint="on Debian and Ubuntu, `apt install python3-venv` brings it",
            )
    with exclusively(folder):
        if not _is_current(folder, lock):  # another bootstrap may have made it while this one waited
            _make(folder, lock)
    return python


def _is_current(folder: Path, lock: Path) -> bool:
    """Whether the tools were installed from this very lock and their Python still exists."""
    try:
        stamp = (folder / STAMP).read_text(encoding="ascii")
    except OSError:
        return False
    return stamp == _digest(lock) and os.access(folder / "bin" / "python", os.X_OK)


def _digest(lock: Path) -> str:
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def _make(folder: Path, lock: Path) -> None:
    say(f"setting up the tools in {folder.parent.name}/{folder.name} (once)")
    with beside(folder) as building:
        run([sys.executable, "-m", "venv", str(building)], os.environ)
        pip = [str(building / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pip += ["--require-hashes", "--only-binary", ":all:", "-r", str(lock)]
        run(pip, pip_environment(os.environ), show=False)
        (building / STAMP).write_text(_digest(lock), encoding="ascii")


def pip_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip: the user's index, CA and proxy settings stay, what would bend the locked set goes.

    A lock is its own constraint, and the place of the installation is ours to choose.
    """
    kept = {key: value for key, value in environ.items() if key not in {"PIP_REQUIREMENT", "PIP_TARGET", "PIP_PREFIX"}}
    # A null file rather than an empty value: pip takes an empty one for "not set" and reads its configuration files.
    return kept | {"PIP_CONSTRAINT": os.devnull, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of our own programs: the project's root is on the path, nothing of the user's.

    A stray PYTHONPATH, or a `torch` folder where the user stands, would shadow what the lock installed.
    """
    kept = {key: value for key, value in environ.items() if key not in {"PYTHONHOME", "PYTHONSTARTUP"}}
    if "HOME" not in kept and not _has_home():
        kept["HOME"] = "/nonexistent"  # what Debian writes for such users; without a word for it nox does not start
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


def _has_home() -> bool:
    try:
        Path.home()
    except RuntimeError:  # a user id without an entry in the password database
        return False
    return True


def become(program: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program: same process id, same terminal, and its own exit code for whoever waits.

    There is no parent left that could swallow a signal or a code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program[0], list(program), dict(environ))


def main(noxfile: str, help_text: str | None) -> int:
    """`python3 noxfile.py`: make the tools, then become nox. Returns, with an exit code, only when that cannot be."""
    _open_standard_streams()
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(help_text)
        return int(Exit.DONE)
    try:
        python = ensure_tools()
    except Failure as failure:
        return report(failure)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    environ = environment(os.environ) | {FRONT_DOOR: "python3 noxfile.py"}
    become([str(python), "-m", "nox", "-f", noxfile, *sys.argv[1:]], environ)


def _open_standard_streams() -> None:
    """Give what a service manager started us without, an input or an output, to the null device.

    Otherwise the next file that is opened, a checkpoint perhaps, becomes standard output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))
