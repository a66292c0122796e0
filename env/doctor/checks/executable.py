"""Whether code can be loaded from the folders that hold code."""

from __future__ import annotations

from env.doctor.facts.folders import ROLES
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

CODE = ("kernels", "triton", "project")
"""Roles that hold shared libraries: compiled kernels, Triton's launchers, the environment's packages."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """A file system mounted `noexec` lets kernels be written and then refuses to load them.

    The loader says "failed to map segment from shared object" (/tmp, which is inductor's own choice, is often mounted
    so).
    """
    folders = [folder for folder in host.folders if folder.role in (*CODE, "temporary")]
    if not folders:
        return None  # the check of writing has said it
    # A folder that cannot be written was not tried; there the mount's own word must do.
    bad = [
        folder
        for folder in folders
        if folder.executable is False
        or (folder.executable is None and folder.mount is not None and "noexec" in folder.mount.options)
    ]
    if not bad:
        if all(folder.executable is None for folder in folders):
            return Finding(Severity.UNKNOWN, "no folder could be tried for loading code")
        return Finding(Severity.OK, "compiled code can be loaded from every folder that holds some")
    code = [folder for folder in bad if folder.role in CODE]
    points = list(dict.fromkeys(folder.mount.point for folder in bad if folder.mount))
    names = ", ".join(f"{folder.path} ({ROLES[folder.role]})" for folder in bad)
    if code:
        remount = f", or `mount -o remount,exec {' '.join(points)}`" if points else ""
        remedy = f"set XDG_CACHE_HOME, or clone the project, to a folder on another file system{remount}"
    else:
        remedy = "no trouble as long as kernels go elsewhere; torch's own choice, /tmp/torchinductor_$USER, would be"
    return Finding(
        Severity.ERROR if code else Severity.NOTE,
        f"code cannot be loaded from {names}",
        tuple(f"{point} is mounted noexec" for point in points),
        remedy,
    )
