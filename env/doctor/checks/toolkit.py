"""Containers and the NVIDIA container toolkit."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

INSTALL = "install `nvidia-container-toolkit` on the machine, then `nvidia-ctk runtime configure --runtime=docker`"

HAND_IN = (
    "start it with `--gpus all` (Docker), `--device nvidia.com/gpu=all` (Podman), `--nv` (Apptainer) or a limit of "
    "`nvidia.com/gpu` (Kubernetes)"
)


def judge(host: Host, plan: Plan) -> Finding | None:
    """A container sees the GPUs only if an engine with the toolkit hands them in; judged where containers are in play.

    Inside a container the files of the host's driver show (they are the kernel's), so that everything seems to be there
    but the device files: that is the mark of a container started without GPUs.
    """
    containers, nvidia = host.containers, host.nvidia
    if containers is None:
        return Finding(Severity.UNKNOWN, "containers could not be looked for", host.why("containers"))
    driver = nvidia is not None and nvidia.driver is not None
    if containers.inside is not None:
        if driver and nvidia is not None and nvidia.nodes == 0:
            return Finding(
                Severity.WARNING,
                f"this container ({containers.inside}) was started without GPUs, on a machine that has a driver",
                remedy=HAND_IN,
            )
        if not plan.containers:
            return Finding(Severity.OK, f"inside a container ({containers.inside})")
    if not plan.containers and (containers.engine is None or not driver):
        return None
    worst = Severity.ERROR if plan.containers else Severity.WARNING
    if containers.engine is None:
        return Finding(worst, "no container engine: neither `docker` nor `podman` is on PATH", remedy="install one")
    if containers.specifications or (containers.runtimes is not None and "nvidia" in containers.runtimes):
        how = "its runtime" if containers.runtimes and "nvidia" in containers.runtimes else "CDI files"
        return Finding(Severity.OK, f"`{containers.engine}` can hand GPUs to containers ({how})")
    if containers.toolkit is None:
        return Finding(
            worst,
            f"`{containers.engine}` is here, the NVIDIA container toolkit is not: no GPU in containers",
            remedy=INSTALL,
        )
    if containers.runtimes is None:
        return Finding(
            worst if plan.containers else Severity.UNKNOWN,
            f"the toolkit is at {containers.toolkit}, but `{containers.engine}` does not say whether it uses it",
            remedy="start the engine's daemon, or use a user that may talk to it",
        )
    return Finding(
        worst,
        f"the toolkit is at {containers.toolkit}, but `{containers.engine}` is not told to use it",
        remedy="`nvidia-ctk runtime configure --runtime=docker` and restart the engine",
    )
