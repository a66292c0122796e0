"""Limits of the process and its control group."""

from __future__ import annotations

from env.doctor.facts.machine import Limits
from env.doctor.facts.nvidia import usable
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.need import human
from env.doctor.plan import Plan

FILES = 1024
"""Open files: Linux's usual soft limit, enough for one process; less is a limit that somebody set."""

FILES_A_CARD = 1024
"""Open files for each card on top: NCCL opens descriptors for each peer and channel, loaders' workers for each tensor
sent."""

TASKS = 512
"""Processes and threads: compile workers (as many as processors, 32 at most), OpenMP's and autograd's threads,
loaders."""

ADDRESS = 1 << 46
"""Address space: CUDA's unified addressing reserves more than all memory of host and cards together."""


def judge(host: Host, plan: Plan) -> Finding | None:
    """Low limits show late and as something else: "too many open files", "can't start new thread", a file cut short."""
    limits = host.limits
    if limits is None:
        return Finding(Severity.UNKNOWN, "the limits could not be read", host.why("limits"))
    cards = len(usable(host.nvidia) or ()) if host.nvidia is not None else 0
    low = [*_files(limits, cards), *_tasks(limits), *_sizes(limits, cards, plan)]
    if low:
        severity = max(severity for severity, _, _ in low)
        return Finding(
            severity,
            low[0][1] if len(low) == 1 else f"{len(low)} limits are low",
            tuple(text for _, text, _ in low) if len(low) > 1 else (),
            remedy="; ".join(dict.fromkeys(remedy for _, _, remedy in low)),
        )
    files = "unlimited" if limits.files is None else str(limits.files)
    tasks = [limit for limit in (limits.processes, limits.group) if limit is not None]
    return Finding(Severity.OK, f"open files {files}, processes and threads {min(tasks) if tasks else 'unlimited'}")


def _files(limits: Limits, cards: int) -> list[tuple[Severity, str, str]]:
    need = FILES + FILES_A_CARD * (cards if cards > 1 else 0)
    if limits.files is None or limits.files >= need:
        return []
    raised = limits.files_hard is None or limits.files_hard >= need
    how = f"`ulimit -n {need}`" if raised else f"`docker run --ulimit nofile={need}`, or limits.conf"
    return [(Severity.WARNING, f"open files: {limits.files}, this host's runs may need {need}", how)]


def _tasks(limits: Limits) -> list[tuple[Severity, str, str]]:
    found = []
    if limits.processes is not None and limits.processes < TASKS:
        text = f"processes and threads of this user: {limits.processes}, a run may need {TASKS}"
        found.append((Severity.WARNING, text, f"`ulimit -u {TASKS}`"))
    if limits.group is not None and limits.group - (limits.group_used or 0) < TASKS:
        used = f", {limits.group_used} taken" if limits.group_used is not None else ""
        text = f"processes and threads of the control group: {limits.group}{used}, a run may need {TASKS}"
        found.append((Severity.WARNING, text, "`docker run --pids-limit`, or the kubelet's podPidsLimit"))
    return found


def _sizes(limits: Limits, cards: int, plan: Plan) -> list[tuple[Severity, str, str]]:
    found = []
    if limits.address is not None and cards and limits.address < ADDRESS:
        text = f"address space: {human(limits.address)}, CUDA reserves far more than it uses"
        found.append((Severity.ERROR, text, "`ulimit -v unlimited`"))
    if limits.file_size is not None and plan.need is not None and limits.file_size < plan.need.checkpoint:
        text = f"size of a file: {human(limits.file_size)}, a checkpoint has {human(plan.need.checkpoint)}"
        found.append((Severity.ERROR, text, "`ulimit -f unlimited`"))
    return found
