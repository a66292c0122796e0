"""`python tests/bars.py RUN/summary.json`: whether a run of the tiny preset reached what the project promises of it.

A program, not a test: the run takes minutes, and CI has just made it. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def bars(summary: Mapping[str, Any]) -> list[tuple[str, float, str, float]]:
    """Each promise: what it is of, what was found, `>=`, `<=` or `<`, and the bar."""
    tau, steady = summary["tau"], summary["tau_without_loops"]
    same = min(summary["identical_responses"].values())
    return [
        ("the target's held-out loss, nats a byte", summary["target"]["held_out_loss"], "<=", 1.6),
        ("τ", tau["trained"], ">=", 6.0),
        ("τ without loops", steady["trained"], ">=", 5.0),
        ("τ without loops, in prompt lookup's", steady["trained"] / steady["prompt lookup"], ">=", 1.5),
        ("τ of the untrained drafter", tau["untrained"], "<=", 1.3),
        ("τ with blanked features", tau["blanked features"], "<", tau["trained"] / 2),
        ("responses that are the target's own", same, ">=", summary["prompts"]),
        ("prompts", summary["prompts"], ">=", 16),
    ]


def missed(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each bar that the run did not reach."""
    reached = {">=": float.__ge__, "<=": float.__le__, "<": float.__lt__}
    return [
        f"{name}: {found:g}, and must be {sign} {bar:g}"
        for name, found, sign, bar in bars(summary)
        if not reached[sign](float(found), float(bar))
    ]


def main(place: Path) -> int:
    """Print every bar and what was found; 1 when one was missed."""
    summary = json.loads(place.read_text(encoding="utf-8"))
    for name, found, sign, bar in bars(summary):
        print(f"{name:<42}{found:>8.3f}  {sign:<2} {bar:g}")
    for sentence in (short := missed(summary)):
        print(f"error: {sentence}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
