#!/usr/bin/env python3
"""Is this the locked environment? The installed set, compared with the lock; nothing is ever changed here.

One file that needs the standard library alone (Python 3.11 or newer), so that any interpreter can run it about any
other, also a broken one: `python3 env/drift.py --python /path/to/that/python`. That is why it is longer than a module
here should be, and why it parses locks and markers itself.

How it decides. `stamp` is called by whoever has just installed from the lock: it checks the files by hash and writes
down, in `<prefix>/dflash-stamp.json`, what was installed: versions, wheels, each file's size and time stamp.
`compare` then needs to look at sizes and times only. A file whose time stamp moved is hashed: a touched file is no
drift, an edited one is. Without a stamp, wheels' own RECORDs are believed, and the files of torch, Triton and NVIDIA
are hashed each time, which takes seconds.

What it cannot see: an edit that keeps size and time stamp (`--hashes` does); bytecode (see `_walk`); the standard
library and whatever the system's own `sitecustomize` does, which belong to the base image; libraries that a program
loads by an absolute path.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

try:
    from env.errors import Exit, Failure, report
except ImportError:  # this file alone, without its package: the same sentences, the same exit codes
    from enum import IntEnum

    class Exit(IntEnum):  # type: ignore[no-redef]
        """The exit codes of `env.errors` that this file uses."""

        DRIFT = 3
        LOCK = 9

    class Failure(Exception):  # type: ignore[no-redef]
        """`env.errors.Failure`, for a file that stands alone."""

        def __init__(self, code: Exit, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
            super().__init__(message)
            self.code, self.message, self.details, self.hint = code, message, tuple(details), hint

        def __str__(self) -> str:
            lines = [f"error: {self.message}", *(f"  {line}" for line in self.details)]
            return "\n".join(lines if self.hint is None else [*lines, f"hint: {self.hint}"])

    def report(failure: Failure) -> int:
        """`env.errors.report`, for a file that stands alone."""
        print(failure, file=sys.stderr, flush=True)
        return int(failure.code)


STAMP = "dflash-stamp.json"
FORMAT = 1
LINES = 12
"""Packages that a refusal names before it only counts."""

# ---------------------------------------------------------------------------------------------------------- the lock


@dataclass(frozen=True)
class Pin:
    """One line of a lock."""

    name: str
    """Normalised: `typing-extensions`."""
    version: str
    marker: str
    """The condition under which it is installed; empty: always."""
    hashes: tuple[str, ...]
    """`sha256:...` of every file that may be installed for it, sorted."""
    via: tuple[str, ...]
    """What asked for it, as the lock's comments say."""


_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*==\s*([^\s;*]+)\s*(?:;\s*(.*?))?$")
_HASH = re.compile(r"\s--hash=(sha(?:256|384|512):[0-9a-f]+)(?=\s|$)")
# Where files come from does not decide which they are: hashes do.
_WHERE = re.compile(r"^(-i|-f|--index-url|--extra-index-url|--find-links|--no-index|--trusted-host|--pre)\b")


def normalise(name: str) -> str:
    """A package's name as locks spell it: `Typing_Extensions` -> `typing-extensions`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> tuple[Pin, ...]:
    """The pins of a hashed requirements file, in its order.

    Raises:
        Failure: it cannot be read, a line is not a pin, or a pin has no hash.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Exit.LOCK, f"the lock `{path}` cannot be read: {_reason(error)}", hint="`nox -s lock`") from error
    pins: list[Pin] = []
    statement, start = "", 0
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#"):
            if pins and not statement:
                pins[-1] = _add_via(pins[-1], line)
            continue
        start = start if statement else number
        body, _, rest = line.partition(" #")
        statement += body.rstrip()
        if statement.endswith("\\"):
            statement = statement[:-1] + " "
            continue
        if statement.strip() and not _WHERE.match(statement.strip()):
            pins.append(_read_pin(statement.strip(), f"{path}:{start}"))
            if rest.lstrip().startswith("via"):
                pins[-1] = _add_via(pins[-1], "#" + rest)
        statement = ""
    if statement.strip():
        raise Failure(Exit.LOCK, f"{path}:{start} ends in the middle of a pin", hint="`nox -s lock` writes it anew")
    return tuple(pins)


def _read_pin(statement: str, place: str) -> Pin:
    """One logical line."""
    hashes = _HASH.findall(statement)
    match = _PIN.match(_HASH.sub("", statement).strip())
    if match is None or not hashes:
        what = "has no hash" if match else "is not `name==version` with hashes"
        raise Failure(
            Exit.LOCK, f"{place} {what}", details=[_public(statement)], hint="`nox -s lock` writes the lock anew"
        )
    name, version, marker = match.groups()
    return Pin(normalise(name), version, marker or "", tuple(sorted(set(hashes))), ())


def _add_via(pin: Pin, comment: str) -> Pin:
    """The pin, with what a comment below it says: `# via torch`, or one name a line under `# via`."""
    words = comment.lstrip(" #").removeprefix("via").replace(",", " ").split()
    return Pin(pin.name, pin.version, pin.marker, pin.hashes, (*pin.via, *(w for w in words if w != "-r")))


def resolve(pins: Iterable[Pin], markers: Mapping[str, str]) -> dict[str, Pin]:
    """What an interpreter with these markers gets, by name; the same pin in two locks counts once.

    Raises:
        Failure: two versions of one package, or a marker that cannot be judged.
    """
    chosen: dict[str, Pin] = {}
    for pin in pins:
        if not holds(pin.marker, markers):
            continue
        other = chosen.setdefault(pin.name, pin)
        if not same_version(other.version, pin.version):
            raise Failure(Exit.LOCK, f"the lock holds `{pin.name}` twice: {other.version} and {pin.version}")
    return chosen


def same_version(one: str, other: str) -> bool:
    """Whether two versions are one: `2.0` is `2.0.0`, but a local label (`+cpu`) tells builds apart."""
    return _plain(one) == _plain(other)


def _plain(version: str) -> tuple[str, str]:
    """Public version without trailing zeros, and local label."""
    public, _, local = version.strip().lower().removeprefix("v").partition("+")
    match = re.match(r"^([0-9.!]*[0-9])(.*)$", public)
    if match:
        public = re.sub(r"(\.0+)+$", "", match[1]) + match[2]
    return public, re.sub(r"[-_]", ".", local)


# ----------------------------------------------------------------------------------------------------------- markers

# The grammar of markers is a part of Python's expressions, so Python's own parser reads them. Judged is only what is
# understood for sure; everything else is refused, because a wrong guess here is an environment that is wrong.
_OF_VERSIONS = ("python_version", "python_full_version", "implementation_version")
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
_VERSION = re.compile(r"^([0-9]+(?:\.[0-9]+)*)(?:(a|b|rc)([0-9]+))?(\.\*)?(?:\+.*)?$")


def holds(marker: str, environment: Mapping[str, str]) -> bool:
    """Whether a PEP 508 marker is true in an environment; an empty one is.

    Raises:
        Failure: a form that uv does not emit (`~=`, `===`, ordering of texts, an unknown name).
    """
    if not marker.strip():
        return True
    try:
        return _judge(ast.parse(marker.strip(), mode="eval").body, environment)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        why = "it is no marker" if isinstance(error, SyntaxError) else str(error).strip("'\"")
        raise Failure(Exit.LOCK, f"the marker `{_cut(marker, 200)}` cannot be judged: {why}") from error


def _judge(node: ast.expr, environment: Mapping[str, str]) -> bool:
    if isinstance(node, ast.BoolOp):
        values = [_judge(value, environment) for value in node.values]  # all of them: a bad one must not hide
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ValueError("only comparisons, `and` and `or` are understood")
    left, right, operator = node.left, node.comparators[0], type(node.ops[0])
    if isinstance(left, ast.Name) and isinstance(right, ast.Constant):
        return _ask(left.id, operator, environment[left.id], _text(right))
    if isinstance(left, ast.Constant) and isinstance(right, ast.Name):
        if operator in (ast.In, ast.NotIn):
            return (_text(left) in environment[right.id]) == (operator is ast.In)
        return _ask(right.id, _MIRRORED.get(operator, operator), environment[right.id], _text(left))
    raise ValueError("a comparison needs one name and one quoted text")


def _text(node: ast.Constant) -> str:
    """A plain quoted text: no prefix, no escape, no two texts side by side, which Python would also take."""
    value = node.value
    if not isinstance(value, str) or (node.end_col_offset or 0) - node.col_offset != len(value.encode()) + 2:
        raise ValueError("a comparison needs one name and one quoted text")
    return value


def _ask(name: str, operator: type[ast.cmpop], value: str, wanted: str) -> bool:
    """`value operator wanted`, as versions where the name stands for one."""
    if operator in (ast.In, ast.NotIn):
        return (value in wanted) == (operator is ast.In)
    if name in _OF_VERSIONS:
        return _ask_version(operator, value, wanted)
    if operator in (ast.Eq, ast.NotEq):
        return (value == wanted) == (operator is ast.Eq)
    raise ValueError(f"`{name}` is no version and cannot be ordered")


def _ask_version(operator: type[ast.cmpop], value: str, wanted: str) -> bool:
    """PEP 440's comparison, for what versions of Python can look like: releases, and a, b, rc before them."""
    has, its_stage, _ = _read_version(value)
    needs, stage, starred = _read_version(wanted)
    if operator in (ast.Eq, ast.NotEq):
        if starred:
            padded = (*has, *(0 for _ in needs))
            return (padded[: len(needs)] == needs) == (operator is ast.Eq)
        return ((_trim(has), its_stage) == (_trim(needs), stage)) == (operator is ast.Eq)
    if starred:
        raise ValueError("`.*` goes with `==` and `!=` only")
    mine, its = (_trim(has), its_stage), (_trim(needs), stage)
    if operator is ast.Lt:  # 3.14rc1 does not count as older than 3.14, except where a pre-release is asked about
        return mine < its and not (mine[0] == its[0] and stage == _FINAL)
    if operator is ast.LtE:
        return mine <= its
    if operator is ast.Gt:
        return mine > its
    if operator is ast.GtE:
        return mine >= its
    raise ValueError("the comparison is none of == != < <= > >= in")


_FINAL = ("z", 0)  # sorts behind a, b and rc


def _read_version(text: str) -> tuple[tuple[int, ...], tuple[str, int], bool]:
    """Release, stage, and whether `.*` follows."""
    match = _VERSION.match(text)
    if match is None:
        raise ValueError(f"`{text}` is no version of Python")
    release = tuple(int(part) for part in match[1].split("."))
    return release, (match[2], int(match[3])) if match[2] else _FINAL, match[4] is not None


def _trim(release: tuple[int, ...]) -> tuple[int, ...]:
    """3.12.0 is 3.12."""
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    return release


# ------------------------------------------------------------------------------------------------------- interpreter


@dataclass(frozen=True)
class Interpreter:
    """Another Python, as far as its packages are concerned."""

    python: Path
    prefix: Path
    sites: tuple[Path, ...]
    """Folders with packages that exist, the environment's own first."""
    markers: Mapping[str, str]
    abi: str
    """`cp311`: what compiled wheels are built for."""
    user_site: Path | None
    """The user's own packages, where this Python would look at them."""
    system_site: bool
    """Whether a virtual environment lets the packages of its base in."""
    problem: str
    """Why it cannot run, as one clause; empty when it can."""


_PROBE = """
import os, sys
u, v = os.uname(), sys.implementation.version
full = ".".join(map(str, v[:3])) + ("" if v[3] == "final" else v[3][0] + str(v[4]))
m = {"implementation_name": sys.implementation.name, "implementation_version": full, "os_name": os.name,
  "platform_machine": u.machine, "platform_release": u.release, "platform_system": u.sysname,
  "platform_version": u.version, "python_full_version": sys.version.split()[0],
  "platform_python_implementation": {"cpython": "CPython", "pypy": "PyPy"}.get(sys.implementation.name, ""),
  "python_version": "%d.%d" % sys.version_info[:2], "sys_platform": sys.platform}
sites, user = [], ""
if "--sites" in sys.argv:
    import site
    sites, user = site.getsitepackages(), site.getusersitepackages()
print(ascii((m, getattr(sys, "abiflags", ""), sites, user)))
"""


def interpreter(python: Path) -> Interpreter:
    """Ask a Python what it is, without its packages; when it cannot answer, read what its folder says.

    A virtual environment's folders follow from its `pyvenv.cfg`: `-S` keeps the interpreter from running any code of
    the environment (a `.pth` file, a `sitecustomize`), and so it does not know them itself.
    """
    python = Path(os.path.abspath(python))  # noqa: PTH100 - not resolved: the link's place is the environment
    prefix = python.parent.parent
    settings = _pyvenv(prefix)
    system_site = settings.get("include-system-site-packages", "false").lower() == "true"
    answer, problem = _ask_python(python, sites=not settings)
    if answer is None:
        answer = _guess(prefix, settings)
    markers, flags, others, user = answer
    version = markers["python_version"]
    own = [prefix / lib / f"python{version}{flags}" / "site-packages" for lib in ("lib", "lib64")] if settings else []
    sites: list[Path] = []
    for site in (*own, *map(Path, others)):
        if site.is_dir() and not any(site.samefile(other) for other in sites):
            sites.append(site)
    return Interpreter(
        python=python,
        prefix=prefix,
        sites=tuple(sites),
        markers=markers,
        abi=f"cp{version.replace('.', '')}{flags}",
        user_site=Path(user) if user else None,
        system_site=bool(settings) and system_site,
        problem=problem,
    )


_Answer = tuple[dict[str, str], str, list[str], str]


def _ask_python(python: Path, *, sites: bool) -> tuple[_Answer | None, str]:
    """What the probe printed, or why it could not."""
    if not python.exists():
        if python.is_symlink():
            return None, f"`{python}` points to `{os.readlink(python)}`, which is gone"  # noqa: PTH115
        return None, f"`{python}` does not exist"
    command = [str(python), "-I", "-S", "-c", _PROBE, *(["--sites"] if sites else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        answer: _Answer = ast.literal_eval(done.stdout.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"`{python}` does not start: {_reason(error)}"
    except (SyntaxError, ValueError):
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        return None, f"`{python}` does not run: {_cut(last[0].strip(), 160)}"
    return answer, ""


def _pyvenv(prefix: Path) -> dict[str, str]:
    """The settings of a virtual environment; empty for any other Python."""
    try:
        text = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, sign, value in pairs if sign} or {"home": ""}


def _guess(prefix: Path, settings: Mapping[str, str]) -> _Answer:
    """The answers of a Python that cannot answer: its version from its folder, the machine from this process."""
    version = settings.get("version_info", settings.get("version", ""))
    if not re.match(r"^[0-9]+\.[0-9]+", version):
        found = sorted(path.name.removeprefix("python") for path in prefix.glob("lib/python3.*"))
        version = found[0] if found else ".".join(map(str, sys.version_info[:2]))
    full = version if version.count(".") > 1 else f"{version}.0"
    match = re.match(r"^[0-9]+\.[0-9]+\.[0-9]+(?:(?:a|b|rc)[0-9]+)?", full)
    full = match[0] if match else "3.11.0"
    host = os.uname()
    markers = {
        "implementation_name": "cpython",
        "implementation_version": full,
        "os_name": os.name,
        "platform_machine": host.machine,
        "platform_python_implementation": "CPython",
        "platform_release": host.release,
        "platform_system": host.sysname,
        "platform_version": host.version,
        "python_full_version": full,
        "python_version": ".".join(full.split(".")[:2]),
        "sys_platform": sys.platform,
    }
    return markers, "", [], ""


# --------------------------------------------------------------------------------------------------- what is installed

_Stat = list[int]
"""Size and time stamp in nanoseconds; a list, as JSON has it, so that thousands compare without being converted."""


@dataclass(frozen=True)
class Installed:
    """One package, as its metadata says."""

    name: str
    version: str
    info: str
    """Its `.dist-info` folder (or whatever stands for one), as a key of the tree."""
    problem: str
    """What is wrong with its metadata, as one clause; empty when nothing is."""
    requires: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


def _walk(sites: Sequence[Path]) -> dict[str, _Stat]:
    """Size and time stamp of every file: keys are relative to the first folder, absolute in the others.

    `__pycache__` is left out. Python itself writes there, at any time, and uses what it finds only if the source's size
    and time stamp, or its hash, are those noted in it: checking the source covers it, for bytecode that Python wrote.
    Not covered: bytecode that somebody forged, and images' bytecode that is marked to be used unchecked; who can write
    there can change anything. Bytecode *outside* `__pycache__` is imported without any source, and so is not left out.
    `.nfs*` are files that were deleted while open on NFS.
    """
    files: dict[str, _Stat] = {}
    for number, site in enumerate(sites):
        cut = len(str(site)) + 1 if number == 0 else 0
        pending = [str(site)]
        while pending:
            try:
                entries = os.scandir(pending.pop())
            except OSError:
                continue  # unreadable or just deleted: its files will be missed
            with entries:
                for entry in entries:
                    try:
                        if entry.is_dir():
                            if entry.name != "__pycache__":
                                pending.append(entry.path)
                        elif not entry.name.startswith(".nfs"):
                            stat = entry.stat()
                            files[entry.path[cut:]] = [stat.st_size, stat.st_mtime_ns]
                    except OSError:
                        continue  # a dangling link: missing, as far as an import is concerned
    return files


def _installed(sites: Sequence[Path]) -> list[Installed]:
    """Every package that has metadata, also metadata in a sorry state."""
    found: list[Installed] = []
    for number, site in enumerate(sites):
        for entry in sorted(_names(site)):
            info = entry if number == 0 else str(site / entry)
            if entry.endswith(".dist-info"):
                found.append(_read_info(site / entry, info))
            elif entry.endswith((".egg-info", ".egg-link")):
                name, _, version = entry.rsplit(".", 1)[0].partition("-")
                version = version.partition("-")[0] or "?"
                found.append(Installed(normalise(name), version, info, "installed the old way", ()))
    return found


def _read_info(folder: Path, info: str) -> Installed:
    """A `.dist-info` folder. Its name tells name and version when METADATA does not."""
    name, _, version = folder.name.removesuffix(".dist-info").partition("-")
    left_over = name.startswith("~")  # pip renames what it removes, and leaves it so when it is interrupted
    name = normalise(name.lstrip("~"))
    problem = "left over by an interrupted pip" if left_over else ""
    header: dict[str, str] = {}
    requires: list[str] = []
    try:
        text = (folder / "METADATA").read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = problem or "its METADATA is missing"
    except (OSError, UnicodeDecodeError) as error:
        problem = problem or f"its METADATA cannot be read: {_reason(error)}"
    else:
        for line in text.partition("\n\n")[0].splitlines():
            key, sign, value = line.partition(":")
            if sign and key == "Requires-Dist":
                requires.append(value.strip())
            elif sign:
                header.setdefault(key, value.strip())
        if not left_over and normalise(header.get("Name", "")) != name:
            problem = problem or "its METADATA is garbled"
        version = header.get("Version", version)
    return Installed(name, version or "?", info, problem, tuple(requires))


@dataclass(frozen=True)
class _Entry:
    """A line of a RECORD."""

    sha256: str
    """As RECORD has it (urlsafe base64 without padding); empty: not recorded."""
    size: int
    """-1: not recorded."""


def _record(site: Path, info: str) -> dict[str, _Entry] | None:
    """A package's files as its RECORD lists them, without bytecode; None when there is none that can be read."""
    import csv

    entries: dict[str, _Entry] = {}
    home = (site / info).parent
    try:
        with (site / info / "RECORD").open(encoding="utf-8", newline="") as lines:
            for path, digest, size in csv.reader(lines):
                if "__pycache__" not in path:
                    key = path if home == site else str(home / path)
                    entries[key] = _Entry(digest.removeprefix("sha256="), int(size) if size else -1)
    except (OSError, ValueError, csv.Error):
        return None
    return entries


def _bookkeeping(path: str) -> bool:
    """Files that each installer writes as it likes: they say who installed, not what."""
    return ".dist-info/" in path and path.endswith(
        ("/INSTALLER", "/REQUESTED", "/RECORD", "/direct_url.json", "/uv_build.json", "/uv_cache.json")
    )


def _payload(entries: Mapping[str, _Entry]) -> str:
    """A digest of what a wheel brought, whoever unpacked it: not of console scripts, which hold the prefix."""
    import hashlib

    lines = sorted(
        f"{path},{entry.sha256},{entry.size}"
        for path, entry in entries.items()
        if not path.startswith("..") and not _bookkeeping(path)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _tags(site: Path, info: str) -> tuple[str, ...]:
    """The tags (and build number) that a wheel was built for, as its WHEEL says; empty when there is none."""
    try:
        text = (site / info / "WHEEL").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    pairs = (line.partition(":") for line in text.splitlines())
    return tuple(sorted(f"{v.strip()}" if k == "Tag" else f"build {v.strip()}" for k, _, v in pairs if k in _IN_WHEEL))


_IN_WHEEL = ("Tag", "Build")


def torch_build(site: Path) -> dict[str, str]:
    """`__version__`, `cuda` and `git_version` as `torch/version.py` has them, which is read only; empty: no torch."""
    try:
        text = (site / "torch" / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = re.findall(r"(?m)^(__version__|cuda|git_version)\s*(?::[^=\n]*)?=\s*['\"]([^'\"\n]*)['\"]", text)
    return dict(found)


def _digest(path: Path) -> str:
    """Hash of a file as RECORD spells it; empty when it cannot be read."""
    import base64
    import hashlib

    try:
        with path.open("rb") as file:
            raw = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _wrong(root: Path, wanted: Mapping[str, str]) -> list[str]:
    """Those files whose hash is not the wanted one; hashing leaves Python, so threads help."""
    from concurrent.futures import ThreadPoolExecutor

    if not wanted:
        return []
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(_digest, [root / path for path in wanted])
        return sorted(path for (path, sha256), digest in zip(wanted.items(), digests, strict=True) if sha256 != digest)


# ---------------------------------------------------------------------------------------------------------- the stamp


class _Package(TypedDict):
    version: str
    tags: list[str]
    payload: str
    hashes: list[str]
    """What the lock allowed when it was installed."""


class _Stamp(TypedDict):
    format: int
    python: str
    torch: dict[str, str]
    packages: dict[str, _Package]
    files: dict[str, dict[str, _Stat]]
    """Size and time stamp of each file, by package; under "" those of no package."""
    scripts: dict[str, dict[str, _Stat]]
    """The same for what packages put beside the folder of packages: console scripts, manual pages."""
    loose: dict[str, str]
    """Hashes of files that no RECORD hashes."""


def stamp(python: Path, lock: Path | Sequence[Path] | None = None, *, hashes: bool = True) -> Path:
    """Write down what was just installed from the lock, for `compare` to find unchanged; returns the stamp's path.

    To be called once, right after an exact and hash-checked install, and never to make a refusal go away. The files
    are hashed, because an installer that links files from its cache also links what was edited in place there.
    With a lock, later changes of the hashes that it allows for the same version are noticed, too.

    Raises:
        Failure: a file is not what its wheel's RECORD says, or the stamp cannot be written.
    """
    who = interpreter(python)
    if who.problem or not who.sites:
        raise Failure(Exit.DRIFT, who.problem or f"`{who.prefix}` has no site-packages")
    pins = resolve(_pins(lock), who.markers) if lock is not None else {}
    site, tree = who.sites[0], _walk(who.sites)
    result = _Stamp(
        format=FORMAT,
        python=who.markers["python_full_version"],
        torch=torch_build(site),
        packages={},
        files={},
        scripts={},
        loose={},
    )
    wanted: dict[str, str] = {}
    wrong: list[str] = []
    for package in _installed(who.sites):
        record = _record(site, package.info) or {}
        allowed = list(pins[package.name].hashes) if package.name in pins else []
        result["packages"][package.name] = _Package(
            version=package.version, tags=list(_tags(site, package.info)), payload=_payload(record), hashes=allowed
        )
        for path, entry in record.items():
            outside = path.startswith("..")
            now = _stat(site, path) if outside else tree.get(path)
            if now is None or (now[0] != entry.size >= 0 and not outside):
                wrong.append(path)
                continue
            result["scripts" if outside else "files"].setdefault(package.name, {})[path] = now
            if entry.sha256 and not outside:
                wanted[path] = entry.sha256
            elif not _bookkeeping(path):
                result["loose"][path] = _digest(site / path)
    known = {path for files in result["files"].values() for path in files}
    result["files"][""] = {path: now for path, now in tree.items() if path not in known}
    result["loose"].update({path: _digest(site / path) for path in result["files"][""]})
    if hashes:
        wrong += _wrong(site, wanted)
    if wrong:
        raise Failure(
            Exit.DRIFT,
            "what was installed is not what its wheels say",
            details=_listing(wrong, LINES),
            hint="the installer's cache was edited: `uv cache clean` and install again",
        )
    _write(who.prefix / STAMP, json.dumps(result, separators=(",", ":"), sort_keys=True))
    return who.prefix / STAMP


def restamp(
    python: Path,
    lock: Path | Sequence[Path],
    *,
    environ: Mapping[str, str] | None = None,
) -> tuple[Drift, ...]:
    """`compare`, and where nothing drifted although it took hashing to know, note what makes the next time quick.

    Time stamps move when an environment is copied; a stamp may be missing, or of another version of this file. Where
    the prefix cannot be written, it stays slow, which is no error.
    """
    found = _examine(python, lock, hashes=False, environ=os.environ if environ is None else environ)
    old = _read_stamp(found.who.prefix)
    if found.drifts or (old is not None and not found.moved):
        return found.drifts
    if old is None:
        with contextlib.suppress(Failure):
            stamp(python, lock)
    else:
        for files in (*old["files"].values(), *old["scripts"].values()):
            files.update({path: now for path in files if (now := (found.moved or {}).get(path)) is not None})
        with contextlib.suppress(Failure):
            _write(found.who.prefix / STAMP, json.dumps(old, separators=(",", ":"), sort_keys=True))
    return found.drifts


def _read_stamp(prefix: Path) -> _Stamp | None:
    """The stamp, or None where there is none that this file understands."""
    try:
        found: _Stamp = json.loads((prefix / STAMP).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and found.keys() == _Stamp.__annotations__.keys() and found["format"] == FORMAT
    return found if whole else None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    import tempfile

    try:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(beside).chmod(0o644)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Failure(Exit.DRIFT, f"`{path}` cannot be written: {_reason(error)}") from error


def _stat(site: Path, path: str) -> _Stat | None:
    """Of what lies outside of the walk; None: it is missing."""
    try:
        stat = (site / path).stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


# ------------------------------------------------------------------------------------------------------ the comparison


@dataclass(frozen=True)
class Drift:
    """One thing that is not as the lock says."""

    name: str
    """A package, mostly; or `python`, or the environment variable that changes what is imported."""
    locked: str
    """The version that the lock has; empty: it has none."""
    found: str
    """The version that is there; empty: there is none."""
    why: str = ""
    """What differs, where the versions do not say it."""
    origin: str = ""
    """What brought it in, where that can be told."""
    files: tuple[str, ...] = ()
    """The files that differ, the first fifty of them."""
    outside: bool = False
    """Whether it comes from outside of the environment, so that no installation mends it."""


@dataclass(frozen=True)
class _Found:
    """What one look at an environment gave."""

    who: Interpreter
    drifts: tuple[Drift, ...] = ()
    moved: Mapping[str, _Stat] | None = None
    """Files that were hashed, and are right, because their time stamps are not the noted ones."""
    packages: int = 0
    files: int = 0


@dataclass(frozen=True)
class _Scene:
    """Everything that is compared, gathered once."""

    who: Interpreter
    site: Path
    pins: Mapping[str, Pin]
    dists: Mapping[str, Sequence[Installed]]
    tree: Mapping[str, _Stat]
    stamp: _Stamp | None
    cuda: str
    """CUDA of the locked runtime, as `torch.version.cuda` has it; empty: none is locked."""
    torch: Mapping[str, str]
    hashes: bool
    """Whether to hash everything."""

    @functools.cached_property
    def askers(self) -> dict[str, list[Installed]]:
        """Which installed packages require each one; only refusals ask."""
        return _askers([package for there in self.dists.values() for package in there], self.who.markers)

    def foreign(self, package: Installed) -> bool:
        """Whether the lock does not have it, or not in that version."""
        return package.name not in self.pins or not same_version(package.version, self.pins[package.name].version)

    def locked(self, name: str) -> str:
        """The locked version, torch's with the CUDA that the lock's runtime stands for."""
        version = self.pins[name].version if name in self.pins else ""
        return f"{version}+cu{self.cuda.replace('.', '')}" if name == "torch" and version and self.cuda else version

    def found(self, package: Installed) -> str:
        """The installed version, torch's with the label that its own code has: wheels' metadata may lack it."""
        if package.name != "torch" or "+" in package.version:
            return package.version
        label = self.torch.get("__version__", "").partition("+")[2]
        return f"{package.version}+{label}" if label else package.version


def compare(
    python: Path,
    lock: Path | Sequence[Path],
    *,
    hashes: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[Drift, ...]:
    """Everything in which an environment is not what the lock says; empty: nothing. Changes nothing.

    `environ` are the environment variables that a launch would have, this process's own by default. Several locks are
    one set. `hashes` hashes every file, also those whose size and time stamp did not move.

    Raises:
        Failure: the lock cannot be read or judged.
    """
    return _examine(python, lock, hashes=hashes, environ=os.environ if environ is None else environ).drifts


def _pins(lock: Path | Sequence[Path]) -> list[Pin]:
    return [pin for path in ([lock] if isinstance(lock, Path) else lock) for pin in read_lock(path)]


def _examine(python: Path, lock: Path | Sequence[Path], *, hashes: bool, environ: Mapping[str, str]) -> _Found:
    """Look once, judge everything."""
    who = interpreter(python)
    pins = resolve(_pins(lock), who.markers)
    broken = [Drift("python", who.markers["python_version"], "", why=who.problem)] if who.problem else []
    if who.system_site:
        broken.append(
            Drift("pyvenv.cfg", "", "include-system-site-packages = true", "the system's packages are let in")
        )
    if not who.sites:
        return _Found(who, (*broken, Drift("site-packages", f"{len(pins)} packages", "", why=_no_site(who))))
    dists: dict[str, list[Installed]] = {}
    for package in _installed(who.sites):
        dists.setdefault(package.name, []).append(package)
    scene = _Scene(
        who=who,
        site=who.sites[0],
        pins=pins,
        dists=dists,
        tree=_walk(who.sites),
        stamp=_read_stamp(who.prefix),
        cuda=_cuda(pins),
        torch=torch_build(who.sites[0]),
        hashes=hashes,
    )
    packages = [drift for name in sorted({*pins, *dists}) if (drift := _package(scene, name)) is not None]
    # Files of a package that is another one altogether tell nothing more.
    files, moved = _files(scene, {drift.name for drift in packages})
    drifts = (*broken, *sorted(packages, key=functools.partial(_rank, scene)), *files, *_outside(scene, environ))
    return _Found(who, drifts, moved, len(pins), len(scene.tree))


def _rank(scene: _Scene, drift: Drift) -> tuple[object, ...]:
    """Torch first, then other versions, then what came in (what was asked for before its company), gaps."""
    companion = bool(scene.askers.get(drift.name))
    return drift.name != "torch", not (drift.locked and drift.found), not drift.found, companion, drift.name


def _no_site(who: Interpreter) -> str:
    """Where packages should be and are not."""
    others = sorted(path.parent.name for path in who.prefix.glob("lib/python3.*/site-packages"))
    if others:
        return f"`{who.prefix}` holds packages of {' and '.join(others)}; its Python was exchanged"
    return f"`{who.prefix}` has no site-packages"


def _cuda(pins: Mapping[str, Pin]) -> str:
    """The runtime's version is CUDA's; of other CUDA libraries that cannot be said (cufft 12 belongs to CUDA 13)."""
    for name in ("cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        if name in pins:
            return ".".join(pins[name].version.split(".")[:2])
    return ""


def _package(scene: _Scene, name: str) -> Drift | None:
    """How a package as a whole differs, if it does."""
    there = scene.dists.get(name, ())
    locked = scene.locked(name)
    if not there:
        left = len((scene.stamp["files"].get(name, {}) if scene.stamp else {}).keys() & scene.tree.keys())
        return Drift(name, locked, "", why=f"its metadata is gone, {_count(left, 'file')} of it left" if left else "")
    found = " and ".join(sorted({scene.found(package) for package in there}))
    if len(there) > 1:
        return Drift(name, locked, found, why=f"it has {len(there)} sets of metadata", origin=_origin(scene, there[-1]))
    package = there[0]
    if scene.foreign(package):
        return Drift(name, locked, found, why=package.problem, origin=_origin(scene, package))
    why = package.problem or _other_build(scene, package)
    return Drift(name, locked, found, why=why, origin=_origin(scene, package)) if why else None


def _other_build(scene: _Scene, package: Installed) -> str:
    """What tells a package from the locked build of the same version; empty: nothing does."""
    name = package.name
    if name == "torch" and (why := _other_torch(scene, package)):
        return why
    path = f"{package.info}/RECORD"
    if path not in scene.tree and package.info.endswith(".dist-info"):
        return "its RECORD is missing"
    tags = _tags(scene.site, package.info)
    if scene.stamp is None:
        return _foreign(tags, scene.who.abi)
    noted = scene.stamp["packages"].get(name)
    if noted is None:
        return "it was not there when the environment was made"
    if not set(noted["hashes"]) <= set(scene.pins[name].hashes):
        return "the lock now allows other files for this version than when it was installed"
    if list(tags) != noted["tags"]:
        return f"another build: {_cut(', '.join(tags) or 'no tags', 60)}, was {_cut(', '.join(noted['tags']), 60)}"
    if not scene.hashes and scene.tree.get(path) == scene.stamp["files"].get(name, {}).get(path):
        return ""
    record = _record(scene.site, package.info)
    if record is None:
        return "its RECORD is garbled"
    return "" if _payload(record) == noted["payload"] else "another build: its RECORD lists other files"


def _other_torch(scene: _Scene, package: Installed) -> str:
    """What torch's own code says about its build; its metadata may not tell CUDA from CPU."""
    torch = scene.torch
    if not torch:
        return ""  # its files are missing, which is said of them
    if torch.get("__version__", "").partition("+")[0] != package.version.partition("+")[0]:
        return f"torch/version.py says {torch.get('__version__', 'nothing')}"
    if scene.cuda and torch.get("cuda", "") != scene.cuda:
        return f"it is built for {'CUDA ' + torch['cuda'] if torch.get('cuda') else 'CPUs only'}"
    if scene.stamp is not None and torch.get("git_version") != scene.stamp["torch"].get("git_version"):
        return f"another build: of commit {torch.get('git_version', '?')[:12]}"
    return ""


def _foreign(tags: Sequence[str], abi: str) -> str:
    """Whether a wheel is for another Python; all that can be said of a build without a stamp."""
    minor = int(re.sub(r"[^0-9]", "", abi)[1:])
    for tag in tags:
        python, its_abi = (*tag.split("-"), "")[:2]
        stable = its_abi == "abi3" and python[3:].isdigit() and int(python[3:]) <= minor
        if tag.startswith("build ") or "py3" in python.split(".") or python == abi or stable:
            return ""
    return f"its wheel is for another Python: {_cut(', '.join(tags), 60)}" if tags else ""


# ---- files


_HASHED = re.compile(r"^(torch|triton|nvidia-.*)$")
"""What compiled code depends on: without a stamp, these are hashed each time and the others are sized only."""
_BY_VENV = ("_virtualenv.py", "_virtualenv.pth")


_Expected = tuple[str, int, int]
"""Owner, size and time stamp; -1 is not known."""


def _expected(scene: _Scene, skip: set[str]) -> dict[str, _Expected]:
    """Every file that should be there and is worth a look: of stamped packages in which nothing moved, none is."""
    expected: dict[str, _Expected] = {}
    for name, files in (*scene.stamp["files"].items(), *scene.stamp["scripts"].items()) if scene.stamp else ():
        present = name in scene.dists or not name
        unmoved = all(map(operator.eq, map(scene.tree.get, files), files.values()))
        if present and name not in skip and (scene.hashes or not unmoved):
            expected.update({path: (name, size, when) for path, (size, when) in files.items()})
    for name, packages in scene.dists.items() if scene.stamp is None else ():
        if name not in skip:
            for path, entry in (_record(scene.site, packages[0].info) or {}).items():
                # Scripts hold the path of their interpreter: another size than RECORD's is right.
                expected[path] = (name, -1 if path.startswith("..") else entry.size, -1)
    return expected


def _files(scene: _Scene, skip: set[str]) -> tuple[list[Drift], dict[str, _Stat]]:
    """Files that are missing, edited, or there although nothing brought them; and those that only moved in time."""
    wrong: dict[str, dict[str, list[str]]] = {}
    doubtful: dict[str, _Stat] = {}
    expected = _expected(scene, skip)
    for path, (name, size, when) in expected.items():
        now = _stat(scene.site, path) if path.startswith("..") else scene.tree.get(path)
        if _bookkeeping(path):
            continue  # whoever installs the same wheel again writes these anew
        if now is None:
            wrong.setdefault(name, {}).setdefault("missing", []).append(path)
        elif now[0] != size >= 0:
            wrong.setdefault(name, {}).setdefault("edited", []).append(path)
        elif scene.hashes or not _as_good(when, now[1], name):
            doubtful[path] = now
    edited = _wrong(scene.site, _hashes(scene, {expected[path][0] for path in doubtful}, doubtful))
    for path in edited:
        wrong.setdefault(expected[path][0], {}).setdefault("edited", []).append(path)
        del doubtful[path]
    for path, name in _added(scene, skip):  # each time: as many files as were noted need not be those that were noted
        wrong.setdefault(name, {}).setdefault("added", []).append(path)
    return [_of_files(scene, name, kinds) for name, kinds in sorted(wrong.items())], doubtful


def _as_good(noted: int, now: int, name: str) -> bool:
    """Whether a time stamp is as good as the noted one: archives, and so images, keep whole seconds only."""
    if noted < 0:
        return not _HASHED.match(name)
    return now in (noted, noted // 1_000_000_000 * 1_000_000_000)


def _hashes(scene: _Scene, names: set[str], paths: Iterable[str]) -> dict[str, str]:
    """The hash that each file should have. RECORDs can be believed here: one that changed is a drift of its own."""
    known: dict[str, str] = dict(scene.stamp["loose"]) if scene.stamp else {}
    for name in names:
        for package in scene.dists.get(name, ()):
            record = _record(scene.site, package.info) or {}
            known.update({path: e.sha256 for path, e in record.items() if e.sha256 and not path.startswith("..")})
    return {path: known[path] for path in paths if path in known}


def _added(scene: _Scene, skip: set[str]) -> Iterator[tuple[str, str]]:
    """Files that neither the stamp nor a RECORD knows, with the package among whose files they lie."""
    owners: dict[str, str] = {}
    for name, files in scene.stamp["files"].items() if scene.stamp else ():
        owners.update(dict.fromkeys(files, name))
    for name in scene.dists if scene.stamp is None else skip:
        for package in scene.dists.get(name, ()):
            owners.update(dict.fromkeys(_record(scene.site, package.info) or {}, name))
    fresh = [path for path in scene.tree if path not in owners and ".dist-info/" not in path]
    folders = {os.path.dirname(path): name for path, name in owners.items()} if fresh else {}  # noqa: PTH120
    unclear = tuple(f"{name.replace('-', '_')}/" for name in skip)  # of a package without RECORD, more is not known
    for path in fresh:
        folder = os.path.dirname(path)  # noqa: PTH120
        if not path.startswith(unclear) and not (scene.stamp is None and path in _BY_VENV):
            yield path, (folders.get(folder) or path.partition("/")[0]) if folder else path


def _of_files(scene: _Scene, name: str, kinds: Mapping[str, list[str]]) -> Drift:
    """One line for all files of one package."""
    parts = []
    for kind, paths in sorted(kinds.items()):
        paths.sort(key=lambda path: (".so" not in path, not path.endswith(".py"), path))  # the telling ones first
        parts.append(f"{_count(len(paths), 'file')} {kind}: {_some(paths, 1)}" if paths[1:] else f"{paths[0]} {kind}")
    files = tuple(path for paths in kinds.values() for path in paths)[:50]
    packages = scene.dists.get(name, ())
    if packages and name in scene.pins:
        return Drift(name, scene.locked(name), scene.found(packages[0]), why="; ".join(parts), files=files)
    if files == (name,):
        return Drift(name, "", "a file of no package", why=_at_start(scene.site / name), files=files)
    return Drift(name or "files", "", "files of no package", why="; ".join(parts), files=files)


def _at_start(path: Path) -> str:
    """Files that each start of Python runs; what the first line of a `.pth` file says."""
    if path.stem in ("sitecustomize", "usercustomize"):
        return "it runs at every start"
    if path.suffix != ".pth":
        return ""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    told = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    code = told.startswith(("import ", "import\t"))
    return f"it {'runs' if code else 'puts on the path'} at every start: {_cut(told, 60)}" if told else ""


# ---- from outside


def _outside(scene: _Scene, environ: Mapping[str, str]) -> Iterator[Drift]:
    """What comes before the locked packages although it lies elsewhere: modules first, then libraries."""
    for entry in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
        yield from _shadow(scene, Path(entry), "PYTHONPATH")
    user = scene.who.user_site
    if user is not None and not environ.get("PYTHONNOUSERSITE") and user.is_dir():
        yield from _shadow(scene, user, "user site")
    if not environ.get("LD_LIBRARY_PATH") and not environ.get("LD_PRELOAD"):
        return
    libraries = {os.path.basename(p) for p in scene.tree if p.startswith("nvidia/") and ".so" in p}  # noqa: PTH119
    # The wheels' libraries have a RUNPATH, which LD_LIBRARY_PATH goes before.
    for entry in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        here = sorted(libraries.intersection(_names(Path(entry))))
        if here and not _inside(Path(entry), scene.who.prefix):
            yield Drift("LD_LIBRARY_PATH", "", entry, f"{_some(here, 2)} there come first", outside=True)
    for entry in re.split(r"[:\s]+", environ.get("LD_PRELOAD", "")):
        if entry.rpartition("/")[2] in libraries and not _inside(Path(entry), scene.who.prefix):
            yield Drift("LD_PRELOAD", "", entry, "it comes first", outside=True)


def _shadow(scene: _Scene, folder: Path, label: str) -> Iterator[Drift]:
    """Modules of a folder that is searched before the locked packages, and bear their names."""
    if any(_inside(folder, site) for site in scene.who.sites):
        return
    names = set(_names(scene.site))
    here = []
    for entry in _names(folder):
        if entry == "__pycache__":
            continue  # no module: nothing is imported by that name
        stem, _, suffix = entry.partition(".")
        if entry.endswith((".py", ".pyc", ".so")):
            taken = stem in names or f"{stem}.py" in names or stem in ("sitecustomize", "usercustomize")
        else:  # a folder without `__init__.py` gives way to a real package further down, not to another such folder
            regular = (folder / entry / "__init__.py").exists()
            taken = not suffix and entry in names and (regular or f"{entry}/__init__.py" not in scene.tree)
            taken = (taken and (folder / entry).is_dir()) or (regular and f"{entry}.py" in names)
        if taken:
            here.append(entry)
    if here:
        yield Drift(label, "", str(folder), f"{_some(sorted(here), 3)} there come{'s' if len(here) == 1 else ''} first",
                    outside=True)  # fmt: skip


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _inside(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, links followed."""
    return path.resolve().is_relative_to(folder.resolve())


# ---- where it came from


def _origin(scene: _Scene, package: Installed) -> str:
    """What brought a package in: who requires it, who asked for it, who installed it, and from where."""
    folder = scene.site / package.info
    told = []
    asking = _asking(scene, package.name)
    if asking:
        told.append(f"required by {asking}")
    elif (folder / "REQUESTED").exists():
        told.append("asked for by name")
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        told.append(f"installed by {_cut((folder / 'INSTALLER').read_text(encoding='utf-8').split()[0], 20)}")
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
        direct = json.loads((folder / "direct_url.json").read_bytes())
        told.append("editable" if direct.get("dir_info", {}).get("editable") else "")
        told.append(f"from {_public(str(direct['url']))}")
    return ", ".join(filter(None, told))


def _askers(packages: Sequence[Installed], markers: Mapping[str, str]) -> dict[str, list[Installed]]:
    """Which installed packages require each one."""
    extras: dict[str, set[str]] = {package.name: {""} for package in packages}
    edges: dict[str, dict[str, Installed]] = {}
    again = True
    while again:  # extras travel: torch asks for cuda-toolkit[cublas], and that for nvidia-cublas
        again = False
        for package in packages:
            for wanted, its_extras, marker in map(_requirement, package.requires):
                if wanted not in extras or not _applies(marker, markers, extras[package.name]):
                    continue
                edges.setdefault(wanted, {})[package.name] = package
                if not its_extras <= extras[wanted]:
                    extras[wanted] |= its_extras
                    again = True
    return {name: list(asking.values()) for name, asking in edges.items()}


def _asking(scene: _Scene, name: str) -> str:
    """Who has to do with a package being there, up to what nothing foreign requires: `flashinfer-python 0.6.1`."""
    direct = [package for package in scene.askers.get(name, ()) if scene.foreign(package)]
    if not direct:  # torch requires what is locked; that says something only about what is not
        return "" if name in scene.pins else _some([p.title for p in scene.askers.get(name, ())], 2)
    seen = {package.name: package for package in direct}
    queue, roots = list(direct), []
    while queue:
        package = queue.pop(0)
        above = [other for other in scene.askers.get(package.name, ()) if scene.foreign(other)]
        roots += [] if above else [package]
        queue += [other for other in above if other.name not in seen]
        seen.update({other.name: other for other in above})
    first = [package.title for package in direct if package in roots]
    if first or not roots:
        return _some(first or [package.title for package in direct], 2)
    return f"{_some([package.title for package in direct], 1)}, for {_some([root.title for root in roots], 1)}"


def _requirement(text: str) -> tuple[str, set[str], str]:
    """Name, extras and marker of a Requires-Dist."""
    match = re.match(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?([^;]*)(?:;(.*))?$", text)
    if match is None:
        return "", set(), ""
    return normalise(match[1]), {normalise(e.strip()) for e in (match[2] or "").split(",") if e.strip()}, match[4] or ""


def _applies(marker: str, markers: Mapping[str, str], extras: set[str]) -> bool:
    """Best effort: others write markers that are not understood here, and this only adds to a sentence."""
    try:
        return any(holds(marker, {**markers, "extra": extra}) for extra in extras)
    except Failure:
        return False


# --------------------------------------------------------------------------------------------------------- what is said


def failure(
    drifts: Sequence[Drift],
    variant: str,
    *,
    command: str = "nox -s train",
    options: str = "",
    passable: bool = True,
) -> Failure:
    """The refusal: one line a drift, torch first, and the ways out.

    `command` is what the user typed, and `options` what of it chose the environment besides the variant, like
    `--python 3.12`: the mending command must mend this environment and no other. `passable`: whether it takes
    `--allow-drift`.
    """
    rows = [
        (d.name, f"locked {d.locked}" if d.locked else "not locked", f"found {d.found}" if d.found else "not found",
         ", ".join(filter(None, (d.why, d.origin))))
        for d in drifts
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "   ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])).rstrip()
        for row in rows
    ]
    mends = []
    if any(not drift.outside for drift in drifts):
        words = ["" if variant == _default() else f"--variant {variant}", options, "--repair"]
        mends.append(f"`{command} -- {' '.join(filter(None, words))}` installs the locked set")
    mends += sorted({_mend(drift) for drift in drifts if drift.outside})
    return Failure(
        Exit.DRIFT,
        f"this environment is not the locked one ({variant})",
        details=_listing(lines, LINES),
        hint="; ".join([*mends, *(["`--allow-drift` goes on as it is"] if passable else [])]),
    )


def _mend(drift: Drift) -> str:
    """How to take away what lies outside."""
    if drift.name == "user site":
        return "`PYTHONNOUSERSITE=1` leaves the user site out"
    return f"take `{drift.found}` out of {drift.name}"


def _default() -> str:
    """The variant that commands mean without `--variant`, as in env/variants.py; read only when something is said."""
    if named := os.environ.get("DFLASH_VARIANT"):
        return named
    try:
        text = Path(__file__).with_name("variants.toml").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r'(?m)^default\s*=\s*"([^"]+)"', text)
    return match[1] if match else ""


def _listing(lines: Sequence[str], most: int) -> list[str]:
    return list(lines) if len(lines) <= most + 1 else [*lines[:most], f"and {len(lines) - most} more"]


def _some(names: Sequence[str], most: int) -> str:
    """Nothing, `a`, `a and b`, `a, b and 7 more`."""
    shown = list(names) if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cut(text: str, most: int) -> str:
    """One line, not longer than that."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _public(text: str) -> str:
    """One line without what may be secret in an address: user, password, query."""
    return _cut(re.sub(r"(://[^?\s]*)\?\S*", r"\1", re.sub(r"://[^/@\s]*@", "://", text)), 120)


def _reason(error: Exception) -> str:
    """What the system says, without Python's decoration."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _locks(python: Path) -> list[Path]:
    """The locks of an environment that is asked about without any; empty where none is known.

    A copy of this file beside a `lock.txt` (as images are built with) belongs to that one. Otherwise the environment's
    folder tells: `cu130-py3.11-dev` was made from `cu130` and `dev`, and any other name stands for the default variant.
    """
    here = Path(__file__).resolve()
    words = Path(os.path.abspath(python)).parent.parent.name.split("-")  # noqa: PTH100 - not resolved, as above
    told = [word for word in words if not re.fullmatch(r"py3\.[0-9]+", word)]
    folder = here.parent.parent / "requirements"
    choices = [[here.with_name("lock.txt")]]
    choices += [[folder / f"{name}.txt" for name in names] for names in (told if told != words else [], [_default()])]
    return next((locks for locks in choices if locks and all(lock.is_file() for lock in locks)), [])


def main(argv: Sequence[str] | None = None) -> int:
    """`python3 env/drift.py --python P`: 0 when nothing drifted, 3 when something did."""
    parser = argparse.ArgumentParser(prog="drift.py", description="Compare an environment with its lock.")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the environment's interpreter")
    parser.add_argument(
        "--lock", type=Path, action="append", help="its lock; repeatable; by default its folder's name tells"
    )
    parser.add_argument("--variant", help="what to call it; by default the first lock's name")
    parser.add_argument("--hashes", action="store_true", help="hash every file, not only those that moved")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    given = parser.parse_args(argv)
    locks = given.lock or _locks(given.python)
    if not locks:
        parser.error(f"no lock is known for `{given.python}`: name it with --lock")
    variant = given.variant or locks[0].stem
    try:
        found = _examine(given.python, locks, hashes=given.hashes, environ=os.environ)
    except Failure as refused:
        return report(refused)
    if given.json:
        print(json.dumps({"variant": variant, "drifts": [asdict(drift) for drift in found.drifts]}, indent=2))
        return int(Exit.DRIFT) if found.drifts else 0
    if found.drifts:
        return report(failure(found.drifts, variant))
    print(f"this environment is the locked one ({variant}): {found.packages} packages, {found.files} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
