"""The promises that CI holds a run of the tiny preset to: each is seen refusing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bars
import pytest

REACHED: dict[str, Any] = {
    "target": {"held_out_loss": 1.47},
    "tau": {"trained": 8.4, "blanked features": 1.3, "untrained": 1.0, "prompt lookup": 4.2},
    "tau_without_loops": {"trained": 7.6, "blanked features": 1.3, "untrained": 1.0, "prompt lookup": 2.7},
    "identical_responses": {"trained": 18, "blanked features": 18, "untrained": 18, "prompt lookup": 18},
    "prompts": 18,
}


@pytest.mark.parametrize(
    ("part", "name", "value", "sentence"),
    [
        ("target", "held_out_loss", 1.61, "the target's held-out loss, nats a byte: 1.61, and must be <= 1.6"),
        ("tau", "trained", 5.9, "τ: 5.9, and must be >= 6"),
        ("tau", "trained", float("nan"), "τ: nan, and must be >= 6"),
        ("tau_without_loops", "trained", 4.9, "τ without loops: 4.9, and must be >= 5"),
        ("tau_without_loops", "prompt lookup", 6.0, "τ without loops, in prompt lookup's: 1.26667, and must be >= 1.5"),
        ("tau", "untrained", 1.31, "τ of the untrained drafter: 1.31, and must be <= 1.3"),
        ("tau", "blanked features", 4.2, "τ with blanked features: 4.2, and must be < 4.2"),
        ("identical_responses", "untrained", 17, "responses that are the target's own: 17, and must be >= 18"),
    ],
)
def test_a_run_below_a_bar_is_refused(part: str, name: str, value: float, sentence: str, tmp_path: Path) -> None:
    summary = {**REACHED, part: {**REACHED[part], name: value}}
    assert sentence in bars.missed(summary)
    place = tmp_path / "summary.json"
    place.write_text(json.dumps(summary))
    done = subprocess.run([sys.executable, bars.__file__, place], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"error: {sentence}\n" in done.stderr


def test_a_run_above_all_bars_passes() -> None:
    assert bars.missed(REACHED) == []
