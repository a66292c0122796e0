"""Whether the driver's CUDA library starts."""

from __future__ import annotations

from env.doctor.facts.nvidia import hidden
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

CODES = {
    100: ("no card is visible to this process", "look at `CUDA_VISIBLE_DEVICES` and the container's `--gpus`"),
    46: ("the cards are busy or in exclusive mode", "see who holds them: `nvidia-smi`"),
    802: ("the system is not ready yet", "on nodes with NVSwitch start the fabric manager of the driver's own version"),
    803: (
        "the CUDA library and the kernel's driver are of different versions",
        "reboot, or reload the driver: it was updated while loaded; in a container, start it anew",
    ),
    804: (
        "a newer CUDA library is forced upon a card that does not allow it",
        "take the cuda-compat library off the path: only data-centre cards can use it",
    ),
    999: ("the driver is in a state that it cannot name", "reload the driver, or reboot; the kernel's log says more"),
}
"""cuda.h, CUresult; the sentences are what each meant where it was met."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """`cuInit` must succeed where a driver is loaded: only it sees a mismatched library or a stopped fabric manager."""
    nvidia = host.nvidia
    if nvidia is None or (nvidia.driver is None and nvidia.cuda_init is None):
        return None
    if nvidia.cuda_init == 0:
        return Finding(Severity.OK, f"the CUDA library starts; its driver implements CUDA {nvidia.cuda_version or '?'}")
    if nvidia.cuda_init == 100 and hidden(nvidia):
        shown = f"`{nvidia.visible}`" if nvidia.visible else "empty"
        return Finding(Severity.NOTE, f"CUDA_VISIBLE_DEVICES is {shown}: the cards are hidden, runs go to the CPU")
    if nvidia.smi is not None and "mismatch" in nvidia.smi:
        return _error(803, nvidia.smi)
    if nvidia.cuda_init is None:
        if nvidia.nodes == 0:
            return None  # a container without GPUs: the check of the toolkit says it
        return Finding(
            Severity.WARNING,
            "the driver is loaded, but its CUDA library (libcuda.so.1) does not load or does not answer",
            (f"`nvidia-smi` says: {nvidia.smi}",) if nvidia.smi else (),
            remedy="install the driver's user-space libraries of the same version; in a container "
            "`NVIDIA_DRIVER_CAPABILITIES` must include `compute`",
        )
    return _error(nvidia.cuda_init, nvidia.smi, nvidia.visible)


def _error(code: int, smi: str | None, visible: str | None = None) -> Finding:
    what, remedy = CODES.get(code, ("see CUresult in cuda.h", "`nvidia-smi` and the kernel's log say more"))
    details = [f"`nvidia-smi` says: {smi}"] if smi else []
    if visible is not None:
        details.append(f"CUDA_VISIBLE_DEVICES is `{visible}`")
    return Finding(Severity.ERROR, f"the CUDA library does not start, error {code}: {what}", tuple(details), remedy)
