"""The cards' compute capability against what the variant's wheels are built for."""

from __future__ import annotations

from env.doctor.facts.nvidia import Card, hidden, usable
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan, count, fitting, runs_on


def judge(host: Host, plan: Plan) -> Finding | None:
    """Every card must be one that the wheels have code for.

    Else the first kernel fails with "no kernel image is available", while `torch.cuda.is_available()` stays true and
    torch only warns. The wheels' list is torch._C._cuda_getArchFlags() (env/variants.toml).
    """
    nvidia, variant = host.nvidia, plan.variant
    if nvidia is None:
        return Finding(Severity.UNKNOWN, "the cards could not be looked for", host.why("nvidia"))
    cards = usable(nvidia)
    if not cards:
        if nvidia.driver is None or hidden(nvidia):
            return None  # another check has said it
        if cards == ():
            return Finding(Severity.WARNING, "the driver is loaded, but shows no card", _said(nvidia.smi))
        return Finding(
            Severity.UNKNOWN,
            "the driver is loaded, but neither `nvidia-smi` nor the CUDA library names the cards",
            _said(nvidia.smi),
        )
    unknown = tuple(card for card in cards if card.capability is None)
    unfit = tuple(card for card in cards if card.capability and not runs_on(card.capability, variant.capabilities))
    built = " ".join(variant.capabilities)
    if unfit:
        return Finding(
            Severity.ERROR,
            f"{count(unfit)}: {variant.name}'s torch {variant.torch} has no code for that capability",
            (f"built for {built}",),
            remedy=_remedy(host, plan, unfit),
        )
    if unknown:
        return Finding(Severity.UNKNOWN, f"{count(unknown)}: the capability could not be read", (f"built for {built}",))
    kinds = {card.name for card in cards}
    mixed = "the cards differ: each kind needs a compile cache of its own" if len(kinds) > 1 else None
    return Finding(
        Severity.OK if mixed is None else Severity.NOTE,
        f"{count(cards)}: {variant.name} has code for {'them' if len(cards) > 1 else 'it'}",
        (f"built for {built}", *((mixed,) if mixed else ())),
    )


def _said(smi: str | None) -> tuple[str, ...]:
    return (f"`nvidia-smi` says: {smi}",) if smi else ()


def _remedy(host: Host, plan: Plan, unfit: tuple[Card, ...]) -> str:
    ways = []
    others = [found for found in fitting(host, plan.matrix) if found != plan.variant]
    able = [
        variant
        for variant in plan.matrix.variants.values()
        if all(runs_on(card.capability or "", variant.capabilities) for card in unfit)
    ]
    if others:
        ways.append(f"use `--variant {others[0].name}` (torch {others[0].torch})")
    elif able:
        ways.append(f"update the driver to {able[0].driver} or newer and use `--variant {able[0].name}`")
    assert host.nvidia is not None
    fit = [str(index) for index, card in enumerate(host.nvidia.cards or ()) if card not in unfit]
    if fit:
        # By default CUDA numbers the fastest card first, `nvidia-smi` by the bus.
        chosen = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={','.join(fit)}"
        ways.append(f"hide the card{'s' if len(unfit) > 1 else ''}: `export {chosen}`")
    return ", or ".join(ways) if ways else "no variant runs on it: train on another card, or on the CPU"
