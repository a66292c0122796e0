"""The driver against the variant's CUDA."""

from __future__ import annotations

from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan, count, fitting, numbers


def judge(host: Host, plan: Plan) -> Finding | None:
    """The driver must be new enough for the variant's CUDA runtime.

    Floors: NVIDIA, CUDA Toolkit release notes, table of minimum driver versions (env/variants.toml). A runtime newer
    than the driver fails at the first CUDA call with error 35, which torch reports as "driver too old". Data-centre
    cards can be given a newer user-space driver (package cuda-compat); then `cuInit` answers with a CUDA version at or
    above the variant's, and that is believed more than the kernel driver's number.
    """
    nvidia, variant = host.nvidia, plan.variant
    if nvidia is None:
        return Finding(Severity.UNKNOWN, "the NVIDIA driver could not be looked for", host.why("nvidia"))
    if nvidia.driver is None:
        return _none(nvidia.bus, plan) if not nvidia.cards else _unseen(count(nvidia.cards))
    have = numbers(nvidia.driver)
    if have is None:
        return Finding(Severity.UNKNOWN, f"the driver's version reads `{nvidia.driver}`, which is no version")
    if have >= variant.driver_floor:
        return Finding(
            Severity.OK,
            f"driver {nvidia.driver}; {variant.name} needs {variant.driver} or newer",
            (f"read from {nvidia.driver_from}",) if nvidia.driver_from else (),
        )
    library, wanted = numbers(nvidia.cuda_version), numbers(variant.cuda)
    if nvidia.cuda_init == 0 and library is not None and wanted is not None and library >= wanted:
        return Finding(
            Severity.OK,
            f"driver {nvidia.driver} with a CUDA library of {nvidia.cuda_version}, as {variant.name} needs it",
        )
    other = next((found for found in fitting(host, plan.matrix) if found != variant), None)
    instead = f", or use `--variant {other.name}` (torch {other.torch}, driver {other.driver})" if other else ""
    return Finding(
        Severity.ERROR,
        f"driver {nvidia.driver} is older than {variant.name} needs ({variant.driver})",
        remedy=f"update the driver to {variant.driver} or newer{instead}",
    )


def _none(bus: int | None, plan: Plan) -> Finding:
    if bus:
        cards = "an NVIDIA card is" if bus == 1 else f"{bus} NVIDIA cards are"
        return Finding(
            Severity.WARNING,
            f"{cards} on the bus, but no driver is loaded: runs would go to the CPU",
            remedy=f"install the NVIDIA driver, {plan.variant.driver} or newer, on the machine, not in a container",
        )
    return Finding(Severity.NOTE, "no NVIDIA driver and no card: runs go to the CPU")


def _unseen(cards: str) -> Finding:
    return Finding(Severity.UNKNOWN, f"{cards} answers, but nothing says which driver is loaded")
