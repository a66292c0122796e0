"""The environment against its lock."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan
from env.errors import Exit


def judge(host: Host, plan: Plan) -> Finding | None:
    """The installed set must be the locked one, by every file's hash; a launch looks at sizes and time stamps only."""
    name, found = plan.variant.name, host.environment
    if found is None:
        return Finding(
            Severity.UNKNOWN,
            f"the environment of {name} could not be compared with its lock",
            host.why("environment") + host.why("drift"),
        )
    if found.python is None:
        return Finding(
            Severity.NOTE,
            f"the environment of {name} has not been made yet",
            remedy=f"`nox -s train -- --variant {name}` makes it",
        )
    if found.drift:
        return Finding(Severity.ERROR, found.drift, found.packages, remedy=found.mend, code=Exit.DRIFT)
    if not found.compared:
        return Finding(
            Severity.UNKNOWN, f"the environment of {name} could not be compared with its lock", host.why("drift")
        )
    version = f", Python {found.version}" if found.version else ""
    return Finding(Severity.OK, f"the environment of {name} is the locked one, every file compared{version}")
