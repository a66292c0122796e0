"""The cards' memory against the configuration's need."""

from __future__ import annotations

from env.doctor.facts.nvidia import usable
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.need import CONTEXT, human
from env.doctor.plan import Plan, numbers

BFLOAT16 = (8, 0)
"""The first capability with bfloat16 arithmetic (CUDA C++ Programming Guide, "Compute Capabilities")."""


def judge(host: Host, plan: Plan) -> Finding | None:
    """One card holds drafter and target, or one holds the drafter and another the target.

    An error only where the drafter's weights and optimizer state alone do not fit, which are exact; activations are an
    estimate.
    """
    need, cards = plan.need, usable(host.nvidia) if host.nvidia is not None else None
    if need is None or not cards:
        return None
    old = [card for card in cards if (have := numbers(card.capability)) is not None and have < BFLOAT16]
    if old and need.compute == "bfloat16":
        return Finding(
            Severity.WARNING,
            f"{old[0].name} ({old[0].capability}) has no bfloat16 arithmetic, which `{need.name}` computes in",
            remedy='set `compute = "float32"` under `[precision]`, or train on a card of capability 8.0 or newer',
        )
    sizes = sorted((card.memory_mib * 2**20 for card in cards if card.memory_mib is not None), reverse=True)
    if not sizes:
        return Finding(Severity.UNKNOWN, "the cards' memory could not be read")
    drafter, target = need.drafter + CONTEXT, need.target + CONTEXT
    both = need.drafter + need.target + CONTEXT
    details = (
        f"drafter {human(need.drafter)}, of which weights and optimizer state {human(need.state)}",
        f"target {human(need.target)}, CUDA itself {human(CONTEXT)}",
    )
    if both <= sizes[0]:
        return Finding(Severity.OK, f"`{need.name}` needs about {human(both)} of a card's {human(sizes[0])}", details)
    if len(sizes) > 1 and drafter <= sizes[0] and target <= sizes[1]:
        return Finding(
            Severity.OK,
            f"`{need.name}` needs a card for the drafter ({human(drafter)}) and one for the target ({human(target)})",
            details,
        )
    if need.state + CONTEXT > sizes[0]:
        return Finding(
            Severity.ERROR,
            f"`{need.name}` has {human(need.state)} of weights and optimizer state, the card {human(sizes[0])}",
            details,
            remedy="train on a larger card, on several with `optimizer.shard = true`, or a smaller configuration",
        )
    return Finding(
        Severity.WARNING,
        f"`{need.name}` needs about {human(both)} of a card, or two cards; the largest has {human(sizes[0])}",
        details,
        remedy="lower `shapes.rows`, `shapes.anchors` or `loss.chunk_blocks`, or put the target on another card",
    )
