"""Free disk against what will be written."""

from __future__ import annotations

from collections.abc import Iterator

from env.doctor.facts.folders import ROLES, Folder
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.need import KERNELS, human
from env.doctor.plan import Plan

FILES = 60_000
"""Files of an environment: 23,485 in cu130's, measured with Python 3.11, and as many `.pyc` again once all are
imported."""


def judge(host: Host, plan: Plan) -> Finding | None:
    """Each file system must hold all that goes there: the environment, kernels, a run at its largest, the target.

    An error where not even one checkpoint would fit, since the run would stop at its first; a warning where it all
    would not. An environment that is already made, and a target that is already downloaded, take no more.
    """
    wanted: dict[str, tuple[int, list[str], list[Folder]]] = {}
    for folder, size, what in _wants(host, plan):
        if folder.free is None:
            continue
        point = folder.mount.point if folder.mount else folder.tested or folder.path
        total, reasons, folders = wanted.get(point, (0, [], []))
        wanted[point] = (total + size, [*reasons, f"{human(size)} {what}"], [*folders, folder])
    if not wanted:
        return Finding(Severity.UNKNOWN, "the free space could not be read", host.why("folders"))
    short = {point: need for point, need in wanted.items() if _free(need[2]) < need[0]}
    files = [
        folder
        for folder in host.folders
        if folder.role == "project" and _to_install(host) and folder.inodes is not None and folder.inodes < FILES
    ]
    if files and not short:
        return Finding(
            Severity.WARNING,
            f"{files[0].path} has room for {files[0].inodes} more files, an environment has about {FILES}",
            remedy="remove files there, or clone the project onto another file system (`df -i` shows them)",
        )
    details = tuple(
        f"{point}: {human(_free(folders))} free, {human(total)} wanted ({', '.join(reasons)})"
        for point, (total, reasons, folders) in sorted(wanted.items(), key=lambda item: item[0] not in short)
    )
    if not short:
        return Finding(Severity.OK, f"enough free disk for {_subject(plan)}", details)
    hopeless = any(_hopeless(_free(folders), folders, plan) for _, _, folders in short.values())
    return Finding(
        Severity.ERROR if hopeless else Severity.WARNING,
        f"too little free disk for {_subject(plan)} on {', '.join(short)}",
        details,
        remedy="free space there, or put the run, HF_HOME or XDG_CACHE_HOME on another file system",
    )


def _wants(host: Host, plan: Plan) -> Iterator[tuple[Folder, int, str]]:
    for folder in host.folders:
        if folder.role == "project" and _to_install(host):
            yield folder, int(plan.variant.installed_gb * 1e9), f"{plan.variant.name} environment"
        elif folder.role == "kernels":
            yield folder, KERNELS, ROLES["kernels"]
        elif folder.role == "runs" and plan.need is not None:
            yield folder, plan.need.run, "run at its largest"
        elif folder.role == "models" and plan.need is not None and plan.need.target_files:
            yield folder, plan.need.target_files, "target, if it is downloaded"


def _to_install(host: Host) -> bool:
    return host.environment is None or host.environment.python is None


def _free(folders: list[Folder]) -> int:
    return min(folder.free or 0 for folder in folders)


def _hopeless(free: int, folders: list[Folder], plan: Plan) -> bool:
    if free < KERNELS // 10:
        return True
    runs = any(folder.role == "runs" for folder in folders)
    return runs and plan.need is not None and free < plan.need.checkpoint


def _subject(plan: Plan) -> str:
    return f"`{plan.need.name}`" if plan.need is not None else plan.variant.name
