"""Whether a cache did what it promises: a fresh process's first step, counted, against the manifest.

A count of zero misses proves nothing by itself: with the compiler off nothing is asked, and a graph that cannot be
cached counts as a bypass. So hits must equal the manifest's number, each promised key must have hit, and misses and
bypasses must be zero, for AOTAutograd, FX and Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from env.cache import explain
from env.cache.canonical import Json
from env.cache.manifest import Manifest
from env.errors import Exit, Failure

ANSWERS = {"autograd": "aot_autograd", "fx": "fx", "triton": "triton"}
"""How replays call the caches whose keys a manifest promises."""

MOST = 8
"""Fields of a key that are shown; when inputs change places, dozens differ for one reason."""

NAMES = {"autograd": "AOTAutograd", "fx": "FX", "triton": "Triton"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a replay shows."""

    promised: Mapping[str, int]
    """Hits by the manifest."""

    counted: Mapping[str, int]
    """Hits, misses and bypasses of the replay."""

    problems: tuple[str, ...]
    """What is not as promised; empty when everything is."""

    reasons: tuple[str, ...]
    """Why, as far as it can be said: the factors that differ, or else the fields of the keys."""

    def sentence(self) -> str:
        """The counts in a line."""
        parts = [
            f"{name} {self.counted.get(f'{cache}_hit', 0)} of {self.promised[f'{cache}_hit']} hit"
            f", {self.counted.get(f'{cache}_miss', 0)} missed"
            + (f", {self.counted[f'{cache}_bypass']} bypassed" if self.counted.get(f"{cache}_bypass") else "")
            for cache, name in NAMES.items()
        ]
        return "; ".join(parts)

    def failure(self, place: str) -> Failure:
        """The verdict as an error: what missed, and why."""
        why = self.reasons or ("every factor is equal and no key's details are known: run `nox -s doctor`",)
        return Failure(
            Exit.CACHE,
            f"the cache {place} does not hold what it promises here ({self.sentence()})",
            details=[*self.problems, *(line for reason in why for line in reason.splitlines())],
            hint="mend what is named above, or bake for this environment (`nox -s bake -- --config NAME`)",
        )


def judge(
    manifest: Manifest,
    replay: Mapping[str, Any],
    *,
    here: Mapping[str, Json] | None = None,
    sealed_details: Mapping[str, Sequence[str]] | None = None,
    variables: Mapping[str, Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Verdict:
    """Compare a replay's record with a manifest.

    `replay` holds `counts` (`autograd_hit`, `fx_miss`, …). It may hold `keys` (lists by the same names), `identity` (as
    `here`: see `Manifest.identity`) and `details` (what torch hashed for each key asked for).

    Raises:
        Failure: Exit.CACHE, when the record lacks counts.
    """
    counted = _counts(replay.get("counts"))
    problems = _count_problems(manifest.counts, counted)
    if "keys" in replay:
        problems += _key_problems(manifest, replay["keys"])
    reasons: list[str] = []
    if problems:
        identity = here if here is not None else replay.get("identity")
        if identity is not None:
            found = explain.differences(manifest.identity(), identity, variables=variables, environ=environ)
            reasons = [difference.sentence() for difference in found]
        if not reasons:
            reasons = _details(replay, manifest, sealed_details or {})
    return Verdict(promised=manifest.counts, counted=counted, problems=tuple(problems), reasons=tuple(reasons))


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(isinstance(count, int) for count in value.values()):
        raise Failure(Exit.CACHE, "the replay's record holds no counts, so it proves nothing")
    return {str(name): count for name, count in value.items()}


def _count_problems(promised: Mapping[str, int], counted: Mapping[str, int]) -> list[str]:
    found = []
    for name, hits in promised.items():
        cache = name.removesuffix("_hit")
        got = counted.get(name, 0)
        if got != hits:
            found.append(f"{NAMES[cache]}: {hits} hits promised, {got} counted")
        for kind, word in (("miss", "missed"), ("bypass", "could not be cached")):
            if counted.get(f"{cache}_{kind}", 0):
                found.append(f"{NAMES[cache]}: {counted[f'{cache}_{kind}']} {word}")
    if not any(promised.values()):
        found.append("the manifest promises no hit at all, so nothing can be verified by it")
    return found


def _key_problems(manifest: Manifest, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Promised keys that did not hit, and keys that were asked for and not promised."""
    found = []
    for cache, family in ANSWERS.items():
        promised, hit = set(manifest.keys[family]), set(keys.get(f"{cache}_hit", ()))
        if cache != "triton":  # kernels that come ready out of an FX entry are counted without their keys
            found += [f"{NAMES[cache]} did not hit {key}, which is promised" for key in sorted(promised - hit)]
        asked = hit | set(keys.get(f"{cache}_miss", ()))
        found += [f"{NAMES[cache]} was asked for {key}, which is not promised" for key in sorted(asked - promised)]
    return found


def _details(replay: Mapping[str, Any], manifest: Manifest, sealed: Mapping[str, Sequence[str]]) -> list[str]:
    """Every factor is equal, so what the keys were made of is compared, for the first key of each cache that missed."""
    ours = replay.get("details") or {}
    promised = {key for keys in manifest.keys.values() for key in keys}
    for letter in "af":  # AOTAutograd's first: FX's follow from it
        for key in sorted(key for key in ours if key.startswith(letter) and key not in promised):
            other = explain.nearest(key, ours[key], sealed)
            fields = explain.key_differences(ours[key], sealed[other]) if other is not None else []
            if fields:
                more = [f"and {len(fields) - MOST} more fields"] if len(fields) > MOST else []
                return [
                    f"the factors are equal, but {key} is not {other}, the nearest sealed key:",
                    *fields[:MOST],
                    *more,
                ]
    return []
