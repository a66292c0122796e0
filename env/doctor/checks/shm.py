"""Shared memory."""

from __future__ import annotations

from env.doctor.facts.folders import SHM
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.need import human
from env.doctor.plan import Plan

ENOUGH = 1 << 30
"""What NCCL's documentation gives containers (`--shm-size=1g`); Docker and Kubernetes give 64 MB unless told."""

TOLERATED = 0.95
"""Share of `ENOUGH` that passes: a tmpfs that was given 1g may count a little less."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """Processes of one machine exchange data through /dev/shm: NCCL's ranks, and a loader's worker processes.

    Too small shows as "bus error" or as NCCL's "unhandled system error", long after the start. A run in one process on
    one card or on the CPU gets by with 64 MB, so this is a warning.
    """
    folder = next((folder for folder in host.folders if folder.role == "shm"), None)
    if folder is None or (folder.size is None and folder.trouble is not None):
        return Finding(
            Severity.UNKNOWN,
            f"the size of {SHM} could not be read",
            host.why("folders") or _said(folder.trouble if folder else None),
        )
    if folder.exists is False:
        return Finding(
            Severity.WARNING,
            f"there is no {SHM}: NCCL between processes and worker processes of a loader need it",
            remedy="mount a tmpfs there: `mount -t tmpfs -o size=1g tmpfs /dev/shm`",
        )
    if folder.writable is False and folder.free != 0:
        return Finding(
            Severity.WARNING,
            f"{SHM} cannot be written: NCCL between processes and worker processes of a loader need it",
            _said(folder.trouble),
            remedy="`chmod 1777 /dev/shm`, or mount a tmpfs there",
        )
    if folder.size is None or folder.free is None:
        return Finding(Severity.UNKNOWN, f"the size of {SHM} could not be read")
    if folder.size < ENOUGH * TOLERATED:
        return Finding(
            Severity.WARNING,
            f"{SHM} has {human(folder.size)}: one process is fine, NCCL between processes wants 1 GB",
            remedy="`docker run --shm-size=1g` or `--ipc=host`; in Kubernetes an `emptyDir` of `medium: Memory`",
        )
    if folder.free < ENOUGH * TOLERATED:
        return Finding(
            Severity.WARNING,
            f"{SHM} is nearly full: {human(folder.free)} of {human(folder.size)} free, NCCL wants 1 GB",
            remedy="remove what programs that were killed have left there: `ls -l /dev/shm`",
        )
    return Finding(Severity.OK, f"{SHM} has {human(folder.size)}, {human(folder.free)} free")


def _said(trouble: str | None) -> tuple[str, ...]:
    return (trouble,) if trouble else ()
