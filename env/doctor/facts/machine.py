"""The machine under the run: processor, C library, memory, limits, user, clock; containers lie about half of these."""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from env.doctor.facts.folders import Mount
from env.doctor.facts.probing import number, read, run

UNLIMITED = 1 << 60
"""cgroup v1 writes «no limit» as the largest multiple of a page that fits in 63 bits; nothing real is as large as
this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What the wheels must fit."""

    kernel: str
    """`Linux`."""

    machine: str
    """`x86_64`."""

    release: str
    """The kernel's release."""

    libc: str | None = None
    """`glibc 2.36`; None for another C library."""

    python: str
    """The interpreter that the doctor runs in, `3.11.7`."""

    flags: tuple[str, ...] = ()
    """Vector instructions of the processor, of those that kernels are built for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Main memory in bytes."""

    total: int | None = None
    """The machine's, as /proc/meminfo has it: in a container the host's, in some virtual machines what is plugged in
    yet."""

    available: int | None = None
    """What the kernel thinks can be taken without swapping."""

    limit: int | None = None
    """The lowest limit of the control groups that this process is in; None if none is set."""

    used: int | None = None
    """Memory counted against that limit, reclaimable file pages not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processors:
    """How much of the machine's processors this process may use."""

    present: int | None = None
    """What `os.cpu_count` says, after which thread pools are sized."""

    allowed: int | None = None
    """Processors that this process may be scheduled on."""

    quota: float | None = None
    """Processors' worth of time that the control groups grant; None without a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the process; None stands for «unlimited»."""

    files: int | None = None
    """Open files, soft."""

    files_hard: int | None = None
    """Open files, as far as this process may raise it."""

    processes: int | None = None
    """Processes and threads of this user."""

    group: int | None = None
    """Processes and threads of the control group (pids.max)."""

    group_used: int | None = None
    """How many of those there are."""

    locked: int | None = None
    """Bytes that may be locked in memory."""

    address: int | None = None
    """Bytes of address space."""

    file_size: int | None = None
    """Bytes of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Who runs this."""

    uid: int
    """User id."""

    name: str | None = None
    """Name in the password database; None if that knows no such id."""

    home: str | None = None
    """HOME, else the password database's folder."""

    home_from: str | None = None
    """`HOME` or `passwd`."""

    name_from: str | None = None
    """The variable by which `getpass.getuser` finds a name without asking the database: LOGNAME, USER, LNAME,
    USERNAME."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Times in seconds since 1970."""

    now: float
    """The clock."""

    newest: float | None = None
    """The newest time stamp among the project's own files."""

    newest_file: str | None = None
    """Which file has it."""

    commit: float | None = None
    """Time of the checked-out commit."""

    synchronised: bool | None = None
    """Whether the kernel says that something keeps the clock right."""


def system(root: Path = Path("/")) -> System:
    """Kernel, machine and C library."""
    text = read(root / "proc/cpuinfo") or ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    kept = re.findall(r"\b(avx2|avx512f|avx512_bf16|amx_bf16|asimd|sve|bf16)\b", line)
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        libc = None
    return System(
        kernel=platform.system(),
        machine=platform.machine(),
        release=platform.release(),
        libc=libc,
        python=".".join(map(str, sys.version_info[:3])),
        flags=tuple(sorted(set(kept))),
    )


def memory(root: Path = Path("/"), mounts: Sequence[Mount] = ()) -> Memory:
    """Memory of the machine and of the control groups."""
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo") or "", re.MULTILINE))
    total, available = (int(table[key]) * 1024 if key in table else None for key in ("MemTotal", "MemAvailable"))
    lowest: tuple[int, int | None] | None = None
    for folder, second in groups(root, mounts, "memory"):
        limit = number(read(folder / ("memory.max" if second else "memory.limit_in_bytes")))
        if limit is None or limit >= UNLIMITED or (lowest is not None and limit >= lowest[0]):
            continue
        used = number(read(folder / ("memory.current" if second else "memory.usage_in_bytes")))
        cache = re.search(r"^(?:total_)?inactive_file (\d+)$", read(folder / "memory.stat") or "", re.MULTILINE)
        lowest = (limit, max(0, used - int(cache[1]) if cache else used) if used is not None else None)
    limit, used = lowest or (None, None)
    return Memory(total=total, available=available, limit=limit, used=used)


def processors(root: Path = Path("/"), mounts: Sequence[Mount] = ()) -> Processors:
    """Processors of the machine, and this process's share."""
    quotas = [quota for folder, second in groups(root, mounts, "cpu") if (quota := _quota(folder, second)) is not None]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return Processors(present=os.cpu_count(), allowed=allowed, quota=min(quotas, default=None))


def _quota(folder: Path, second: bool) -> float | None:
    if second:
        parts = (read(folder / "cpu.max") or "").split()
        granted, period = (number(parts[0]), number(parts[1])) if len(parts) == 2 else (None, None)
    else:
        granted, period = (number(read(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return granted / period if granted and period and granted > 0 and period > 0 else None


def limits(root: Path = Path("/"), mounts: Sequence[Mount] = ()) -> Limits:
    """Limits of this process and of its control group."""

    def soft(kind: int, which: int = 0) -> int | None:
        value = resource.getrlimit(kind)[which]
        return None if value == resource.RLIM_INFINITY else value

    group: tuple[int, int | None] | None = None
    for folder, _ in groups(root, mounts, "pids"):
        limit = number(read(folder / "pids.max"))
        if limit is not None and (group is None or limit < group[0]):
            group = (limit, number(read(folder / "pids.current")))
    group_limit, group_used = group or (None, None)
    return Limits(
        files=soft(resource.RLIMIT_NOFILE),
        files_hard=soft(resource.RLIMIT_NOFILE, 1),
        processes=soft(resource.RLIMIT_NPROC),
        group=group_limit,
        group_used=group_used,
        locked=soft(resource.RLIMIT_MEMLOCK),
        address=soft(resource.RLIMIT_AS),
        file_size=soft(resource.RLIMIT_FSIZE),
    )


def groups(root: Path, mounts: Sequence[Mount], controller: str) -> tuple[tuple[Path, bool], ...]:
    """Folders of the control groups that bind this process for one controller, and whether each is of version 2.

    Its own comes first, then the parents, whose limits bind too. Without a namespace of its own a container sees the
    machine's path of its group, but only its own folder is mounted: the mount's root is then cut off the path.
    """
    found = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        second = names == ""
        if not second and controller not in names.split(","):
            continue
        for mount in mounts:
            fits = mount.kind == "cgroup2" if second else mount.kind == "cgroup" and controller in mount.options
            if not fits:
                continue
            top = root / mount.point.lstrip("/")
            inner = path
            if mount.root != "/":
                inner = path[len(mount.root) :] if (path + "/").startswith(mount.root + "/") else ""
            parts = [part for part in inner.split("/") if part and part != ".."]
            found += [(top.joinpath(*parts[:depth]), second) for depth in range(len(parts), -1, -1)]
            break
    return tuple(found)


def user(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> User:
    """The user id, and what the password database and the environment make of it."""
    uid = os.getuid() if uid is None else uid
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        entry = None
    home, source = (environ.get("HOME") or None, "HOME")
    if home is None and entry is not None:
        home, source = entry.pw_dir, "passwd"
    return User(
        uid=uid,
        name=entry.pw_name if entry else None,
        home=home,
        home_from=source if home else None,
        name_from=next((name for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(name)), None),
    )


def clock(project: Path, patterns: Iterable[str] = ("requirements/*.txt", "env/*.py", "dflash/*.py", "*.py")) -> Clock:
    """The clock, and what it can be held against: the project's files and its commit."""
    stamps = [(file.stat().st_mtime, str(file)) for pattern in patterns for file in project.glob(pattern)]
    newest, file = max(stamps, default=(None, None))
    shown = run(["git", "-C", str(project), "log", "-1", "--format=%ct"], seconds=10)
    commit = number(shown.output) if shown is not None and shown.code == 0 else None
    return Clock(
        now=time.time(),
        newest=newest,
        newest_file=os.path.relpath(file, project) if file else None,
        commit=float(commit) if commit is not None else None,
        synchronised=_synchronised(),
    )


def _synchronised() -> bool | None:
    """Ask the kernel as `timedatectl` does (adjtimex(2), which a mode of 0 only reads): 5, TIME_ERROR, is «not»."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != 5
