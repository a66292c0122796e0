"""What a host is judged for: a variant of the matrix, a configuration, and what else was asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from env.doctor.facts.nvidia import Card, usable
from env.doctor.host import Host
from env.doctor.need import Need
from env.variants import Matrix, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The question that is put to every check."""

    variant: Variant
    """The set of packages that shall run here."""

    matrix: Matrix
    """All sets, for naming one that would."""

    need: Need | None = None
    """The configuration's need; None where none was asked about."""

    containers: bool = False
    """Whether containers with GPUs shall be started on this host."""


def numbers(version: str | None) -> tuple[int, ...] | None:
    """A dotted version as numbers that compare; None for what is no version."""
    return (
        tuple(int(part) for part in version.split(".")) if version and re.fullmatch(r"\d+(\.\d+)*", version) else None
    )


def runs_on(capability: str, built_for: tuple[str, ...]) -> bool:
    """Whether wheels with code for these architectures run on a card of this capability.

    CUDA C++ Programming Guide, "Binary Compatibility": machine code for X.y runs on X.z with z >= y, never on another
    major; so sm_86 serves a 8.9 card. "PTX Compatibility": compute_XY is compiled by the driver for anything newer.
    Architecture-specific code (sm_90a) runs on that one capability only.
    """
    card = numbers(capability)
    if card is None or len(card) != 2:
        return False
    for architecture in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        code = (int(match[2]), int(match[3]))
        if match[4] == "a":
            fits = card == code
        elif match[1] == "compute" and not match[4]:
            fits = card >= code
        else:
            fits = card[0] == code[0] and card[1] >= code[1]
        if fits:
            return True
    return False


def fitting(host: Host, matrix: Matrix) -> list[Variant]:
    """The variants that this host's driver and all its cards would run, the default first, then the newest CUDA."""
    if host.nvidia is None:
        return []
    driver, cards = numbers(host.nvidia.driver), usable(host.nvidia) or ()
    found = [
        variant
        for variant in matrix.variants.values()
        if (driver is None or driver >= variant.driver_floor)
        and all(runs_on(card.capability, variant.capabilities) for card in cards if card.capability)
    ]
    return sorted(found, key=lambda variant: (variant.name == matrix.default, numbers(variant.cuda)), reverse=True)


def count(cards: tuple[Card, ...]) -> str:
    """Cards as people say them: `8 x NVIDIA H200 (9.0)`."""
    kinds: dict[str, int] = {}
    for card in cards:
        name = f"{card.name} ({card.capability})" if card.capability else card.name
        kinds[name] = kinds.get(name, 0) + 1
    return ", ".join(name if number == 1 else f"{number} x {name}" for name, number in kinds.items())
