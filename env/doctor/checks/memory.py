"""Main memory against the configuration's need."""

from __future__ import annotations

from env.doctor.facts.nvidia import usable
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.need import PROCESS, Need, human
from env.doctor.plan import Plan


def judge(host: Host, plan: Plan) -> Finding | None:
    """On the CPU everything is in main memory; with cards, what passes through: the target's files, a checkpoint.

    A control group's limit is a wall (the kernel kills the process there), so falling short of it is an error.
    MemTotal is not: virtual machines have been met that show 31 GiB and grow to 256 when it is used, so there it is a
    warning.
    """
    memory = host.memory
    if memory is None or (memory.total is None and memory.limit is None):
        return Finding(Severity.UNKNOWN, "main memory could not be read", host.why("memory"))
    cards = len(usable(host.nvidia) or ()) if host.nvidia is not None else 0
    need, reasons = wanted(plan.need, cards)
    limited = memory.limit is not None and (memory.total is None or memory.limit < memory.total)
    size = memory.limit if limited else memory.total
    assert size is not None
    free = memory.available
    if limited and memory.used is not None:
        free = size - memory.used if free is None else min(free, size - memory.used)
    has = f"{human(size)} by the control group's limit" if limited else human(size)
    subject = f"`{plan.need.name}`" if plan.need is not None else "a training process"
    where = "on the CPU" if cards == 0 else f"with {cards} card{'s' if cards > 1 else ''}"
    if need > size:
        return Finding(
            Severity.ERROR if limited else Severity.WARNING,
            f"{subject} {where} needs about {human(need)} of main memory; there is {has}",
            (reasons, *(() if limited else ("a virtual machine that grows as memory is used may have more",))),
            remedy="raise the limit (`docker run --memory`, the job's request)" if limited else _smaller(cards),
        )
    if free is not None and need > free:
        return Finding(
            Severity.WARNING,
            f"{subject} {where} needs about {human(need)} of main memory; {human(free)} of {has} is free now",
            (reasons,),
            remedy="end what else runs here: `ps aux --sort=-rss | head`",
        )
    shown = has if free is None else f"{has}, {human(free)} free"
    return Finding(Severity.OK, f"main memory {shown}; {subject} {where} needs about {human(need)}", (reasons,))


def wanted(need: Need | None, cards: int) -> tuple[int, str]:
    """Bytes of main memory, and what they are made of."""
    processes = PROCESS * max(1, cards)
    if need is None:
        return processes, f"{human(processes)} for the processes"
    if cards == 0:
        return (
            processes + need.drafter + need.target,
            f"{human(processes)} for the process, {human(need.drafter)} drafter, {human(need.target)} target",
        )
    passing = max(need.target_files, need.checkpoint)
    return processes + passing, f"{human(processes)} for the processes, {human(passing)} while loading and saving"


def _smaller(cards: int) -> str:
    return "train on a machine with more memory" + ("" if cards else ", or on a GPU, or a smaller configuration")
