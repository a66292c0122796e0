"""The user id."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

HOMELESS = "without it kernels go to the temporary folder"


def judge(host: Host, _plan: Plan) -> Finding | None:
    """A user id that the password database does not know has no name and no home.

    Containers run as such ids (`docker run --user 12345`, OpenShift). What breaks, measured on torch 2.11.0 with uid
    12345: `import torch._dynamo` calls `getpass.getuser()` and dies of KeyError (OSError from Python 3.13 on), even
    where TORCHINDUCTOR_CACHE_DIR is set; with USER set it works, so the launch sets it (`env.cache.pins`). Without
    HOME, `Path.home()` raises RuntimeError.
    """
    user = host.user
    if user is None:
        return Finding(Severity.UNKNOWN, "the user could not be looked up", host.why("user"))
    if user.name is not None:
        return Finding(Severity.OK, f"{user.name} (uid {user.uid})")
    what = f"uid {user.uid} has no entry in the password database"
    if user.name_from is None:
        return Finding(
            Severity.NOTE,
            f"{what}, and no variable names the user: the launch sets USER, for torch, which dies without a name",
            remedy=f"to start torch in another way, `export USER=uid{user.uid}`"
            + ("" if user.home_from == "HOME" else f", and HOME as well: {HOMELESS}"),
        )
    if user.home_from != "HOME":
        return Finding(
            Severity.NOTE,
            f"{what}, and HOME is not set: {HOMELESS}",
            remedy="`export HOME=FOLDER`, one that can be written",
        )
    return Finding(Severity.OK, f"{what}; {user.name_from} and HOME stand in for it")
