"""Whether the folders of a run can be written."""

from __future__ import annotations

from env.doctor.facts.folders import ROLES, Folder
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

NEEDED = ("kernels", "triton", "temporary", "runs")
"""Roles without which a run stops: at the first compilation, or when the first checkpoint is saved."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """Kernels, temporary files and the run's folder are written by every run.

    The rest is written when something is installed or downloaded: a read-only root is fine once an image holds it all.
    """
    folders = [folder for folder in host.folders if folder.role != "shm"]
    if not folders:
        return Finding(Severity.UNKNOWN, "the folders could not be tried", host.why("folders"))
    bad = [folder for folder in folders if folder.writable is False or (folder.writable is None and folder.trouble)]
    if not bad:
        return Finding(
            Severity.OK, "every folder can be written", tuple(f"{_name(one)}: {one.path}" for one in folders)
        )
    made = host.environment is not None and host.environment.python is not None
    needed = [folder for folder in bad if folder.role in NEEDED or (folder.role == "project" and not made)]
    temporary = next((folder for folder in folders if folder.role == "temporary"), None)
    if [folder.role for folder in needed] == ["kernels"] and temporary and temporary.writable and not _fixed(needed[0]):
        return Finding(
            Severity.WARNING,
            f"{needed[0].path} cannot be written: kernels go to {temporary.path}, and are lost when that is cleared",
            tuple(f"{_where(folder)}: {folder.trouble or 'refused'}" for folder in bad),
            _remedy(needed[0]),
        )
    worst = needed or bad
    return Finding(
        Severity.ERROR if needed else Severity.NOTE,
        f"cannot be written: {', '.join(f'{folder.path} ({_name(folder)})' for folder in worst)}",
        tuple(f"{_where(folder)}: {folder.trouble or 'refused'}" for folder in bad),
        remedy="; ".join(dict.fromkeys(_remedy(folder) for folder in worst)),
    )


def _fixed(kernels: Folder) -> bool:
    """Whether a variable names this folder itself, so that the launch seeks no other."""
    return kernels.named_by == "TORCHINDUCTOR_CACHE_DIR"


def _name(folder: Folder) -> str:
    return ROLES.get(folder.role, folder.role)


def _where(folder: Folder) -> str:
    by = f", from {folder.named_by}" if folder.named_by else ""
    at = f", to be made in {folder.tested}" if folder.exists is False else ""
    return f"{folder.path} ({_name(folder)}{by}{at})"


def _remedy(folder: Folder) -> str:
    if folder.free == 0 or "No space" in (folder.trouble or ""):
        return f"free space on {folder.mount.point if folder.mount else folder.path}"
    return {
        "home": "set HOME to a folder of this user",
        "kernels": f"set {folder.named_by or 'XDG_CACHE_HOME'} to a folder of this user on a local disk",
        "triton": "unset TRITON_CACHE_DIR",
        "temporary": "set TMPDIR to a folder of this user",
        "runs": "name another folder for the run",
        "project": "clone the project into a folder of this user, or make the environments as the user who owns it",
        "models": "set HF_HOME to a folder of this user",
    }.get(folder.role, "")
