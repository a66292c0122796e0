"""A first step's time is told by torch's own events, and drawn cold against baked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import timeline
from env.errors import Exit, Failure

ROOT = Path(__file__).parent.parent
S = 10**9


def outcomes(**seconds: float) -> dict[str, Any]:
    def one(first: float, *parts: tuple[str, float]) -> dict[str, Any]:
        spans, at = [], 0.0
        for name, length in parts:
            spans.append([name, at, at + length])
            at += length
        before = dict.fromkeys(timeline.BEFORE, 1.0)
        return {"seconds": {**before, "first_step": first}, "timeline": spans, "device": "cpu"}

    return {
        "config": "tiny",
        "cold": one(10.0, ("tracing", 1.0), ("Inductor", 3.0), ("compilers", 5.5), ("running", 0.5)),
        "baked": one(1.0, ("tracing", 0.4), ("loading", 0.1), ("running", 0.5)),
    }


def test_at_each_moment_the_part_that_began_last_counts_and_the_rest_is_the_step_itself() -> None:
    spans = [
        ("dynamo", 1 * S, 9 * S),
        ("backend_compile", 2 * S, 8 * S),
        ("inductor_compile", 3 * S, 7 * S),
        ("async_compile.wait", 4 * S, 6 * S),
        ("gc", 4 * S, 5 * S),  # no phase of a compilation
        ("dynamo", -5 * S, -1 * S),  # before the step: the warm-up's
    ]
    found = timeline.segments(spans, 0, 10 * S)
    assert [name for name, _, _ in found] == [
        "running", "tracing", "AOTAutograd", "Inductor", "compilers", "Inductor", "AOTAutograd", "tracing", "running",
    ]  # fmt: skip
    assert found[0][1:] == (0.0, 1.0)
    assert all(one[2] == other[1] for one, other in itertools.pairwise(found)), "without a gap"
    assert timeline.totals(found)["compilers"] == 2.0
    assert sum(timeline.totals(found).values()) == 10.0
    assert timeline.segments([], 0, S) == [("running", 0.0, 1.0)]


def test_an_event_belongs_to_the_phase_with_the_longest_beginning_of_its_name() -> None:
    assert timeline.phase("compile_fx.<locals>.bw_compiler") == "AOTAutograd"
    assert timeline.phase("compile_file") == "compilers"
    assert timeline.phase("compile_attempt_0") == "tracing"
    assert timeline.phase("AOTAutogradCache.inductor_load") == "loading"
    assert timeline.phase("AOTAutogradCache.lookup") == "AOTAutograd"
    assert timeline.phase("CachingAutotuner.benchmark_all_configs") == "benchmarks"
    assert timeline.phase("gc") is None


def test_torchs_own_events_are_collected_while_it_compiles_and_no_longer() -> None:
    torch._dynamo.reset()
    wrap: Any = torch.compile
    begun = timeline.now()
    with timeline.watched() as spans:
        wrap(lambda x: x + 1, backend="eager")(torch.ones(2))
    count = len(spans)
    wrap(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len(spans) == count
    assert any(timeline.phase(name) == "tracing" and begun <= start <= end for name, start, end in spans)
    torch._dynamo.reset()


def test_a_torch_that_tells_its_events_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import utils

    monkeypatch.delattr(utils, "ChromiumEventLogger")
    with pytest.raises(Failure, match="in a way that was never read"), timeline.watched():
        pass


def test_the_table_and_the_picture_hold_both_steps(tmp_path: Path) -> None:
    said = timeline.lines(outcomes())
    assert said[0].split() == ["seconds", "cold", "baked"]
    assert said[1].split() == ["first", "step", "10.00", "1.00"]
    assert any(line.split()[-2:] == ["5.50", "0.00"] for line in said), "g++, Triton and ptxas"
    assert not any("benchmarking" in line for line in said), "a phase that neither had is left out"
    timeline.draw(outcomes(), tmp_path / "first.png")
    again = (tmp_path / "first.png").read_bytes()
    assert again.startswith(b"\x89PNG")
    assert len(again) < 150_000
    assert json.loads((tmp_path / "first.json").read_text()) == outcomes()
    timeline.draw(outcomes(), tmp_path / "first.png")
    assert (tmp_path / "first.png").read_bytes() == again


def test_a_process_that_could_not_take_its_step_says_which_and_why() -> None:
    with pytest.raises(Failure, match="the cold process could not take its step") as caught:
        timeline.compare("no-such-preset", "cpu", {"TORCHINDUCTOR_CACHE_DIR": "x"}, {"PYTHONPATH": str(ROOT)})
    assert caught.value.code is Exit.USAGE
    assert "no-such-preset" in str(caught.value)


def test_the_picture_in_the_documentation_is_of_the_figures_beside_it(tmp_path: Path) -> None:
    figures = json.loads((ROOT / "docs/first-step.json").read_text())
    timeline.draw(figures, tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size == pytest.approx(
        (ROOT / "docs/first-step.png").stat().st_size, rel=0.2
    )
