"""How good a drafter is: acceptance in real speculative decoding of held-out prompts, and proof of equal output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from dflash.decode import Proposer, Reference, Response, greedy, speculate
from dflash.model import Drafter
from dflash.proposers import Drafting, PromptLookup

TAIL = 64
"""Tokens at the end of a response that are searched for a period."""
LONGEST_PERIOD = 32
"""A response whose tail repeats every 32 tokens or fewer loops: any drafter scores high on it."""

Report = Callable[[str, int, int], None]
"""Called with who decodes, tokens done and tokens at most; may raise to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where speculative output first parts from the target's own."""

    prompt: int
    """Which prompt, counted from 0."""
    place: int
    """Which token of the response, counted from 0."""
    expected: int | None
    """The target's own token; None where its response had ended."""
    found: int | None
    """The speculative one; None where that response had ended."""
    gap: float | None
    """How far the target's own token led there, in logits: a near-tie is rounding, a wide gap is a defect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What one proposer reached on all prompts."""

    name: str
    """Who proposed."""
    tau: float | None
    """Acceptance length: tokens kept a cycle, bonus included; mean over responses of each response's mean (DFlash,
    section 5). Tokens past the end of a response are not counted; None when no response had a cycle."""
    tau_without_loops: float | None
    """The same over the responses that do not loop; None when all do."""
    acceptance: tuple[float, ...]
    """For slots 1 to B - 1, the share of cycles in which the slot was accepted, over all cycles in which the slot lay
    within the response."""
    cycles: int
    """Forward passes of the target after the prefill, summed over responses."""
    identical: int
    """Responses equal to the target's own, token for token."""
    differences: tuple[Difference, ...]
    """The first difference of each other response."""
    seconds: float
    """Wall-clock time, drafting and verifying, all prompts in shared forward passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Everything that one evaluation measured; plain data, so `dataclasses.asdict` of it is JSON."""

    block: int
    """Tokens of a block (B)."""
    prompts: int
    """Held-out prompts."""
    new_tokens: int
    """Tokens asked for after each."""
    dtype: str
    """Number format of the target's weights."""
    looping: float
    """Share of the target's own responses that end in a loop."""
    smallest_gap: float
    """Least lead of a chosen token over the second best, in logits, over all responses of the target."""
    greedy_seconds: float
    """Wall-clock time of the target's own decoding, a token a pass, all prompts in shared forward passes."""
    decoders: tuple[Decoder, ...]
    """`trained`, `blanked features`, `untrained` and `prompt lookup`, in this order."""

    def of(self, name: str) -> Decoder:
        """The proposer of that name."""
        return next(decoder for decoder in self.decoders if decoder.name == name)


def evaluate(
    model: PreTrainedModel,
    drafter: Drafter,
    untrained: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    block: int,
    stop: frozenset[int] = frozenset(),
    rows: int = 32,
    report: Report | None = None,
) -> Evaluation:
    """Decode every prompt by the target alone and with each proposer, and compare.

    Args:
        model: the target; its dtype is the evaluation's, and equality is exact in float32 only.
        drafter: the trained drafter.
        untrained: one of the same sizes with fresh weights.
        prompts: held-out prompts, token ids.
        new_tokens: tokens to add to each.
        block: tokens of a block (B).
        stop: tokens that end a response.
        rows: prompts in one forward pass.
        report: see `Report`.
    """
    pieces = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    total = len(prompts) * new_tokens

    def counting(name: str) -> Callable[[int], None]:
        done = 0

        def add(tokens: int) -> None:
            nonlocal done
            done += tokens
            if report is not None:
                report(name, done, total)

        return add

    count = counting("target alone")
    began = time.perf_counter()
    references = [one for piece in pieces for one in greedy(model, piece, new_tokens, stop=stop, report=count)]
    greedy_seconds = time.perf_counter() - began
    loops = [looping(reference.tokens) for reference in references]

    proposers: dict[str, Callable[[], Proposer]] = {
        "trained": lambda: Drafting(drafter, model, block),
        "blanked features": lambda: Drafting(drafter, model, block, blank=True),
        "untrained": lambda: Drafting(untrained, model, block),
        "prompt lookup": lambda: PromptLookup(model, block),
    }
    decoders = []
    for name, make in proposers.items():
        count = counting(name)
        began = time.perf_counter()
        responses = [
            one for piece in pieces for one in speculate(model, make(), piece, new_tokens, stop=stop, report=count)
        ]
        decoders.append(judge(name, responses, references, loops, block, time.perf_counter() - began))
    return Evaluation(
        block=block,
        prompts=len(prompts),
        new_tokens=new_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        looping=sum(loops) / len(loops),
        smallest_gap=min(gap for reference in references for gap in reference.gaps),
        greedy_seconds=greedy_seconds,
        decoders=tuple(decoders),
    )


def judge(
    name: str,
    responses: Sequence[Response],
    references: Sequence[Reference],
    loops: Sequence[bool],
    block: int,
    seconds: float,
) -> Decoder:
    """Condense one proposer's responses to numbers; `loops` says which responses to leave out of one τ."""
    pairs = enumerate(zip(responses, references, strict=True))
    parted = [difference(prompt, response, reference) for prompt, (response, reference) in pairs]
    differences = tuple(one for one in parted if one is not None)
    steady = [response for response, loop in zip(responses, loops, strict=True) if not loop]
    return Decoder(
        name=name,
        tau=acceptance_length(responses),
        tau_without_loops=acceptance_length(steady),
        acceptance=acceptance(responses, block),
        cycles=sum(len(response.kept) for response in responses),
        identical=len(responses) - len(differences),
        differences=differences,
        seconds=seconds,
    )


def acceptance_length(responses: Sequence[Response]) -> float | None:
    """τ: mean over responses of the mean tokens kept a cycle; None when no response has a cycle."""
    means = [sum(response.kept) / len(response.kept) for response in responses if response.kept]
    return sum(means) / len(means) if means else None


def acceptance(responses: Sequence[Response], block: int) -> tuple[float, ...]:
    """Share of cycles that accepted slot k, for k = 1 to B - 1, over the cycles whose slot k lay in the response."""
    seen, accepted = [0] * block, [0] * block
    for response in responses:
        left = len(response.tokens) - 1
        for kept, matches in zip(response.kept, response.accepted, strict=True):
            for slot in range(1, min(left, block - 1) + 1):
                seen[slot] += 1
                accepted[slot] += matches >= slot
            left -= kept
    return tuple(hits / max(tries, 1) for hits, tries in zip(accepted[1:], seen[1:], strict=True))


def looping(tokens: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat with an exact period of 32 or less; a shorter response does not loop."""
    tail = tokens[-TAIL:]
    return len(tail) == TAIL and any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))


def difference(prompt: int, response: Response, reference: Reference) -> Difference | None:
    """The first place where a response is not the target's own, or None."""
    if response.tokens == reference.tokens:
        return None
    ours, theirs = response.tokens, reference.tokens
    shorter = min(len(ours), len(theirs))
    place = next((at for at in range(shorter) if ours[at] != theirs[at]), shorter)
    return Difference(
        prompt=prompt,
        place=place,
        expected=theirs[place] if place < len(theirs) else None,
        found=ours[place] if place < len(ours) else None,
        gap=reference.gaps[place] if place < len(theirs) else None,
    )
