"""Whether this host can run it: facts are gathered, checks judge them, a report says what is wrong and what mends it.

    python -m env doctor --variant cu130 --config tiny

Needs Python 3.11 and nothing else, since it must speak where nothing can be installed. Exit code 0 if there is nothing
worse than a warning, 3 if the environment is not the locked one, 5 if the host lacks something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env.doctor.checks import (
    capability,
    card_memory,
    clock,
    compiler,
    cuda,
    disk,
    drift,
    driver,
    executable,
    limits,
    local,
    memory,
    processors,
    shm,
    system,
    toolkit,
    user,
    writable,
)
from env.doctor.finding import Finding, Severity, exit_code
from env.doctor.host import Host
from env.doctor.plan import Plan

__all__ = ["CHECKS", "Check", "Finding", "Host", "Plan", "Severity", "examine", "exit_code", "main"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    """As it stands in the report; also the key under which JSON's readers find it."""

    judge: Callable[[Host, Plan], Finding | None]
    """Pure: facts and plan in, a finding out, or None where the check has nothing to say."""


CHECKS = (
    Check("system", system.judge),
    Check("driver", driver.judge),
    Check("capability", capability.judge),
    Check("cuda", cuda.judge),
    Check("card-memory", card_memory.judge),
    Check("containers", toolkit.judge),
    Check("compiler", compiler.judge),
    Check("user", user.judge),
    Check("writable", writable.judge),
    Check("executable", executable.judge),
    Check("local", local.judge),
    Check("disk", disk.judge),
    Check("memory", memory.judge),
    Check("shm", shm.judge),
    Check("processors", processors.judge),
    Check("limits", limits.judge),
    Check("clock", clock.judge),
    Check("environment", drift.judge),
)
"""Every check in the order of the report: the GPU, the tools, the folders, the sizes, the rest."""


def examine(host: Host, plan: Plan, checks: Sequence[Check] = CHECKS) -> list[tuple[str, Finding]]:
    """Judge a host; the checks that have something to say, in their order."""
    return [(check.name, finding) for check in checks if (finding := check.judge(host, plan)) is not None]


def main(argv: list[str]) -> int:
    """Run the doctor's command line; the exit code by the worst finding."""
    from env.doctor.cli import main as run

    return run(argv)
