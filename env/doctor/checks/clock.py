"""The clock."""

from __future__ import annotations

import datetime

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

SLACK = 300.0
"""Seconds that clocks of two healthy machines may differ by: Kerberos' limit, and far above what NTP leaves."""

DAY = 86_400.0
"""From here on certificates are refused as not yet valid: authorities date them back by an hour or so."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """The clock must not stand before the project's own newest file or commit.

    A clock that lost its time (a dead battery, a resumed virtual machine) makes certificates invalid, so nothing
    installs, and time stamps useless, by which the gate decides what to hash again.
    """
    clock = host.clock
    if clock is None:
        return Finding(Severity.UNKNOWN, "the clock could not be compared", host.why("clock"))
    marks = [
        (time, what)
        for time, what in (
            (clock.newest, clock.newest_file or "the newest file"),
            (clock.commit, "the checked-out commit"),
        )
        if time is not None
    ]
    now = _text(clock.now)
    if not marks:
        return Finding(Severity.UNKNOWN, f"the clock says {now}; there is nothing to compare it with")
    newest, what = max(marks)
    late = newest - clock.now
    if late > SLACK:
        return Finding(
            Severity.ERROR if late > DAY else Severity.WARNING,
            f"the clock says {now}, but {what} is of {_text(newest)}",
            remedy="set the clock: `timedatectl set-ntp true` or `chronyc makestep`; for a container, on its host",
        )
    if clock.synchronised is False:
        return Finding(
            Severity.NOTE,
            f"the clock says {now}, and the kernel says that nothing keeps it right",
            remedy="where several machines train together, run chrony or systemd-timesyncd: their logs are compared",
        )
    kept = ", synchronised" if clock.synchronised else ""
    return Finding(Severity.OK, f"the clock says {now}{kept}")


def _text(time: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{time:.0f} s since 1970"
