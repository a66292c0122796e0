"""The processors that this process may use."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan


def judge(host: Host, _plan: Plan) -> Finding | None:
    """Thread pools are sized by the machine's processors; under a control group's quota that is too many.

    The surplus threads use the quota up and then all of them stand still until the next period: slower than few
    threads. Affinity (`taskset`, cpusets) torch sees itself; a quota nobody sees.
    """
    found = host.processors
    if found is None or (found.allowed is None and found.present is None):
        return Finding(Severity.UNKNOWN, "the processors could not be counted", host.why("processors"))
    usable = found.allowed if found.allowed is not None else found.present
    assert usable is not None
    vector = [flag for flag in (host.system.flags if host.system else ()) if flag.startswith(("avx", "amx", "sve"))]
    details = (f"vector instructions: {' '.join(vector)}",) if vector else ()
    if found.quota is not None and 0 < found.quota < usable - 0.5:
        threads = max(1, int(found.quota))
        return Finding(
            Severity.WARNING,
            f"{usable} processors are visible, time is granted for {found.quota:g}",
            details,
            remedy=f"`export OMP_NUM_THREADS={threads} TORCHINDUCTOR_COMPILE_THREADS={threads}`, or raise the quota",
        )
    share = f" of {found.present}" if found.present is not None and found.present != usable else ""
    return Finding(Severity.OK, f"{usable}{share} processor{'s' if usable != 1 or share else ''}", details)
