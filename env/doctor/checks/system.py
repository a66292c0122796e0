"""The wheels' machine and C library."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan, numbers

GLIBC = (2, 28)
"""torch's wheels are tagged manylinux_2_28; older C libraries lack symbols that they import."""


def judge(host: Host, plan: Plan) -> Finding | None:
    """Linux with glibc 2.28 or newer, on a machine that the locks serve, and a Python that they serve."""
    system = host.system
    if system is None:
        return Finding(Severity.UNKNOWN, "the system could not be asked what it is", host.why("system"))
    if system.kernel != "Linux":
        return Finding(
            Severity.ERROR,
            f"{system.kernel} is not served: the CUDA wheels of {plan.variant.name} are for Linux",
            remedy="use a Linux machine, or WSL 2 on Windows",
        )
    if system.machine not in plan.matrix.platforms:
        return Finding(
            Severity.ERROR, f"no wheels for {system.machine}; the locks serve {', '.join(plan.matrix.platforms)}"
        )
    kind, _, version = (system.libc or "").partition(" ")
    if kind != "glibc":
        return Finding(
            Severity.ERROR,
            "the C library is not glibc, which torch's wheels need",
            remedy="use one with glibc 2.28 or newer: Debian 10, Ubuntu 20.04, RHEL 8 or later; Alpine has musl",
        )
    have = numbers(version)
    if have is not None and have < GLIBC:
        return Finding(
            Severity.ERROR,
            f"glibc {version} is older than torch's wheels need (2.28)",
            remedy="use Debian 10, Ubuntu 20.04, RHEL 8 or later",
        )
    served = [python for python in plan.matrix.python if system.python.startswith(f"{python}.")]
    text = f"Linux {system.machine}, {system.libc}, Python {system.python}"
    if not served:
        return Finding(
            Severity.NOTE,
            f"{text}: this Python is none of those the locks serve ({', '.join(plan.matrix.python)})",
            remedy="the environments are made with one that is",
        )
    return Finding(Severity.OK, text)
